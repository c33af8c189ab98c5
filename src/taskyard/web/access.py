"""Access to the page: tokens, cookies, the Host and Origin of a request, and response headers.

A token is in the address that `taskyard web` prints. The first request exchanges it for a cookie.
Both are derived from a secret in a private file of the state directory, which lives as long as the
page. So `taskyard web --invite viewer` can print a token without asking the page.

A request of another web site in the same browser carries no Origin or Host of this page, and is
refused before it reaches anything else. GET changes nothing.
"""

from __future__ import annotations

import hmac
import secrets
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode, urlsplit

from msgspec import MsgspecError, Struct, json
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from taskyard.errors import UserError
from taskyard.journal.files import create_private
from taskyard.net.keys import read_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Private to the user, like the keys.
PAGE_FILE: Final = "page.json"
_SECRET_BYTES: Final = 32

#: Paths that a supervisor asks without a token. They contain nothing of the tasks.
OPEN_PATHS: Final = ("/healthz", "/readyz")

#: The path that takes a token as bearer, for programs that collect metrics.
BEARER_PATHS: Final = ("/metrics",)

_SAFE_METHODS: Final = ("GET", "HEAD")

#: Style elements that Plotly makes: an empty one, which its script fills, and one for its bar.
_PLOTLY_STYLES: Final = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",
    "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='",
)

#: Only files of the page itself: no inline script, no frame, no other site.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; "
    f"style-src 'self' {' '.join(_PLOTLY_STYLES)}; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer`, a form of this page would be sent with the Origin `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Role(StrEnum):
    """The permission of a token: to act, or only to look."""

    OPERATOR = "operator"
    VIEWER = "viewer"


class Secret:
    """Derives tokens and cookies. Equal secrets derive equal ones."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def token(self, role: Role) -> str:
        """Return the token in the address for a role."""
        return self._derived(f"token {role}")

    def cookie(self, role: Role) -> str:
        """Return the value of the cookie for a role."""
        return self._derived(f"cookie {role}")

    def role_of_token(self, token: str) -> Role | None:
        return self._match(token, self.token)

    def role_of_cookie(self, value: str) -> Role | None:
        return self._match(value, self.cookie)

    def _derived(self, purpose: str) -> str:
        return hmac.digest(self._secret, purpose.encode(), "sha256").hex()

    def _match(self, given: str, derive: Callable[[Role], str]) -> Role | None:
        """Compare with all roles, so that the time reveals nothing."""
        equal = [
            role for role in Role if hmac.compare_digest(given.encode(), derive(role).encode())
        ]
        return equal[0] if equal else None


class PageFile(Struct):
    """The content of the page's file in the state directory."""

    #: The page's address, without a token.
    address: str
    secret: bytes


def create_secret(state: Path, address: str) -> Secret:
    """Create the secret of a page. That of an earlier one becomes worthless."""
    made = PageFile(address, secrets.token_bytes(_SECRET_BYTES))
    create_private(state / PAGE_FILE, json.encode(made))
    return Secret(made.secret)


def invitation(state: Path, role: Role) -> str:
    """Return the address of the running page with a token. Raises UserError."""
    path = state / PAGE_FILE
    try:
        found = json.decode(read_private(path), type=PageFile)
    except (FileNotFoundError, MsgspecError) as error:
        raise UserError(
            f"no page is running on {state} (start one with `taskyard web --state {state}`)"
        ) from error
    return f"{found.address}/?token={Secret(found.secret).token(role)}"


def remove_secret(state: Path) -> None:
    (state / PAGE_FILE).unlink(missing_ok=True)


class Guard:
    """Checks every request before the page sees it, and completes every response."""

    def __init__(self, app: ASGIApp, secret: Secret, hosts: Iterable[str], port: int) -> None:
        """Guard an app. `hosts` are the names by which it is reached, without port."""
        self._app = app
        self._secret = secret
        names = [f"[{host}]" if ":" in host else host for host in hosts]
        self._hosts = {f"{name}:{port}" for name in names}
        if port == _HTTP_PORT:
            self._hosts |= set(names)
        #: Cookies don't tell ports apart, and there may be several pages on one machine.
        self.cookie_name = f"taskyard-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._check(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> Response | None:  # noqa: PLR0911  # a check each
        """Return a refusal or a redirect. None if the request may pass, with its role set."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host.lower() not in self._hosts:
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST, "unknown Host")
        is_safe = scope["method"] in _SAFE_METHODS
        if not is_safe and urlsplit(headers.get("origin", "")).netloc.lower() != host.lower():
            return _refusal(HTTPStatus.FORBIDDEN, "the Origin is not this page")
        path = scope["path"]
        if path in OPEN_PATHS:
            return None
        query = QueryParams(scope["query_string"])
        if is_safe and "token" in query:
            return self._exchange(path, query)
        role = self._role(headers, path)
        if role is None:
            return _refusal(HTTPStatus.UNAUTHORIZED, _REFUSED)
        if not is_safe and role is not Role.OPERATOR:
            return _refusal(HTTPStatus.FORBIDDEN, "a viewer can't change anything")
        scope["role"] = role
        return None

    def _role(self, headers: Headers, path: str) -> Role | None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if path in BEARER_PATHS and kind.lower() == "bearer":
            return self._secret.role_of_token(token)
        value = cookie_parser(headers.get("cookie", "")).get(self.cookie_name, "")
        return self._secret.role_of_cookie(value)

    def _exchange(self, path: str, query: QueryParams) -> Response:
        """Set the cookie and redirect to the same view without the token."""
        role = self._secret.role_of_token(query["token"])
        if role is None:
            return _refusal(HTTPStatus.UNAUTHORIZED, _REFUSED)
        rest = urlencode([pair for pair in query.multi_items() if pair[0] != "token"])
        # Never to another host: `//host` would be one.
        target = "/" + path.lstrip("/") + (f"?{rest}" if rest else "")
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        response.set_cookie(
            self.cookie_name, self._secret.cookie(role), httponly=True, samesite="strict"
        )
        return response


_HTTP_PORT: Final = 80

_REFUSED: Final = (
    "this page needs a token: open the address that `taskyard web` printed, or print one with "
    "`taskyard web --invite viewer`"
)


def _refusal(status: HTTPStatus, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
