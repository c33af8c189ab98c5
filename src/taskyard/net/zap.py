"""Who may connect. ZeroMQ asks over ZAP (its RFC 27) before a connection carries a message.

The questions come on an inproc endpoint to one thread of the process. `reply` is total: whatever
it is asked it says no, unless a rule says yes. On a plain socket the address is the rule, on one
that demands keys it is the key, and nothing else. Knows domains, addresses and keys, no messages.
"""

import ipaddress
import itertools
import logging
import os
import resource
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import zmq

from taskyard.errors import UserError
from taskyard.net import keys
from taskyard.net.keyring import Keyring
from taskyard.net.options import LISTENING_DOMAIN, SECURE_DOMAIN

logger = logging.getLogger("taskyard.net")

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


class ZapReply(NamedTuple):
    """A status of ZAP, why, and by which key whoever asked is known from now on."""

    status: bytes
    text: bytes = b""
    user: bytes = b""


_ACCEPTED: Final = ZapReply(b"200")
#: ZeroMQ's peers come back after this one, but never after a 400.
_TRY_LATER: Final = ZapReply(b"300", b"no descriptor left")
_FULL: Final = ZapReply(b"300", b"too many connections")
_KEYS_UNREADABLE: Final = ZapReply(b"300", b"keys can't be read")
_MALFORMED: Final = ZapReply(b"500", b"malformed request")
_BROKEN: Final = ZapReply(b"500", b"internal error")


def is_local(address: str) -> bool:
    """A loopback address, or a process on an ipc socket that is this user's, or root's."""
    if address.startswith("localhost:"):
        # As the kernel says: localhost:USER:GROUP:PROCESS, in numbers.
        return address.split(":")[1] in ("0", str(os.getuid()))
    return ipaddress.ip_address(address).is_loopback


#: Who may come in, by domain and mechanism. What is not here may not.
RULES: Final[dict[tuple[bytes, bytes], Callable[[str], bool]]] = {
    (LISTENING_DOMAIN, b"NULL"): is_local,
}


#: By domain: whose keys open it. Filled before the socket is bound, read by the thread.
_keyrings: dict[bytes, Keyring] = {}
_domain_numbers = itertools.count(1)

#: Asks whether there is room for one more connection; empty: always.
_rooms: list[Callable[..., bool]] = []

#: What was logged last of keys that can't be read: peers ask again and again.
_logged: list[str] = [""]


def require_keys(keyring: Keyring) -> bytes:
    """A domain of its own, where nobody comes in without a key of this ring."""
    domain = b"%s.%d" % (SECURE_DOMAIN, next(_domain_numbers))
    # The thread's own: the ring that was given belongs to whoever gave it.
    _keyrings[domain] = Keyring(keyring.state)
    return domain


def ask_for_room(room: Callable[..., bool] | None) -> None:
    """Let nobody in for whom there is no room. `room` is called with `is_local`; None: no limit."""
    _rooms[:] = [] if room is None else [room]


def reply(request: Sequence[bytes]) -> list[bytes]:
    """The reply to one question, whatever is in it."""
    try:
        verdict = _reply_to(request)
    except ValueError:
        verdict = _MALFORMED
    except Exception:
        # Who can't be judged is not let in, and the next one is judged all the same.
        logger.exception("a connection was refused by a mistake of ours")
        verdict = _BROKEN
    request_id = request[1] if len(request) > 1 else b""
    return [VERSION, request_id, verdict.status, verdict.text, verdict.user, b""]


def _reply_to(request: Sequence[bytes]) -> ZapReply:
    if len(request) < _FRAMES_MIN or request[0] != VERSION:
        return _MALFORMED
    _, _, domain, address, _, mechanism = request[:_FRAMES_MIN]
    if domain in _keyrings and mechanism == b"CURVE":
        verdict = _key_reply(_keyrings[domain], request[_FRAMES_MIN:])
    else:
        verdict = _address_reply(domain, mechanism, address)
    if verdict.status != _ACCEPTED.status:
        return verdict
    if not all(room(is_local=address.startswith(b"localhost:")) for room in _rooms):
        return _FULL
    return verdict if descriptors_left() else _TRY_LATER


def _address_reply(domain: bytes, mechanism: bytes, address: bytes) -> ZapReply:
    rule = RULES.get((domain, mechanism))
    if rule is None:
        return ZapReply(b"400", b"unknown domain or mechanism")
    return _ACCEPTED if rule(address.decode("ascii")) else ZapReply(b"400", b"not from here")


def _key_reply(keyring: Keyring, credentials: Sequence[bytes]) -> ZapReply:
    """Known by the key itself, not by its name: a name may get another key one day."""
    (raw,) = credentials
    public = keys.public_text(raw)
    try:
        guest = keyring.find(public)
    except UserError as error:
        _log_once(str(error))
        return _KEYS_UNREADABLE
    _log_once("")
    if guest is None or guest.role is None:
        return ZapReply(b"400", b"unknown or revoked key")
    return ZapReply(b"200", user=public.encode("ascii"))


def _log_once(text: str) -> None:
    """Once, until something else is wrong or nothing is."""
    if text and text != _logged[0]:
        logger.warning("nobody comes in by a key: %s", text)
    _logged[0] = text


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
                socket.send_multipart(reply(socket.recv_multipart()))
        except zmq.ContextTerminated:
            return
