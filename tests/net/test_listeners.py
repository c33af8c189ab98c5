"""Listening descriptors are private, replace only stale sockets, and remove their own."""

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


def test_socket_of_a_live_broker_is_kept(path: Path) -> None:
    with closing(listen(f"ipc://{path}")) as listener:
        with pytest.raises(UserError) as caught:
            listen(f"ipc://{path}")
        assert str(caught.value) == f"ipc://{path}: another process listens here already"
        with peers(listener):
            pass


def test_socket_of_a_live_listener_with_a_full_queue_is_kept(path: Path) -> None:
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
        with pytest.raises(UserError, match="another process listens here already"):
            listen(f"ipc://{path}")


def test_file_that_is_no_socket_is_kept(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"precious")
    with pytest.raises(UserError, match=r"broker.sock: exists and is not a socket"):
        listen(f"ipc://{path}")
    assert path.read_bytes() == b"precious"


def test_socket_that_replaced_ours_is_kept(path: Path) -> None:
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
    with pytest.raises(UserError, match=rf"other users may write .*chmod 700 {path.parent}, or"):
        listen(f"ipc://{path}")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_directory_where_sockets_can_not_be_replaced_is_accepted(path: Path, mode: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    listen(f"ipc://{path}").close()


def test_directory_that_can_not_be_created_is_an_error(path: Path) -> None:
    path.parent.write_bytes(b"")
    with pytest.raises(UserError, match=rf"can't listen on ipc://{path}: Not a directory"):
        listen(f"ipc://{path}")


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_endpoint_is_free_when_close_returns(kind: str, path: Path) -> None:
    wire = listen("tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{path}")
    for _ in range(50):
        with peers(wire):
            wire.close()
        wire = listen(wire.endpoint)
    wire.close()


def test_port_in_use_is_an_error() -> None:
    with closing(listen("tcp://127.0.0.1:0")) as wire:
        with pytest.raises(UserError) as caught:
            listen(wire.endpoint)
        assert str(caught.value) == f"can't listen on {wire.endpoint}: Address already in use"


def test_descriptor_is_non_blocking_and_not_inherited(path: Path) -> None:
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
