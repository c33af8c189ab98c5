"""What a process has one of: its ZeroMQ context, with its ZAP thread, and its file limit.

A forked child gets a context of its own: the parent's threads did not come with it.
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
_opened: list[zmq.Context[zmq.Socket[bytes]]] = []

#: Contexts of the parent. Kept, because their destructors would wait for threads that are not here.
_inherited: list[zmq.Context[zmq.Socket[bytes]]] = []


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's, opened when first asked for; ZAP is answered before anybody can bind."""
    with _opening:
        if not _opened:
            _opened.append(_open())
        return _opened[0]


def _open() -> zmq.Context[zmq.Socket[bytes]]:
    _seed_routing_ids()
    opened: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for option, value in CONTEXT.items():
        opened.set(option, value)
    zap.start(opened)
    return opened


def _seed_routing_ids() -> None:
    """Let nobody know what ids a ROUTER gives: ZeroMQ counts them up from C's `rand`, which nobody
    seeds, so that they are the same in every process. A peer may choose its own id, and ZeroMQ ends
    the process when it is about to give one that a peer has chosen."""
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def _forget_inherited() -> None:
    _inherited.extend(_opened)
    _opened.clear()
    _opening.release()


# Held across the fork, so that no other thread is half way through `context` in the child.
os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_forget_inherited
)


def raise_file_limit() -> None:
    """Every peer takes a descriptor; the usual soft limit of 1,024 is there for old programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems call a limit endless and take no such number: then it stays as it is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
