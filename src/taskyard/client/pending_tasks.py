"""A task on its way to the broker, and many of them as columns of a message."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from taskyard.core.model import Submission

if TYPE_CHECKING:
    from taskyard.client.results import SettableFuture
    from taskyard.core.events import UnknownPolicy
    from taskyard.core.model import Terms
    from taskyard.process.call_values import Restore


#: Columns of tasks. They make no call for each task.
_NAME: Final = attrgetter("name")
_PAYLOAD: Final = attrgetter("payload")
_LANE: Final = attrgetter("lane")
_AFTER: Final = attrgetter("after")


class PendingTask(Struct, gc=False):
    """A task that the broker has not acknowledged. Part of no cycle."""

    #: In the campaign of its terms.
    name: bytes
    payload: bytes
    terms: Terms
    #: None: by the lane template of its service.
    lane: bytes | None
    after: tuple[bytes, ...]
    unknown: UnknownPolicy
    future: SettableFuture
    #: Settle the future when the task is settled. False: as soon as it is accepted.
    watched: bool = True
    #: A known task of this name is used, whatever its payload.
    adopts: bool = False
    #: Its size in a message. Set by the session.
    message_bytes: int = 0
    #: Stores its large arguments again. It refers to the caller's objects, until the broker has the
    #: task. None: nothing is large.
    restore: Restore | None = None
    #: How often that was done.
    uploads: int = 0


class Batch(NamedTuple):
    """Tasks that are submitted in one message."""

    #: How many tasks were submitted before the first of them.
    before: int
    tasks: list[PendingTask]


def submission_of(tasks: list[PendingTask]) -> Submission:
    """Return tasks as columns. Shared terms are sent once."""
    places: dict[int, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    for task in tasks:
        place = places.get(id(task.terms))
        if place is None:
            place = places[id(task.terms)] = len(terms)
            terms.append(task.terms)
        terms_at.append(place)
    lanes, after = [*map(_LANE, tasks)], [*map(_AFTER, tasks)]
    return Submission(
        names=[*map(_NAME, tasks)],
        payloads=[*map(_PAYLOAD, tasks)],
        terms=terms,
        terms_at=terms_at if len(terms) > 1 else None,
        lanes=[lane or b"" for lane in lanes] if any(lanes) else None,
        after=[list(names) for names in after] if any(after) else None,
    )
