"""Who may connect. ZeroMQ asks over ZAP (its RFC 27) before a connection carries a message.

The questions come on an inproc endpoint to one thread of the process. `answer` is pure and total:
whatever it is asked it says no, unless a rule says yes. Knows domains and addresses, no messages.
"""

import ipaddress
import os
import resource
import threading
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from taskyard.net.options import LISTENING_DOMAIN

ENDPOINT: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"

#: Version, request id, domain, address, routing id, mechanism; credentials follow.
_FRAMES_MIN: Final = 6

#: Descriptors that peers must leave to the rest of the process: the journal opens files, too, and
#: ZeroMQ ends the whole process when it can't accept on an ipc socket for want of one. A refused
#: peer holds its own for the time of a handshake, so the reserve is for those as well.
DESCRIPTORS_KEPT_MAX: Final = 1_024
#: Where the limit is small, this part of it is kept.
DESCRIPTORS_KEPT_SHARE: Final = 4

_COME_IN: Final = (b"200", b"")
#: ZeroMQ's peers come back after this one, but never after a 400.
_LATER: Final = (b"300", b"no descriptor left")
_MALFORMED: Final = (b"500", b"malformed request")


def is_of_this_machine(address: str) -> bool:
    """A loopback address, or a process on an ipc socket that is this user's, or root's."""
    if address.startswith("localhost:"):
        # As the kernel says: localhost:USER:GROUP:PROCESS, in numbers.
        return address.split(":")[1] in ("0", str(os.getuid()))
    return ipaddress.ip_address(address).is_loopback


#: Who may come in, by domain and mechanism. What is not here may not.
RULES: Final[dict[tuple[bytes, bytes], Callable[[str], bool]]] = {
    (LISTENING_DOMAIN, b"NULL"): is_of_this_machine,
}


def answer(request: Sequence[bytes]) -> list[bytes]:
    """The reply to one question, whatever is in it."""
    try:
        status, text = _verdict(request)
    except ValueError:
        status, text = _MALFORMED
    request_id = request[1] if len(request) > 1 else b""
    return [VERSION, request_id, status, text, b"", b""]


def _verdict(request: Sequence[bytes]) -> tuple[bytes, bytes]:
    if len(request) < _FRAMES_MIN or request[0] != VERSION:
        return _MALFORMED
    _, _, domain, address, _, mechanism = request[:_FRAMES_MIN]
    rule = RULES.get((domain, mechanism))
    if rule is None:
        return b"400", b"unknown domain or mechanism"
    if not rule(address.decode("ascii")):
        return b"400", b"not from here"
    return _COME_IN if descriptors_left() else _LATER


def descriptors_left() -> bool:
    """The kernel gives the lowest free number: it tells how many are taken at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(lowest_free)
    kept = min(DESCRIPTORS_KEPT_MAX, soft // DESCRIPTORS_KEPT_SHARE)
    return soft == resource.RLIM_INFINITY or lowest_free < soft - kept


def start(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Answer from now on. Bound before it returns, so that no socket can be opened unguarded."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.SocketOption.LINGER, 0)
    socket.bind(ENDPOINT)
    threading.Thread(target=_serve, args=(socket,), name="taskyard-zap", daemon=True).start()


def _serve(socket: zmq.Socket[bytes]) -> None:
    with socket:
        try:
            while True:
                socket.send_multipart(answer(socket.recv_multipart()))
        except zmq.ContextTerminated:
            return
