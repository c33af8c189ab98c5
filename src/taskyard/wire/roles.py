"""Who may ask what, as one table: roles by request. Pure: keys and sockets are others' business.

A guest is whoever came in by a key. It has one role, and each of its messages is looked at before
it means anything. What has no row here is for admins alone, so a new request is shut until somebody
has thought about it; a test asks for its row. A worker's key is bound to a name: nobody can take
tasks, report on them or say goodbye in another worker's place.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from taskyard.core.tasks import shown
from taskyard.wire import dwork_pb2 as pb

_Q: Final = pb.QueryMsg


class Role(StrEnum):
    """What a key is for; the value is how it is written in files and on the command line."""

    VIEWER = "viewer"
    PRODUCER = "producer"
    WORKER = "worker"
    ADMIN = "admin"


class Guest(Struct, frozen=True):
    """Whoever came in by a key."""

    name: str
    #: None: the key was good once, and is not any more.
    role: Role | None


#: By a key that nobody knows any more, or while nobody can say who is known.
NOBODY: Final = Guest("", None)


class Right(Struct, frozen=True):
    """Who may ask for something, the one with the fewest rights first."""

    roles: tuple[Role, ...]
    #: What it is, after "may not".
    what: str
    #: `location` says who asks: a worker's key is bound to it.
    is_by_worker: bool = False


_ALL: Final = (Role.VIEWER, Role.PRODUCER, Role.WORKER, Role.ADMIN)
_LOOKING: Final = (Role.VIEWER, Role.PRODUCER, Role.ADMIN)
_SUBMITTING: Final = (Role.PRODUCER, Role.ADMIN)
_WORKING: Final = (Role.WORKER, Role.ADMIN)
_RULING: Final = (Role.ADMIN,)

#: The table.
RIGHTS: Final[dict[int, Right]] = {
    # Every peer of ours asks for it as a sign of life; it tells counts, and no names.
    _Q.OK: Right(_ALL, "ask for the counts"),
    _Q.Lookup: Right(_ALL, "look a task up"),
    _Q.Stats: Right(_LOOKING, "see the status"),
    _Q.List: Right(_LOOKING, "list tasks"),
    _Q.Show: Right(_LOOKING, "see a task"),
    # Who submits finds its lane by them, who works its agents. They tell commands, and no tasks.
    _Q.Rules: Right((Role.PRODUCER, Role.WORKER, Role.ADMIN), "ask for the rules"),
    _Q.Explain: Right(_LOOKING, "ask why a task waits"),
    _Q.Workers: Right(_LOOKING, "list workers"),
    _Q.Lanes: Right(_LOOKING, "list lanes"),
    _Q.Watch: Right(_LOOKING, "watch tasks"),
    _Q.Follow: Right(_LOOKING, "follow what happens"),
    _Q.Results: Right(_LOOKING, "read results"),
    _Q.Output: Right(_LOOKING, "read what tasks print"),
    _Q.Create: Right(_SUBMITTING, "submit tasks"),
    _Q.Cancel: Right(_SUBMITTING, "cancel tasks"),
    _Q.Retry: Right(_SUBMITTING, "retry tasks"),
    _Q.Move: Right(_SUBMITTING, "move tasks"),
    _Q.Expire: Right(_SUBMITTING, "expire tasks"),
    _Q.Steal: Right(_WORKING, "take tasks", is_by_worker=True),
    _Q.Complete: Right(_WORKING, "report on tasks", is_by_worker=True),
    _Q.Transfer: Right(_WORKING, "give tasks back", is_by_worker=True),
    _Q.Progress: Right(_WORKING, "report progress", is_by_worker=True),
    _Q.Heartbeat: Right(_WORKING, "show a worker's life", is_by_worker=True),
    _Q.Exit: Right(_WORKING, "say a worker's goodbye", is_by_worker=True),
    _Q.Drain: Right(_RULING, "send workers home"),
    _Q.Pause: Right(_RULING, "pause services and lanes"),
    _Q.Resume: Right(_RULING, "resume services and lanes"),
}

_UNLISTED: Final = Right(_RULING, "ask that")

#: How much of a name that is no good is shown.
_SHOWN: Final = 64


def refusal(guest: Guest, query: pb.QueryMsg) -> str:
    """Why this guest may not ask this; empty: it may."""
    if guest.role is None:
        return _refusal_of_nobody(guest)
    right = RIGHTS.get(query.type, _UNLISTED)
    if guest.role not in right.roles:
        return (
            f"the key {guest.name} is {with_article(guest.role)}'s and may not {right.what}; "
            f"ask for {with_article(right.roles[0])}'s key"
        )
    if right.is_by_worker and guest.role is Role.WORKER:
        return _refusal_of_name(guest, query.location)
    return ""


def may_speak_as(key: str, location: bytes) -> bool:
    """Whether a worker's key of that name is good for a worker of this name."""
    own = key.encode()
    return location == own or location.startswith(own + b"/")


def with_article(role: Role) -> str:
    """`a viewer`, `an admin`."""
    return f"{'an' if role is Role.ADMIN else 'a'} {role}"


def _refusal_of_nobody(guest: Guest) -> str:
    if guest.name:
        return f"the key {guest.name} was revoked; ask whoever runs the broker for another"
    return "the broker does not know this key any more; ask whoever runs it for another"


def _refusal_of_name(guest: Guest, location: bytes) -> str:
    if may_speak_as(guest.name, location):
        return ""
    return (
        f"the key {guest.name} is for workers named {guest.name} or {guest.name}/…, not for "
        f"{shown(location[:_SHOWN])!r}; give such a --name, or none"
    )
