"""Every request is checked: its host, its origin, its token and its role."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from taskyard.web.access import Guard
from taskyard.web.address import Role, Secret
from tests.web.asgi import send

if TYPE_CHECKING:
    from starlette.requests import Request

    from tests.web.asgi import Reply

PORT = 6180
HERE = f"http://127.0.0.1:{PORT}"
SECRET = Secret(b"s" * 32)

OK, SEE_OTHER = HTTPStatus.OK, HTTPStatus.SEE_OTHER
UNAUTHORIZED, FORBIDDEN = HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN
MISDIRECTED = HTTPStatus.MISDIRECTED_REQUEST

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


async def answer(request: Request) -> Response:
    return PlainTextResponse(request.scope.get("role", "none"))


@pytest.fixture
def guard() -> Guard:
    paths = ("/", "/tasks", "/healthz", "/readyz", "/metrics")
    app = Starlette(routes=[Route(path, answer, methods=[*METHODS]) for path in paths])
    return Guard(app, SECRET, ["127.0.0.1", "localhost", "::1"], PORT)


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
    "bearer elsewhere": (
        {"authorization": f"Bearer {SECRET.token(Role.OPERATOR)}", "origin": HERE},
        UNAUTHORIZED,
        UNAUTHORIZED,
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_methods_by_token_origin_and_host(guard: Guard, method: str, case: str) -> None:
    headers, safe, unsafe = CASES[case]
    expected = safe if method in ("GET", "HEAD") else unsafe
    found = request(guard, method, "/tasks", **headers)
    assert found.status == expected
    assert "script-src 'self';" in found.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_token_but_the_host(guard: Guard, path: str) -> None:
    assert request(guard, "GET", path).status == OK
    assert request(guard, "GET", path, host="evil.example:6180").status == MISDIRECTED


def test_metrics_take_the_token_as_bearer(guard: Guard) -> None:
    token = SECRET.token(Role.VIEWER)
    assert request(guard, "GET", "/metrics", authorization=f"Bearer {token}").status == OK
    assert request(guard, "GET", "/metrics").status == UNAUTHORIZED
    assert request(guard, "GET", "/metrics", authorization="Bearer x").status == UNAUTHORIZED


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
