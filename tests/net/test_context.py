"""A process has one context, and a forked child opens its own."""

import resource
import subprocess
from pathlib import Path

import pytest

from taskyard.net.context import context, raise_file_limit
from tests.net.kit import PYTHON

#: A child closes inherited sockets, which has no effect on them, and opens new ones.
FORK = """
import os, sys
from taskyard.net.context import context
from taskyard.net.host import Poller
from taskyard.net.sockets import connect, listen

def arrived(wire):
    poller = Poller()
    poller.add(wire)
    while (frames := wire.receive()) is None:
        assert poller.wait(20 * 10**9)
    return frames

listener = listen(f"ipc://{sys.argv[1]}/parent.sock")
inherited = context()
child = os.fork()
if child == 0:
    assert context() is not inherited
    listener.close()
    own = listen(f"ipc://{sys.argv[1]}/child.sock")
    peer, far = connect(own.endpoint), connect(listener.endpoint)
    peer.send([b"hello"])
    assert arrived(own)[1:] == [b"hello"]
    far.send([b"from the child"])
    assert arrived(far) == [b"seen"]
    own.close()
    sys.exit(0)
route, content = arrived(listener)
assert content == b"from the child"
listener.send([route, b"seen"])
assert os.waitpid(child, 0)[1] == 0
assert context() is inherited
assert os.path.exists(f"{sys.argv[1]}/parent.sock")
listener.close()
"""

LIMIT = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from taskyard.net.sockets import listen
listen("tcp://127.0.0.1:0").close()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_context_is_opened_once() -> None:
    assert context() is context()


def test_forked_child_has_a_context_of_its_own(tmp_path: Path) -> None:
    subprocess.run([PYTHON, "-W", "error", "-c", FORK, tmp_path], check=True, timeout=60)


def test_listener_raises_the_soft_file_limit_to_the_hard_one() -> None:
    subprocess.run([PYTHON, "-c", LIMIT], check=True, timeout=60)


def test_limit_that_the_system_refuses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError(which, limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_file_limit()


#: Prints the id that a ROUTER assigns to its first peer.
FIRST_ID = """
import sys
from taskyard.net.host import Poller
from taskyard.net.sockets import connect, listen

listener = listen(f"ipc://{sys.argv[1]}/ids.sock")
peer, poller = connect(listener.endpoint), Poller()
poller.add(listener)
peer.send([b"hello"])
while (frames := listener.receive()) is None:
    assert poller.wait(20 * 10**9)
print(frames[0].hex())
"""


@pytest.mark.slow
def test_routing_ids_differ_between_processes(tmp_path: Path) -> None:
    given = [
        subprocess.run(
            [PYTHON, "-c", FIRST_ID, str(tmp_path)], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(3)
    ]
    assert len(set(given)) == 3
