"""The address of the page: its socket, its file, and tokens for colleagues."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import UserError
from taskyard.web.address import (
    PAGE_FILE,
    PageRunning,
    Role,
    Secret,
    address_of,
    bind,
    find_page,
    invitation,
    page_address,
    published,
    split_address,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ANY = "127.0.0.1:0"


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with bind(ANY) as found:
        yield found


def test_bound_address_accepts_connections_before_the_server_runs(bound: socket.socket) -> None:
    with socket.create_connection(bound.getsockname()):
        pass


def test_taken_port_gives_a_free_one(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    with bind(f"127.0.0.1:{port}") as second:
        assert second.getsockname()[1] != port


def test_address_of_all_interfaces_can_be_opened() -> None:
    with bind("0.0.0.0:0") as found:
        assert address_of(found) == f"http://127.0.0.1:{found.getsockname()[1]}"


def test_hosts_and_ports_are_split() -> None:
    assert split_address("127.0.0.1:6180") == ("127.0.0.1", 6180)
    assert split_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("text", ["", "6180", ":6180", "::1:6180", "here:", "here:70000", "a b:1"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="must be HOST:PORT"):
        bind(text)


def test_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.1:0"):
        bind("192.0.2.1:0")


def test_page_is_found_while_its_owner_lives(tmp_path: Path, bound: socket.socket) -> None:
    with published(tmp_path, bound) as page:
        assert (tmp_path / PAGE_FILE).stat().st_mode & 0o777 == 0o600
        assert find_page(tmp_path) == page
        assert page_address(tmp_path) == address_of(bound)
        token = Secret(page.secret).token(Role.VIEWER)
        assert invitation(tmp_path, Role.VIEWER) == f"{address_of(bound)}/?token={token}"
        kept = (tmp_path / PAGE_FILE).read_bytes()
    assert find_page(tmp_path) is None
    file = tmp_path / PAGE_FILE
    file.write_bytes(kept)  # as a killed owner leaves it
    file.chmod(0o600)
    assert find_page(tmp_path) is None
    with published(tmp_path, bound) as later:
        assert find_page(tmp_path) == later
        assert later.secret != page.secret


def test_second_page_is_refused_with_the_first(tmp_path: Path, bound: socket.socket) -> None:
    with published(tmp_path, bound) as page:
        with pytest.raises(PageRunning) as refused, published(tmp_path, bound):
            pass
        assert refused.value.page == page
        assert find_page(tmp_path) == page


def test_page_without_a_file_is_served_but_not_found(tmp_path: Path, bound: socket.socket) -> None:
    missing = tmp_path / "missing"
    with published(missing, bound) as page:
        assert page.secret
        assert find_page(missing) is None


def test_invitation_without_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no page is running"):
        invitation(tmp_path, Role.VIEWER)


def test_tokens_of_another_secret_are_worthless() -> None:
    one, other = Secret(b"1" * 32), Secret(b"2" * 32)
    assert other.role_of_token(one.token(Role.OPERATOR)) is None
    assert one.role_of_token(one.token(Role.OPERATOR)) is Role.OPERATOR
    assert one.role_of_token(one.cookie(Role.OPERATOR)) is None
