"""The process's ZeroMQ contexts, with their ZAP thread, and its limit of open files.

A forked child opens its own context, because the parent's threads do not exist there.
"""

import contextlib
import ctypes
import os
import resource
import secrets
import threading

import zmq

from taskyard.net import zap
from taskyard.net.options import CONTEXT

_opening = threading.Lock()
_opened: dict[str, zmq.Context[zmq.Socket[bytes]]] = {}

#: Contexts of the parent. Kept, because their destructors would wait for threads of the parent.
_inherited: list[zmq.Context[zmq.Socket[bytes]]] = []


def context(host: str = "") -> zmq.Context[zmq.Socket[bytes]]:
    """Return this process's context. The first call opens it and starts the ZAP thread.

    With `host`, return the one for sockets that connect to this name. ZeroMQ resolves it in the
    thread that serves all sockets of a context, and a name server that is down takes 10 s.
    """
    with _opening:
        if host not in _opened:
            _opened[host] = _open(has_listeners=not host)
        return _opened[host]


def _open(*, has_listeners: bool) -> zmq.Context[zmq.Socket[bytes]]:
    opened: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for option, value in CONTEXT.items():
        opened.set(option, value)
    if has_listeners:
        _seed_routing_ids()
        zap.start(opened)
    return opened


def _seed_routing_ids() -> None:
    """Make the routing ids that a ROUTER assigns unpredictable.

    ZeroMQ counts them up from C's `rand`, unseeded, so they are equal in every process. A peer may
    choose its own id, and ZeroMQ aborts when it is about to assign an id that a peer has chosen.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def _forget_inherited() -> None:
    _inherited.extend(_opened.values())
    _opened.clear()
    _opening.release()


# Held across the fork, so that no thread is inside `context` when the child starts.
os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget_inherited
)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: every peer takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems report an endless limit and refuse that number. Then it stays as it is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
