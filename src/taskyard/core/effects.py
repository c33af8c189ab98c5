"""What the world must do after a decision is durable. The shells carry these out, in order.

An effect names a worker or a client, never a route: who is reached by which socket is the
dialects' business. `request` is whatever the asker put into its event, given back untouched.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from taskyard.core.states import TaskState
from taskyard.core.tasks import Terms


class Refusal(Enum):
    """Why a client's wish was not fulfilled; nothing was changed."""

    EMPTY = "empty"  #: nothing was asked for
    BAD_NAME = "bad name"
    TOO_MANY = "too many"
    DUPLICATE = "duplicate"  #: twice in one message
    CONFLICT = "conflict"  #: known with another payload or in another campaign
    UNKNOWN = "unknown"  #: no such task
    CYCLE = "cycle"
    BUSY = "busy"  #: a leased task can't be given more to wait for
    CANCELLED = "cancelled"  #: would wait for a cancelled task
    FULL = "full"  #: the broker takes no more tasks now
    MALFORMED = "malformed"  #: the columns do not fit together


class Effect(Struct, gc=False):
    """Base of all effects."""


class Accepted(Effect):
    """To a client: its tasks are taken. `known` of them were there already."""

    client: bytes
    request: int
    new: int
    known: int = 0


class Refused(Effect):
    """To a client: nothing of that was done, and why."""

    client: bytes
    request: int
    refusal: Refusal
    text: str


class Acted(Effect):
    """To a client: its wish was carried out on so many tasks."""

    client: bytes
    request: int
    count: int


class Told(Effect):
    """To a client that watches: these tasks are settled."""

    client: bytes
    request: int
    names: list[bytes]
    states: list[TaskState]
    #: Results of DONE tasks where they are at hand, reasons of FAILED ones.
    texts: list[bytes]


class Assign(Effect):
    """To a worker: take these tasks."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]
    payloads: list[bytes]
    terms: list[Terms]
    lanes: list[bytes]
    lease_ns: int


class Nothing(Effect):
    """To a worker: there is no work for you now."""

    worker: bytes
    #: Nor will there be, unless somebody submits or retries.
    settled: bool


class Wake(Effect):
    """To a worker that wants to be called: come and ask."""

    worker: bytes
    service: bytes


class Stop(Effect):
    """To a worker: these tasks of yours are not wanted any more."""

    worker: bytes
    names: list[bytes]
    attempts: list[int]


class Dismiss(Effect):
    """To a worker: go away."""

    worker: bytes


class Stranger(Effect):
    """To a worker: nobody knows you. Say who you are."""

    worker: bytes


class Noted(Effect):
    """To a worker: its report is taken, but for tasks that it does not hold."""

    worker: bytes
    request: int
    missing: list[bytes]
