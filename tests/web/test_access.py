"""Every request is checked: its host, its origin, its token and its role."""

from __future__ import annotations

import asyncio
import http.cookies
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from taskyard.web.access import BEARER_PATHS, OPEN_PATHS, Guard
from taskyard.web.address import Role, Secret
from taskyard.web.server import make_app
from tests.web.asgi import send

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import Message, Receive, Scope, Send

    from taskyard.web.views.site import Site
    from tests.web.asgi import Reply

PORT = 6180
HERE = f"http://127.0.0.1:{PORT}"
SECRET = Secret(b"s" * 32)

OK, SEE_OTHER = HTTPStatus.OK, HTTPStatus.SEE_OTHER
UNAUTHORIZED, FORBIDDEN = HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN
MISDIRECTED = HTTPStatus.MISDIRECTED_REQUEST

METRICS_TOKEN = "0123abcd"  # noqa: S105  # of this test
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "ODD")
SAFE = ("GET", "HEAD")


async def answer(request: Request) -> Response:
    return PlainTextResponse(request.scope.get("role", "none"))


def guarded(metrics_token: str) -> Guard:
    paths = ("/", "/tasks", "/healthz", "/readyz", "/metrics")
    app = Starlette(routes=[Route(path, answer, methods=[*METHODS]) for path in paths])
    hosts = ["127.0.0.1", "localhost", "::1"]
    return Guard(app, SECRET, hosts, PORT, metrics_token=metrics_token)


@pytest.fixture
def guard() -> Guard:
    return guarded(METRICS_TOKEN)


def request(guard: Guard, method: str, address: str, **headers: str) -> Reply:
    return send(guard, method, address, {"host": f"127.0.0.1:{PORT}"} | headers)


def cookie(role: Role, value: str | None = None) -> str:
    return f"taskyard-{PORT}={SECRET.cookie(role) if value is None else value}"


OPERATOR, VIEWER = cookie(Role.OPERATOR), cookie(Role.VIEWER)

#: Headers of a request, with the expected status of a safe method and of any other one.
CASES = {
    "operator": ({"cookie": OPERATOR, "origin": HERE}, OK, OK),
    "viewer": ({"cookie": VIEWER, "origin": HERE}, OK, FORBIDDEN),
    "no token": ({"origin": HERE}, UNAUTHORIZED, UNAUTHORIZED),
    "wrong token": (
        {"cookie": cookie(Role.VIEWER, "0" * 64), "origin": HERE},
        UNAUTHORIZED,
        UNAUTHORIZED,
    ),
    "token as cookie": (
        {"cookie": cookie(Role.VIEWER, SECRET.token(Role.OPERATOR)), "origin": HERE},
        UNAUTHORIZED,
        UNAUTHORIZED,
    ),
    "no origin": ({"cookie": OPERATOR}, OK, FORBIDDEN),
    "other origin": ({"cookie": OPERATOR, "origin": "http://evil.example"}, OK, FORBIDDEN),
    "other port": ({"cookie": OPERATOR, "origin": "http://127.0.0.1:80"}, OK, FORBIDDEN),
    "null origin": ({"cookie": OPERATOR, "origin": "null"}, OK, FORBIDDEN),
    "no address": ({"cookie": OPERATOR, "origin": "http://[127.0.0.1"}, OK, FORBIDDEN),
    "other host": (
        {"cookie": OPERATOR, "origin": "http://evil.example:6180", "host": "evil.example:6180"},
        MISDIRECTED,
        MISDIRECTED,
    ),
    "host without port": (
        {"cookie": OPERATOR, "origin": HERE, "host": "127.0.0.1"},
        MISDIRECTED,
        MISDIRECTED,
    ),
    "bearer": (
        {"authorization": f"Bearer {SECRET.token(Role.OPERATOR)}", "origin": HERE},
        UNAUTHORIZED,
        UNAUTHORIZED,
    ),
}


def page_routes() -> list[BaseRoute]:
    """Return the addresses of the real page. None is left out of the tests by mistake."""
    unused = SimpleNamespace(error=answer)
    return make_app(cast("Site", unused)).routes


def path_of(route: BaseRoute) -> str:
    """Return the path of a route, or of something below it."""
    assert isinstance(route, Route | Mount)
    return route.path if isinstance(route, Route) else f"{route.path}/page.js"


PATHS = sorted({path_of(route) for route in page_routes()})


