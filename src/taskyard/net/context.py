"""The process's ZeroMQ contexts, its limit of open files, and the ZAP thread that admits peers.

A forked child opens its own context, because the parent's threads do not exist there. ZeroMQ asks
the ZAP thread about every new connection of a listener, and refuses it without an answer.
"""

import contextlib
import ctypes
import ipaddress
import itertools
import logging
import os
import resource
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import zmq

from taskyard.errors import UserError
from taskyard.net import keys
from taskyard.net.keyring import Keyring
from taskyard.net.options import CONTEXT, LISTENING_DOMAIN, SECURE_DOMAIN

logger = logging.getLogger("taskyard.net")

_opening = threading.Lock()
_opened: dict[str, zmq.Context[zmq.Socket[bytes]]] = {}

#: Contexts of the parent. Kept, because their destructors would wait for threads of the parent.
_inherited: list[zmq.Context[zmq.Socket[bytes]]] = []


def context(host: str = "") -> zmq.Context[zmq.Socket[bytes]]:
    """Return this process's context. The first call opens it and starts the ZAP thread.

    With `host`, return the context of sockets that connect to this name. ZeroMQ resolves it in the
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
        start_zap(opened)
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
    """Raise the soft limit of open files to the hard limit: every peer takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems report an endless limit and refuse that number. Then it stays as it is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# Admission of peers over ZAP (ZeroMQ's RFC 27). Requests arrive on an inproc endpoint. The reply is
# a refusal unless a rule allows the peer. On a socket without keys the address decides, on one with
# keys only the key.

ENDPOINT: Final = "inproc://zeromq.zap.01"
VERSION: Final = b"1.0"

#: Version, request id, domain, address, routing id, mechanism. Credentials follow.
_FRAMES_MIN: Final = 6

#: Descriptors reserved for other parts of the process: the journal opens files, too, and
#: ZeroMQ aborts when it can't accept on an ipc socket because none is left. A refused
#: peer holds its descriptor during the handshake, so the reserve covers refused peers as well.
DESCRIPTORS_KEPT_MAX: Final = 1_024
#: Where the limit is small, this part of it is kept.
DESCRIPTORS_KEPT_SHARE: Final = 4


class ZapReply(NamedTuple):
    """A status of ZAP, its reason, and the key that identifies the connection from now on."""

    status: bytes
    text: bytes = b""
    user: bytes = b""


_ACCEPTED: Final = ZapReply(b"200")
#: ZeroMQ's peers retry after status 300, but never after 400.
_TRY_LATER: Final = ZapReply(b"300", b"no descriptor left")
_FULL: Final = ZapReply(b"300", b"too many connections")
_KEYS_UNREADABLE: Final = ZapReply(b"300", b"keys can't be read")
_MALFORMED: Final = ZapReply(b"500", b"malformed request")
_BROKEN: Final = ZapReply(b"500", b"internal error")


def is_local(address: str) -> bool:
    """Return whether it is a loopback address, or an ipc process of this user or root."""
    if address.startswith("localhost:"):
        # From the kernel: localhost:USER:GROUP:PROCESS, as numbers.
        return address.split(":")[1] in ("0", str(os.getuid()))
    return ipaddress.ip_address(address).is_loopback


#: The rule of each domain and mechanism. All other peers are refused.
RULES: Final[dict[tuple[bytes, bytes], Callable[[str], bool]]] = {
    (LISTENING_DOMAIN, b"NULL"): is_local,
}


#: The keyring of each domain. Filled before the socket is bound, read by the thread.
_keyrings: dict[bytes, Keyring] = {}
_domain_numbers = itertools.count(1)

#: The function that decides whether there is room for a connection. Empty: always.
_rooms: list[Callable[..., bool]] = []

#: The last logged error of reading keys. Peers retry, so it is logged once.
_logged: list[str] = [""]


def require_keys(keyring: Keyring) -> bytes:
    """Create a domain where peers need a key of this keyring. Return its name."""
    domain = b"%s.%d" % (SECURE_DOMAIN, next(_domain_numbers))
    # A keyring for the ZAP thread. The given one belongs to the caller's thread.
    _keyrings[domain] = Keyring(keyring.state)
    return domain


def ask_for_room(room: Callable[..., bool] | None) -> None:
    """Refuse connections while `room(is_local=…)` is false. None: no limit."""
    _rooms[:] = [] if room is None else [room]


def zap_reply(request: Sequence[bytes]) -> list[bytes]:
    """Return the reply to a ZAP request. Never raises."""
    try:
        verdict = _reply_to(request)
    except ValueError:
        verdict = _MALFORMED
    except Exception:
        # A peer that can't be checked is refused. The thread must not end.
        logger.exception("internal error: connection refused")
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
    """Check a key. The connection is identified by the key, because names can be reused."""
    (raw,) = credentials
    public = keys.public_text(raw)
    try:
        peer = keyring.find(public)
    except UserError as error:
        _log_once(str(error))
        return _KEYS_UNREADABLE
    _log_once("")
    if peer is None or not peer.roles:
        return ZapReply(b"400", b"unknown or revoked key")
    return ZapReply(b"200", user=public.encode("ascii"))


def _log_once(text: str) -> None:
    """Log an error once, until it changes or is resolved."""
    if text and text != _logged[0]:
        logger.warning("connections with keys are refused: %s", text)
    _logged[0] = text


def descriptors_left() -> bool:
    """Return whether descriptors are left. The kernel assigns the lowest free number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(lowest_free)
    kept = min(DESCRIPTORS_KEPT_MAX, soft // DESCRIPTORS_KEPT_SHARE)
    return soft == resource.RLIM_INFINITY or lowest_free < soft - kept


def start_zap(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Start the ZAP thread. It is bound on return, so that no socket can be opened without it."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.SocketOption.LINGER, 0)
    socket.bind(ENDPOINT)
    threading.Thread(target=_serve, args=(socket,), name="taskyard-zap", daemon=True).start()


def _serve(socket: zmq.Socket[bytes]) -> None:
    with socket:
        try:
            while True:
                socket.send_multipart(zap_reply(socket.recv_multipart()))
        except zmq.ContextTerminated:
            return
