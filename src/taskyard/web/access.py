"""Access to the page: tokens, cookies, the Host and Origin of a request, and response headers.

A token is in the address that `taskyard up` prints. The first request exchanges it for a cookie.
Both are derived from the secret of the page: see `address`.

A request of another web site in the same browser carries no Origin or Host of this page, and is
refused before it reaches anything else. GET changes nothing.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from taskyard.web.address import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from taskyard.web.address import Secret

#: Paths that a supervisor asks without a token. They contain nothing of the tasks.
OPEN_PATHS: Final = ("/healthz", "/readyz")

#: The path that takes a token as bearer, for programs that collect metrics.
BEARER_PATHS: Final = ("/metrics",)

_SAFE_METHODS: Final = ("GET", "HEAD")

#: Style elements that Plotly makes: an empty element, which its script fills, and that of its bar.
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


class Guard:
    """Checks every request before the page sees it, and completes every response."""

    def __init__(
        self,
        app: ASGIApp,
        secret: Secret,
        hosts: Iterable[str],
        port: int,
        *,
        metrics_token: str = "",
    ) -> None:
        """Guard an app. `hosts` are the names by which it is reached, without port.

        `metrics_token` is a bearer token for metrics besides the tokens of the secret. Empty: none.
        """
        self._app = app
        self._secret = secret
        self._metrics_token = metrics_token
        names = [f"[{host}]" if ":" in host else host for host in hosts]
        self._hosts = {f"{name}:{port}" for name in names}
        if port == _HTTP_PORT:
            self._hosts |= set(names)
        #: Cookies don't tell ports apart, and there may be several pages on one machine.
        self.cookie_name = f"taskyard-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the page has none
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if "role" not in scope:  # a queue of requests would keep the page busy
                    headers["Connection"] = "close"
            await send(message)

        refusal = self._check(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> Response | None:  # noqa: PLR0911  # a check each
        """Return a refusal or a redirect. None if the request may pass, with its role set."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host.lower() not in self._hosts and host != _local_address(scope):
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST, "unknown Host")
        is_safe = scope["method"] in _SAFE_METHODS
        if not is_safe and headers.get("origin", "").partition("://")[2].lower() != host.lower():
            return _refusal(HTTPStatus.FORBIDDEN, "the Origin is not this page")
        path = scope["path"]
        if is_safe and path in OPEN_PATHS:
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
            known, given = self._metrics_token.encode(), token.encode()
            is_own = bool(known) and hmac.compare_digest(given, known)
            return Role.VIEWER if is_own else self._secret.role_of_token(token)
        return self._secret.role_of_cookie(_cookie(headers.get("cookie", ""), self.cookie_name))

    def _exchange(self, path: str, query: QueryParams) -> Response:
        """Set the cookie and redirect to the same view without the token."""
        role = self._secret.role_of_token(query["token"])
        if role is None:
            return _refusal(HTTPStatus.UNAUTHORIZED, _REFUSED)
        rest = urlencode([pair for pair in query.multi_items() if pair[0] != "token"])
        # Never to another host, as `//host` would lead to.
        target = "/" + path.lstrip("/") + (f"?{rest}" if rest else "")
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        # Lax: a link in a report opens a view. A form of another site has no cookie.
        response.set_cookie(
            self.cookie_name, self._secret.cookie(role), httponly=True, samesite="lax"
        )
        return response


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie as it was sent. Empty: there is none.

    The value of the page is plain. Python's parser takes seconds to unquote that of a peer.
    """
    found = ""
    for part in header.split(";"):
        key, _, value = part.partition("=")
        if key.strip() == name:
            found = value.strip()
    return found


def _local_address(scope: Scope) -> str | None:
    """Return the number and port at which a request arrived.

    It is good as a Host: another site can be found by a name that leads here, but its requests have
    that name as their Host, and never a number.
    """
    server = scope.get("server")
    if server is None or server[1] is None:
        return None
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_HTTP_PORT: Final = 80

_REFUSED: Final = (
    "this page needs a token: open the address that `taskyard up` printed, or print one with "
    "`taskyard web --share viewer`"
)


def _refusal(status: HTTPStatus, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