@pytest.fixture(scope="module")
def every_path() -> Guard:
    """Return a guard before an app that answers everything, so that no refusal is the app's."""

    async def passed(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("passed")(scope, receive, send)

    return Guard(passed, SECRET, ["127.0.0.1"], PORT)


@pytest.mark.parametrize("path", PATHS)
def test_methods_by_token_origin_and_host(every_path: Guard, path: str) -> None:
    found, expected = {}, {}
    for case, (headers, safe, unsafe) in CASES.items():
        for method in METHODS:
            reply = request(every_path, method, path, **headers)
            assert "script-src 'self';" in reply.headers["content-security-policy"]
            assert reply.headers["x-content-type-options"] == "nosniff"
            found[case, method] = reply.status
            expected[case, method] = safe if method in SAFE else unsafe
            is_open = path in OPEN_PATHS and method in SAFE
            takes_bearer = path in BEARER_PATHS and case == "bearer"
            if expected[case, method] == UNAUTHORIZED and (is_open or takes_bearer):
                expected[case, method] = OK
    assert found == expected


def test_routes_that_change_something_take_nothing_but_post() -> None:
    methods = {
        path_of(route): sorted(route.methods or ())
        for route in page_routes()
        if isinstance(route, Route)
    }
    changing = {path: given for path, given in methods.items() if given != ["GET", "HEAD"]}
    assert changing == {"/lanes/actions": ["POST"], "/tasks/actions": ["POST"]}


def test_open_paths_are_those_of_the_contract() -> None:
    assert (OPEN_PATHS, BEARER_PATHS) == (("/healthz", "/readyz"), ("/metrics",))
    assert {*OPEN_PATHS, *BEARER_PATHS} <= set(PATHS)


def test_websockets_are_closed(every_path: Guard) -> None:
    sent: list[Message] = []

    async def send_message(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    asyncio.run(every_path({"type": "websocket"}, receive, send_message))
    assert sent == [{"type": "websocket.close"}]


def test_address_at_which_a_request_arrived_is_a_host(every_path: Guard) -> None:
    """The app of these tests is reached at 127.0.0.1:1."""
    assert request(every_path, "GET", "/tasks", host="127.0.0.1:1", cookie=OPERATOR).status == OK
    assert request(every_path, "GET", "/tasks", host="127.0.0.2:1").status == MISDIRECTED


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_token_but_the_host(guard: Guard, path: str) -> None:
    assert request(guard, "GET", path).status == OK
    assert request(guard, "GET", path, host="evil.example:6180").status == MISDIRECTED


def test_peer_without_a_token_has_one_request_for_a_connection(guard: Guard) -> None:
    paths = ("/", "/healthz", f"/?token={SECRET.token(Role.VIEWER)}")
    replies = [request(guard, "GET", path) for path in paths]
    assert [reply.headers.get("connection") for reply in replies] == ["close"] * 3
    assert "connection" not in request(guard, "GET", "/", cookie=VIEWER).headers


@pytest.mark.parametrize(
    "header",
    [f"a=1; {VIEWER}; b=2", f"{VIEWER};a", f'a="\\";;=;{VIEWER}', f"taskyard-1=x; {VIEWER}"],
)
def test_cookie_is_found_among_others(guard: Guard, header: str) -> None:
    assert request(guard, "GET", "/", cookie=header).body == b"viewer"


def test_cookies_are_not_unquoted(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes time with the square of their length for it."""
    monkeypatch.delattr(http.cookies, "_unquote")
    value = '"' + "\\" * 60_000 + '"'
    for header in (f"a={value}", cookie(Role.VIEWER, value)):
        assert request(guard, "GET", "/", cookie=header).status == UNAUTHORIZED


def test_metrics_take_the_token_as_bearer(guard: Guard) -> None:
    token = SECRET.token(Role.VIEWER)
    assert request(guard, "GET", "/metrics", authorization=f"Bearer {token}").status == OK
    assert request(guard, "GET", "/metrics").status == UNAUTHORIZED
    assert request(guard, "GET", "/metrics", authorization="Bearer x").status == UNAUTHORIZED


def test_token_of_metrics_opens_nothing_else(guard: Guard) -> None:
    headers = {"authorization": f"Bearer {METRICS_TOKEN}"}
    assert request(guard, "GET", "/metrics", **headers).body == b"viewer"
    assert request(guard, "GET", "/tasks", **headers).status == UNAUTHORIZED
    assert request(guard, "GET", f"/metrics?token={METRICS_TOKEN}").status == UNAUTHORIZED
    assert request(guard, "POST", "/metrics", **headers, origin=HERE).status == FORBIDDEN


def test_empty_bearer_is_refused_without_a_token_of_metrics() -> None:
    found = request(guarded(""), "GET", "/metrics", authorization="Bearer ")
    assert found.status == UNAUTHORIZED


def test_token_is_exchanged_for_a_cookie(guard: Guard) -> None:
    token = SECRET.token(Role.VIEWER)
    found = request(guard, "GET", f"/tasks?filter=--failed&token={token}&first=100")
    assert found.status == SEE_OTHER
    assert found.headers["location"] == "/tasks?filter=--failed&first=100"
    made = found.headers["set-cookie"]
    assert made.startswith(VIEWER)
    assert "HttpOnly" in made
    assert "SameSite=lax" in made
    assert request(guard, "GET", "/tasks?token=wrong").status == UNAUTHORIZED


def test_exchange_never_leads_to_another_host(guard: Guard) -> None:
    token = SECRET.token(Role.VIEWER)
    found = request(guard, "GET", f"//evil.example/?token={token}")
    assert found.headers["location"].startswith("/evil.example")
