"""Words and settings that both sides of ping-pong share. No sockets, no clock."""

import re
from typing import Final

from msgspec import Struct

from taskyard.core.limits import SECOND_NS
from taskyard.wire.dialect import PING_PONG, TaskDefaults

#: The dialect's name, in facts and terms.
DIALECT: Final = b"ping-pong"

# Words of a worker.
READY: Final = b"READY"
PING: Final = b"PING"
DISCONNECT: Final = b"DISCONNECT"

# Words of the broker to a worker. Any other frame is a job.
PONG: Final = b"PONG"
EXIT: Final = b"EXIT"

# Words of the broker to a client. A worker sends ERROR, with a reason after it, as well.
ERROR: Final = b"ERROR"
FULL: Final = b"FULL"

#: A worker would read these jobs as words of the broker.
RESERVED_JOBS: Final = (PONG, EXIT)

#: The broker would read these results as words of the worker.
RESERVED_RESULTS: Final = (READY, PING, DISCONNECT)

#: The published figure has PING in small letters, and its number in the same frame.
_PING_SPELLED: Final = re.compile(rb"(?:PING|ping)(?:, ?[0-9]{1,20})?")

#: Digits of a ping's number. Real counts are shorter.
COUNT_DIGITS_MAX: Final = 20

#: A delimiter and a word. A number or a reason is one frame more.
FRAMES: Final = 2
FRAMES_MAX: Final = 3


class Settings(Struct, frozen=True):
    """The broker's settings of ping-pong."""

    #: WORKER_EXPIRE_SECONDS: the timeout of a worker that waits for a job, or has pinged
    #: at work.
    expire_ns: int = 3 * SECOND_NS
    #: The timeout of a worker that works and does not ping.
    lease_ns: int = 60 * SECOND_NS
    #: The services of the workers.
    services: tuple[bytes, ...] = (b"default",)
    #: The terms of clients' jobs.
    tasks: TaskDefaults = TaskDefaults()
    #: Jobs of clients that may be open at once. More are refused.
    queue_max: int = 100_000
    #: Hides connection ids in the names of workers, because they allow guessing the next id. Empty:
    #: ids are shown.
    secret: bytes = b""
    #: The prefix of the workers' names.
    prefix: bytes = PING_PONG


def is_ping(frame: bytes) -> bool:
    """Return whether a frame is PING in any of its spellings."""
    return _PING_SPELLED.fullmatch(frame) is not None


def is_word(result: bytes) -> bool:
    """Return whether a result would be read as a word of the worker."""
    return result in RESERVED_RESULTS or is_ping(result)


def is_count(frame: bytes) -> bool:
    """Return whether a frame is a number in ASCII digits."""
    return 0 < len(frame) <= COUNT_DIGITS_MAX and frame.isdigit()
