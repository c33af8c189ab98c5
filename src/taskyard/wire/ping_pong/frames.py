"""What both sides of ping-pong share: its words and its settings. No sockets, no clock."""

import re
from typing import Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS

#: The dialect's name, in facts and terms.
DIALECT: Final = b"ping-pong"

# A worker's words.
READY: Final = b"READY"
PING: Final = b"PING"
DISCONNECT: Final = b"DISCONNECT"

# The broker's words, to a worker. What is none of these is a job.
PONG: Final = b"PONG"
EXIT: Final = b"EXIT"

# The broker's words, to a client; ERROR, with a reason after it, is a worker's word too.
ERROR: Final = b"ERROR"
FULL: Final = b"FULL"

#: A job of these would be taken for the broker's own words.
RESERVED_JOBS: Final = (PONG, EXIT)

#: A result of these would be taken for the worker's own words.
RESERVED_RESULTS: Final = (READY, PING, DISCONNECT)

#: The published figure writes PING in small letters, and its number in the same frame.
_PING_SPELLED: Final = re.compile(rb"(?:PING|ping)(?:, ?[0-9]{1,20})?")

#: Digits of a ping's number: more than anybody counts.
COUNT_DIGITS_MAX: Final = 20

#: A delimiter and a word; with a number or a reason it is one more.
FRAMES: Final = 2
FRAMES_MAX: Final = 3


class Settings(Struct, frozen=True):
    """What a broker can be told about ping-pong."""

    #: WORKER_EXPIRE_SECONDS: the silence after which a worker is gone, while it waits for a job or
    #: shows that it can work and ping at once.
    expire_ns: int = 3 * SECOND_NS
    #: The silence that is allowed to a worker that works and does not ping meanwhile.
    lease_ns: int = 60 * SECOND_NS
    #: What the workers do, and what the clients' jobs are.
    services: tuple[bytes, ...] = (b"default",)
    #: Jobs of clients that may wait for their answers at once; further ones are refused.
    queue_max: int = 100_000
    #: Hides the ids of connections in the names of workers: who knows one could guess the next.
    #: Empty: they are shown.
    secret: bytes = b""


def is_ping(frame: bytes) -> bool:
    """Return whether a frame is PING, in any of its spellings."""
    return _PING_SPELLED.fullmatch(frame) is not None


def is_word(result: bytes) -> bool:
    """Return whether a result would be taken for one of the worker's own words."""
    return result in RESERVED_RESULTS or is_ping(result)


def is_count(frame: bytes) -> bool:
    """A number as it is sent: ASCII digits."""
    return 0 < len(frame) <= COUNT_DIGITS_MAX and frame.isdigit()
