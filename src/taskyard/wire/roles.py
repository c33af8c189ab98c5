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

from taskyard.core.model import shown
from taskyard.wire import dwork_pb2 as pb

_Q: Final = pb.QueryMsg


class Role(StrEnum):
    """What a key is for; the value is how it is written in files and on the command line."""

    VIEWER = "viewer"
    PRODUCER = "producer"
    WORKER = "worker"
    ADMIN = "admin"


class AuthenticatedPeer(Struct, frozen=True):
    """Whoever came in by a key."""

    name: str
    #: None: the key was good once, and is not any more.
    role: Role | None


#: By a key that nobody knows any more, or while nobody can say who is known.
UNKNOWN_PEER: Final = AuthenticatedPeer("", None)


class Permission(Struct, frozen=True):
    """Who may ask for something, the one with the fewest rights first."""

    roles: tuple[Role, ...]
    #: What it is, after "may not".
    action: str
    #: `location` says who asks: a worker's key is bound to it.
    is_by_worker: bool = False


_ALL: Final = (Role.VIEWER, Role.PRODUCER, Role.WORKER, Role.ADMIN)
_READERS: Final = (Role.VIEWER, Role.PRODUCER, Role.ADMIN)
_PRODUCERS: Final = (Role.PRODUCER, Role.ADMIN)
_WORKERS: Final = (Role.WORKER, Role.ADMIN)
_ADMINS: Final = (Role.ADMIN,)

#: The table.
PERMISSIONS: Final[dict[int, Permission]] = {
    # Every peer of ours asks for it as a sign of life; it tells counts, and no names.
    _Q.OK: Permission(_ALL, "ask for the counts"),
    _Q.Lookup: Permission(_ALL, "look a task up"),
    _Q.Stats: Permission(_READERS, "see the status"),
    _Q.List: Permission(_READERS, "list tasks"),
    _Q.Show: Permission(_READERS, "see a task"),
    # Who submits finds its lane by them, who works its agents. They tell commands, and no tasks.
    _Q.Rules: Permission((Role.PRODUCER, Role.WORKER, Role.ADMIN), "ask for the rules"),
    _Q.Explain: Permission(_READERS, "ask why a task waits"),
    _Q.Workers: Permission(_READERS, "list workers"),
    _Q.Lanes: Permission(_READERS, "list lanes"),
    _Q.Watch: Permission(_READERS, "watch tasks"),
    _Q.Follow: Permission(_READERS, "follow what happens"),
    _Q.Results: Permission(_READERS, "read results"),
    _Q.Output: Permission(_READERS, "read what tasks print"),
    _Q.Create: Permission(_PRODUCERS, "submit tasks"),
    _Q.Cancel: Permission(_PRODUCERS, "cancel tasks"),
    _Q.Retry: Permission(_PRODUCERS, "retry tasks"),
    _Q.Move: Permission(_PRODUCERS, "move tasks"),
    _Q.Expire: Permission(_PRODUCERS, "expire tasks"),
    _Q.Steal: Permission(_WORKERS, "take tasks", is_by_worker=True),
    _Q.Complete: Permission(_WORKERS, "report on tasks", is_by_worker=True),
    _Q.Transfer: Permission(_WORKERS, "give tasks back", is_by_worker=True),
    _Q.Progress: Permission(_WORKERS, "report progress", is_by_worker=True),
    _Q.Heartbeat: Permission(_WORKERS, "show a worker's life", is_by_worker=True),
    _Q.Exit: Permission(_WORKERS, "say a worker's goodbye", is_by_worker=True),
    _Q.Drain: Permission(_ADMINS, "send workers home"),
    _Q.Pause: Permission(_ADMINS, "pause services and lanes"),
    _Q.Resume: Permission(_ADMINS, "resume services and lanes"),
}

_UNLISTED: Final = Permission(_ADMINS, "ask that")

#: How much of a name that is no good is shown.
_SHOWN: Final = 64


def refusal(peer: AuthenticatedPeer, query: pb.QueryMsg) -> str:
    """Why this guest may not ask this; empty: it may."""
    if peer.role is None:
        return _unknown_key_refusal(peer)
    right = PERMISSIONS.get(query.type, _UNLISTED)
    if peer.role not in right.roles:
        return (
            f"the key {peer.name} is {with_article(peer.role)}'s and may not {right.action}; "
            f"ask for {with_article(right.roles[0])}'s key"
        )
    if right.is_by_worker and peer.role is Role.WORKER:
        return _refusal_of_name(peer, query.location)
    return ""


def may_act_as(key: str, location: bytes) -> bool:
    """Whether a worker's key of that name is good for a worker of this name."""
    own = key.encode()
    return location == own or location.startswith(own + b"/")


def with_article(role: Role) -> str:
    """`a viewer`, `an admin`."""
    return f"{'an' if role is Role.ADMIN else 'a'} {role}"


def _unknown_key_refusal(peer: AuthenticatedPeer) -> str:
    if peer.name:
        return f"the key {peer.name} was revoked; ask whoever runs the broker for another"
    return "the broker does not know this key any more; ask whoever runs it for another"


def _refusal_of_name(peer: AuthenticatedPeer, location: bytes) -> str:
    if may_act_as(peer.name, location):
        return ""
    return (
        f"the key {peer.name} is for workers named {peer.name} or {peer.name}/…, not for "
        f"{shown(location[:_SHOWN])!r}; give such a --name, or none"
    )
