"""Valid endpoints, and the native one: a state directory always has the same."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.net.endpoints import (
    IPC_PATH_BYTES_MAX,
    is_remote,
    listen_endpoint,
    native_endpoint,
    parse,
    parse_peer,
    peer_endpoint,
)
from taskyard.net.sockets import connect, listen
from tests.kit.cases import each_case
from tests.net.kit import peers


@pytest.fixture
def short_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a directory with a short path instead of the shared one."""
    with tempfile.TemporaryDirectory(prefix="ty") as directory:
        monkeypatch.setattr(endpoints, "SHORT_DIRECTORY", Path(directory))
        yield Path(directory)


@pytest.fixture
def long_state(tmp_path: Path) -> Path:
    state = tmp_path / ("a-long-name-" * 10)
    state.mkdir(mode=0o700)
    return state


def test_native_endpoint_is_in_the_state_directory(tmp_path: Path) -> None:
    assert native_endpoint(tmp_path) == f"ipc://{tmp_path}/broker.sock"


def test_native_endpoint_is_the_same_from_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert native_endpoint(Path("link")) == native_endpoint(Path()) == native_endpoint(tmp_path)


@pytest.mark.usefixtures("short_place")
def test_path_that_just_fits_stays_and_one_byte_more_does_not() -> None:
    beside = len("/state-/broker.sock")
    fits = Path("/state-" + "x" * (IPC_PATH_BYTES_MAX - beside))
    assert native_endpoint(fits) == f"ipc://{fits}/broker.sock"
    assert "state-" not in native_endpoint(Path(f"{fits}x"))


def test_long_path_gets_a_short_private_directory(short_place: Path, long_state: Path) -> None:
    endpoint = native_endpoint(long_state)
    directory = Path(endpoint.removeprefix("ipc://")).parent
    assert directory.parent == short_place
    assert directory.name.startswith(f"taskyard-{os.getuid()}-")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert native_endpoint(long_state) == endpoint
    assert native_endpoint(long_state / "other") != endpoint


@pytest.mark.usefixtures("short_place")
def test_broker_and_peer_meet_at_a_long_path(long_state: Path) -> None:
    with closing(listen(native_endpoint(long_state))) as listener, peers(listener) as (peer, _):
        assert peer.endpoint == native_endpoint(long_state)


def test_path_that_is_not_utf_8_gets_a_short_one(short_place: Path, tmp_path: Path) -> None:
    state = tmp_path / os.fsdecode(b"\xff")
    assert native_endpoint(state).startswith(f"ipc://{short_place}/")


def test_short_directory_that_others_may_read_is_refused(
    short_place: Path, long_state: Path
) -> None:
    native_endpoint(long_state)
    next(short_place.iterdir()).chmod(0o755)
    with pytest.raises(UserError, match=r": not a private directory of yours, for the socket"):
        native_endpoint(long_state)


