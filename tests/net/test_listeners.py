"""A place to listen at: private from the first; nobody else's is removed, and ours in time."""

import os
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from taskyard.errors import UserError
from taskyard.net.endpoints import open_listener, parse
from taskyard.net.sockets import connect, listen
from tests.net.kit import PYTHON, arrived, peers

LISTEN_AND_DIE = """
import os, sys
from taskyard.net.sockets import listen
wire = listen(sys.argv[1])
os._exit(0)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "broker.sock"


def test_socket_is_private_in_a_private_directory(path: Path) -> None:
    umask = os.umask(0)
    try:
        with closing(listen(f"ipc://{path}")):
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(umask)


def test_close_removes_the_socket(path: Path) -> None:
    wire = listen(f"ipc://{path}")
    assert path.exists()
    wire.close()
    assert not path.exists()


def test_leftover_of_a_dead_broker_is_replaced(path: Path) -> None:
    subprocess.run([PYTHON, "-c", LISTEN_AND_DIE, f"ipc://{path}"], check=True)
    assert path.is_socket()
    with closing(listen(f"ipc://{path}")) as listener, peers(listener):
        pass


def test_living_broker_keeps_its_socket(path: Path) -> None:
    with closing(listen(f"ipc://{path}")) as listener:
        with pytest.raises(UserError) as caught:
            listen(f"ipc://{path}")
        assert str(caught.value) == (
            f"somebody listens at ipc://{path} already; stop it, or give another endpoint"
        )
        with peers(listener):
            pass


def test_living_listener_with_a_full_queue_keeps_its_socket(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with (
        socket.socket(socket.AF_UNIX) as busy,
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
    ):
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        second.settimeout(0)
        with pytest.raises(BlockingIOError):
            second.connect(str(path))
        with pytest.raises(UserError, match="somebody listens at"):
            listen(f"ipc://{path}")


def test_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"precious")
    with pytest.raises(UserError, match=r"is there and is no socket; remove it, or give another"):
        listen(f"ipc://{path}")
    assert path.read_bytes() == b"precious"


def test_socket_that_took_the_place_of_ours_is_left_alone(path: Path) -> None:
    old = listen(f"ipc://{path}")
    path.unlink()
    with closing(listen(f"ipc://{path}")) as new:
        old.close()
        with peers(new):
            pass


def test_socket_that_is_gone_already_can_be_closed(path: Path) -> None:
    wire = listen(f"ipc://{path}")
    path.unlink()
    wire.close()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_directory_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    with pytest.raises(UserError, match=rf"others may write in .*; chmod 700 {path.parent}, or"):
        listen(f"ipc://{path}")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_directory_where_nobody_can_replace_a_socket_is_good(path: Path, mode: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    listen(f"ipc://{path}").close()


def test_directory_that_can_not_be_made_is_told(path: Path) -> None:
    path.parent.write_bytes(b"")
    with pytest.raises(UserError, match=rf"can't listen at ipc://{path}: Not a directory; see"):
        listen(f"ipc://{path}")


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_endpoint_is_free_when_close_returns(kind: str, path: Path) -> None:
    wire = listen("tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{path}")
    for _ in range(50):
        with peers(wire):
            wire.close()
        wire = listen(wire.endpoint)
    wire.close()


def test_port_in_use_is_told() -> None:
    with closing(listen("tcp://127.0.0.1:0")) as wire:
        with pytest.raises(UserError) as caught:
            listen(wire.endpoint)
        assert str(caught.value) == (
            f"can't listen at {wire.endpoint}: Address already in use; see that nobody else does "
            "and that you may, or give another endpoint"
        )


def test_descriptor_neither_blocks_nor_goes_to_programs_that_are_started(path: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:0", f"ipc://{path}"):
        opened = open_listener(parse(endpoint))
        assert not os.get_blocking(opened.descriptor)
        assert not os.get_inheritable(opened.descriptor)
        os.close(opened.descriptor)


def test_peer_finds_a_broker_that_comes_later(path: Path) -> None:
    with closing(connect(f"ipc://{path}")) as peer:
        assert peer.send([b"early"])
        with closing(listen(f"ipc://{path}")) as listener:
            assert arrived(listener)[1:] == [b"early"]
