"""The page of `taskyard up`: one address and one token until `up` ends."""

from __future__ import annotations

import os
import signal
import subprocess
from http.client import HTTPConnection
from pathlib import Path
from pty import openpty
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from taskyard.cli import up as up_command
from taskyard.web.address import PAGE_FILE, find_page, page_address
from tests.kit.processes import (
    PATIENCE_SECONDS,
    TASKYARD,
    Broker,
    Running,
    all_children_of,
    environment,
    is_alive,
    run,
    run_here,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


class UpWithPage(Running):
    """A broker and its page, without workers."""

    def __init__(self, directory: Path, page: str = "127.0.0.1:0") -> None:
        words = ("--workers", "0", "--page", page)
        super().__init__(directory, "up", *words, stderr=subprocess.DEVNULL)
        assert self.line().startswith("listening native ")
        word, _, self.address = self.line().partition(" ")
        assert word == "page"

    def page_pid(self) -> int | None:
        """Return the process of the page. None while it is restarted."""
        words = {pid: _words_of(pid) for pid in all_children_of(self)}
        return next((pid for pid, found in words.items() if "web" in found), None)


def _words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def status_of(address: str, path: str = "", **headers: str) -> tuple[int, str]:
    """Return the status and the cookie of a GET. The page may still be starting."""
    place = urlsplit(address)
    connection = HTTPConnection(place.netloc, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", path or f"/?{place.query}", headers=headers)
        reply = connection.getresponse()
        return reply.status, (reply.headers["set-cookie"] or "").partition(";")[0]
    finally:
        connection.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up")


@pytest.fixture(scope="module")
def up(directory: Path) -> Iterator[UpWithPage]:
    with UpWithPage(directory) as running:
        yield running


def test_address_and_cookie_outlive_the_process_of_the_page(up: UpWithPage) -> None:
    status, cookie = status_of(up.address)
    assert (status, bool(cookie)) == (303, True)
    assert status_of(up.address, "/tasks", cookie=cookie)[0] == 200
    first = up.page_pid()
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert status_of(up.address, "/tasks", cookie=cookie)[0] == 200  # it waits for the next one
    assert up.page_pid() not in (None, first)
    assert status_of(up.address)[0] == 303


def test_secret_is_in_no_argument_and_no_variable(up: UpWithPage, directory: Path) -> None:
    until(up.page_pid, "the page has started")
    pid, page = up.page_pid(), find_page(directory / ".taskyard")
    assert page is not None
    token = up.address.partition("token=")[2]
    for name in ("cmdline", "environ"):
        text = Path(f"/proc/{pid}/{name}").read_text()
        assert page.secret.hex() not in text
        assert token not in text
    assert os.getpriority(os.PRIO_PROCESS, pid or 0) == min(os.nice(0) + 10, 19)


def test_other_commands_find_the_page(up: UpWithPage, directory: Path) -> None:
    code, out, err = run_here(directory, "web")
    assert (code, out) == (0, f"page {up.address}\n")
    assert err == f"the page of process {up.pid} is running, no second page was started\n"
    _, operator, _ = run_here(directory, "web", "--share", "operator")
    assert operator == f"{up.address}\n"
    _, viewer, _ = run_here(directory, "web", "--share", "viewer")
    assert status_of(viewer.strip())[0] == 303
    root = up.address.partition("/?")[0]
    assert page_address(directory / ".taskyard") == root
    assert run_here(directory, "status")[1] == f"0 tasks: none\n0 workers\npage {root}\n"


def test_status_prints_the_token_on_a_terminal_only(up: UpWithPage, directory: Path) -> None:
    reader, writer = openpty()
    words = [*TASKYARD, "status"]
    subprocess.run(words, cwd=directory, env=environment(), stdout=writer, check=True)
    os.close(writer)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert f"page {up.address}\r\n" in shown
    assert "token" not in run_here(directory, "status")[1]


def test_second_up_takes_a_free_port(up: UpWithPage, tmp_path: Path) -> None:
    taken = urlsplit(up.address).netloc
    with UpWithPage(tmp_path, taken) as other:
        assert urlsplit(other.address).netloc != taken
        assert status_of(other.address)[0] == 303
        page = other.page_pid()
        other.kill()
        until(lambda: page is None or not is_alive(page), "the page of a killed `up` ends")
    assert (tmp_path / ".taskyard" / PAGE_FILE).exists()
    assert find_page(tmp_path / ".taskyard") is None


def test_stop_ends_the_page_under_an_open_connection(up: UpWithPage, directory: Path) -> None:
    """Ends the `up` of the other tests, so it is the last one of them."""
    _, cookie = status_of(up.address)
    place = urlsplit(up.address)
    connection = HTTPConnection(place.netloc, timeout=PATIENCE_SECONDS)
    connection.request("GET", "/live", headers={"cookie": cookie})
    assert connection.getresponse().status == 200
    page = up.page_pid()
    assert page is not None
    assert run_here(directory, "down")[0] == 0
    assert up.end()[0] == 0
    assert not is_alive(page)
    assert not (directory / ".taskyard" / PAGE_FILE).exists()
    connection.close()


def test_detached_up_prints_the_address(tmp_path: Path) -> None:
    words = ("up", "--detach", "--workers", "0", "--page", "127.0.0.1:0")
    try:
        code, out, _ = run(tmp_path, *words)
        page = find_page(tmp_path / ".taskyard")
        assert page is not None
        assert (code, out.startswith(f"page {page.address}/?token=")) == (0, True)
    finally:
        assert run_here(tmp_path, "down")[0] == 0


def test_missing_extra_is_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("taskyard.cli.up._detach", lambda *given: seen.append(given[-1]))
    monkeypatch.setattr(up_command, "find_spec", lambda name: None if name == "uvicorn" else name)
    code, _, err = run_here(tmp_path, "up", "--detach")
    assert (code, err) == (0, "no page: it needs uvicorn (`pip install 'taskyard[web]'`)\n")
    assert seen[0][seen[0].index("--page") + 1] == "none"


@pytest.mark.parametrize("page", ["6180", "127.0.0.1:70000"])
def test_wrong_address_is_refused_before_anything_starts(tmp_path: Path, page: str) -> None:
    code, _, err = run_here(tmp_path, "up", "--page", page)
    assert (code, "must be HOST:PORT" in err) == (2, True)
    assert not (tmp_path / ".taskyard").exists()


def test_address_of_another_machine_stops_no_broker(tmp_path: Path) -> None:
    with Running(tmp_path, "up", "--workers", "0", "--page", "192.0.2.1:6180") as running:
        assert "no page: page address '192.0.2.1:6180'" in running.error_line()
        assert running.line().startswith("listening native ")
        assert running.terminate()[:2] == (0, "")


def test_no_page_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "taskyard.toml").write_text('[broker]\npage = "none"\n')
    with Running(tmp_path, "up", "--workers", "0") as running:
        assert running.line().startswith("listening native ")
        assert find_page(tmp_path / ".taskyard") is None
        assert running.terminate()[:2] == (0, "")


def test_running_page_is_used_by_up(tmp_path: Path) -> None:
    with Broker(tmp_path) as first:  # the page needs a journal
        assert first.terminate()[0] == 0
    with Running(tmp_path, "web", "--page", "127.0.0.1:0") as page:
        address = page.line()
        with Running(tmp_path, "up", "--workers", "0") as up:
            assert f"process {page.pid}" in up.error_line()
            assert up.line().startswith("listening native ")
            assert up.line() == address
            assert up.terminate()[0] == 0