def test_short_directory_of_another_user_is_refused(
    short_place: Path, long_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_endpoint(long_state)
    mine = next(short_place.iterdir())
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    mine.rename(mine.with_name(mine.name.replace(f"-{other - 1}-", f"-{other}-")))
    with pytest.raises(UserError, match=r"not a private directory of yours"):
        native_endpoint(long_state)


def test_link_in_place_of_the_short_directory_is_refused(
    short_place: Path, long_state: Path
) -> None:
    native_endpoint(long_state)
    made = next(short_place.iterdir())
    made.rename(short_place / "elsewhere")
    made.symlink_to(short_place / "elsewhere")
    with pytest.raises(UserError, match=r"not a private directory of yours"):
        native_endpoint(long_state)


def test_short_directory_that_can_not_be_created_is_an_error(
    short_place: Path, long_state: Path
) -> None:
    native_endpoint(long_state)
    made = next(short_place.iterdir())
    made.rmdir()
    made.write_bytes(b"")
    with pytest.raises(UserError, match=r"too long for a socket, and can't create .* instead: Fi"):
        native_endpoint(long_state)


@each_case(
    ("given", "spelled"),
    [
        ("tcp://127.0.0.1:6125", "tcp://127.0.0.1:6125"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0"),
        ("tcp://localhost:06125", "tcp://127.0.0.1:6125"),
        ("tcp://LocalHost:0", "tcp://127.0.0.1:0"),
        ("tcp://127.1.2.3:1", "tcp://127.1.2.3:1"),
        ("tcp://[::1]:65535", "tcp://[::1]:65535"),
        ("tcp://[0:0:0:0:0:0:0:1]:1", "tcp://[::1]:1"),
        ("ipc:///run/yard/broker.sock", "ipc:///run/yard/broker.sock"),
        ("ipc:///run/./yard//x/../broker.sock", "ipc:///run/yard/broker.sock"),
    ],
)
def test_valid_endpoint_has_one_canonical_form(given: str, spelled: str) -> None:
    assert listen_endpoint(given) == spelled


def test_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert listen_endpoint("ipc://broker.sock") == f"ipc://{tmp_path}/broker.sock"


@each_case(
    ("given", "spelled"),
    [
        ("tcp://10.1.2.3:06125", "tcp://10.1.2.3:6125"),
        ("tcp://[fd00:0::2]:6125", "tcp://[fd00::2]:6125"),
    ],
)
def test_address_of_another_machine_is_remote_and_needs_keys(given: str, spelled: str) -> None:
    assert listen_endpoint(given) == peer_endpoint(given) == spelled
    assert is_remote(parse(given))
    with pytest.raises(UserError, match=r"other machines can reach it, so it needs keys"):
        listen(given)
    with pytest.raises(UserError, match=r"a broker on another machine needs a key"):
        connect(given)


@each_case("endpoint", ["tcp://0.0.0.0:6125", "tcp://[::]:6125"])
def test_all_addresses_are_for_listeners_alone(endpoint: str) -> None:
    assert listen_endpoint(endpoint) == endpoint
    assert is_remote(parse(endpoint))
    with pytest.raises(UserError, match=r"stands for all addresses of a machine \(give one"):
        peer_endpoint(endpoint)


@each_case("endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "ipc:///run/yard"])
def test_loopback_and_ipc_are_local(endpoint: str) -> None:
    assert not is_remote(parse(endpoint))


@each_case("host", ["example.org", "Node-7", "localhost.example.org", "lo"])
def test_host_name_is_remote_and_for_peers_only(host: str) -> None:
    endpoint = f"tcp://{host}:6125"
    assert peer_endpoint(endpoint) == endpoint.lower()
    assert is_remote(parse_peer(endpoint))
    with pytest.raises(UserError, match=r"no valid address \(give tcp://127"):
        listen_endpoint(endpoint)


@each_case(
    "host",
    ["*", "1.2.3", "256.1.1.1", "[127.0.0.1]", "[::ffff:10.1.2.3]", "[fe80::1%eth0]", "a_b", "-x"],
)
def test_invalid_address_and_name_is_refused(host: str) -> None:
    for checked in (listen_endpoint, peer_endpoint):
        with pytest.raises(UserError, match=r"no valid address \(give tcp://1"):
            checked(f"tcp://{host}:6125")


@each_case(
    "endpoint",
    [
        "",
        "127.0.0.1:6125",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:-1",
        "tcp://::1:6125",
        "tcp://127.0.0.1:0;127.0.0.1:6125",
        "tcp://127.0.0.1:6125/x",
        "tcp://127.0.0.1:6125\n",
        "inproc://broker",
        "udp://127.0.0.1:6125",
        "TCP://127.0.0.1:6125",
    ],
)
def test_unknown_form_of_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match=r": unknown form \(give tcp://127"):
        listen_endpoint(endpoint)


def test_port_over_65535_is_refused() -> None:
    with pytest.raises(UserError, match=r": port over 65535"):
        listen_endpoint("tcp://127.0.0.1:65536")


@each_case("endpoint", ["ipc://", "ipc://*", "ipc:///run/yard/"])
def test_ipc_endpoint_without_a_path_is_refused(endpoint: str) -> None:
    with pytest.raises(
        UserError, match=r": no socket path \(give tcp://127.0.0.1:PORT or ipc://PA"
    ):
        listen_endpoint(endpoint)


def test_abstract_socket_is_refused_because_any_user_could_open_it() -> None:
    with pytest.raises(
        UserError, match=r"any user of this machine could open an abstract socket \(give ipc"
    ):
        listen_endpoint("ipc://@broker")


@each_case("path", ["/" + "x" * IPC_PATH_BYTES_MAX, "/" + "ä" * 54, "/\udcff"])
def test_path_too_long_for_a_socket_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=r"path is longer than the 107 bytes of UTF-8"):
        listen_endpoint(f"ipc://{path}")


@each_case("endpoint", ["tcp://127.0.0.1:0", "tcp://localhost:*"])
def test_peer_needs_a_port(endpoint: str) -> None:
    with pytest.raises(UserError, match=r": no port to connect to \(give"):
        peer_endpoint(endpoint)


@each_case("endpoint", ["tcp://127.0.0.1:6125", "ipc:///run/yard/broker.sock"])
def test_peer_connects_where_a_broker_may_listen(endpoint: str) -> None:
    assert peer_endpoint(endpoint) == endpoint
