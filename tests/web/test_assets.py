"""Files of the page: browsers keep them, and a change of one gives all another address."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

import taskyard.web
from taskyard.web.access import Guard
from taskyard.web.address import Role, Secret
from taskyard.web.views import site
from tests.web.asgi import send

if TYPE_CHECKING:
    from tests.web.asgi import Reply

PORT = 6180
PACKAGE = Path(taskyard.web.__path__[0])
TEMPLATES = [path.read_text() for path in (PACKAGE / "templates").glob("*.html")]
NAMES = sorted({name for text in TEMPLATES for name in re.findall(r"{{ static }}/([\w.]+)", text)})


def get(address: str, **headers: str) -> Reply:
    secret = Secret(b"s" * 32)
    guard = Guard(Starlette(routes=site.static_routes()), secret, ["127.0.0.1"], PORT)
    cookie = f"{guard.cookie_name}={secret.cookie(Role.VIEWER)}"
    given = {"host": f"127.0.0.1:{PORT}", "cookie": cookie}
    return send(guard, "GET", address, given | headers)


@pytest.mark.parametrize("name", [*NAMES, "charts.js"])
def test_file_may_be_kept(name: str) -> None:
    reply = get(f"{site.static_root()}/{name}")
    assert reply.status == 200
    assert reply.headers["cache-control"] == "private, max-age=31536000, immutable"


def test_other_addresses_are_not_kept() -> None:
    reply = get("/static/0123456789abcdef/page.js")
    assert (reply.status, reply.headers["cache-control"]) == (404, "no-store")


def test_changed_file_changes_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = site.static_root()
    shutil.copytree(PACKAGE / "static", tmp_path / "static")
    monkeypatch.setattr(site, "_STATIC", tmp_path / "static")
    assert site.static_root.__wrapped__() == before
    (tmp_path / "static" / "page.css").write_text("body { color: red }")
    assert site.static_root.__wrapped__() != before
