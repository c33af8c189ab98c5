"""Permissions as one table: the roles that may send each request. Pure: no keys, no sockets.

An authenticated peer connected with a key. It has one role, and each of its messages is checked
before it is handled. A request without a row is for admins only, so that a new one is denied by
default. A test demands a row for each. A worker's key is bound to a name, so that its holder can't
take tasks, report on them or leave in place of another worker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

from taskyard.core.model import Refusal, shown
from taskyard.wire import dwork_pb2 as pb

_Q: Final = pb.QueryMsg


class Role(StrEnum):
    """The role of a key. The value is used in files and on the command line."""

    VIEWER = "viewer"
    PRODUCER = "producer"
    WORKER = "worker"
    ADMIN = "admin"


class AuthenticatedPeer(Struct, frozen=True):
    """A peer that connected with a key."""

    name: str
    #: None: the key was revoked.
    role: Role | None


#: Has a key that is unknown by now, or the keys can't be read.
UNKNOWN_PEER: Final = AuthenticatedPeer("", None)


class Permission(Struct, frozen=True):
    """The roles that may send a request, the one with the fewest rights first."""

    roles: tuple[Role, ...]
    #: The action, after "may not" in errors.
    action: str
    #: The request names a worker in `location`, to which a worker's key is bound.
    is_by_worker: bool = False


_ALL: Final = (Role.VIEWER, Role.PRODUCER, Role.WORKER, Role.ADMIN)
_READERS: Final = (Role.VIEWER, Role.PRODUCER, Role.ADMIN)
_PRODUCERS: Final = (Role.PRODUCER, Role.ADMIN)
_WORKERS: Final = (Role.WORKER, Role.ADMIN)
_ADMINS: Final = (Role.ADMIN,)

#: The table.
PERMISSIONS: Final[dict[int, Permission]] = {
    # All our peers send it as a ping. The reply has counts and no names.
    _Q.OK: Permission(_ALL, "ask for the counts"),
    _Q.Lookup: Permission(_ALL, "look a task up"),
    _Q.Stats: Permission(_READERS, "see the status"),
    _Q.List: Permission(_READERS, "list tasks"),
    _Q.Show: Permission(_READERS, "see a task"),
    # Producers need them for lanes, workers for agents. They contain commands and no tasks.
    _Q.Rules: Permission((Role.PRODUCER, Role.WORKER, Role.ADMIN), "ask for the rules"),
    _Q.Explain: Permission(_READERS, "ask why a task waits"),
    _Q.Workers: Permission(_READERS, "list workers"),
    _Q.Lanes: Permission(_READERS, "list lanes"),
    _Q.Watch: Permission(_READERS, "watch tasks"),
    _Q.Follow: Permission(_READERS, "follow records"),
    _Q.Results: Permission(_READERS, "read results"),
    _Q.Output: Permission(_READERS, "read output of tasks"),
    _Q.Create: Permission(_PRODUCERS, "submit tasks"),
    _Q.Cancel: Permission(_PRODUCERS, "cancel tasks"),
    _Q.Retry: Permission(_PRODUCERS, "retry tasks"),
    _Q.Move: Permission(_PRODUCERS, "move tasks"),
    _Q.Edit: Permission(_PRODUCERS, "edit tasks"),
    _Q.Expire: Permission(_PRODUCERS, "expire tasks"),
    _Q.Steal: Permission(_WORKERS, "take tasks", is_by_worker=True),
    _Q.Complete: Permission(_WORKERS, "report on tasks", is_by_worker=True),
    _Q.Transfer: Permission(_WORKERS, "return tasks", is_by_worker=True),
    _Q.Progress: Permission(_WORKERS, "report progress", is_by_worker=True),
    _Q.Append: Permission(_WORKERS, "send output of tasks", is_by_worker=True),
    _Q.Heartbeat: Permission(_WORKERS, "send heartbeats", is_by_worker=True),
    _Q.Exit: Permission(_WORKERS, "deregister workers", is_by_worker=True),
    _Q.Drain: Permission(_ADMINS, "drain workers"),
    _Q.Pause: Permission(_ADMINS, "pause services and lanes"),
    _Q.Resume: Permission(_ADMINS, "resume services and lanes"),
}

_UNLISTED: Final = Permission(_ADMINS, "send this request")

#: Bytes of a wrong name that are shown in errors.
_SHOWN: Final = 64


def refusal(peer: AuthenticatedPeer, query: pb.QueryMsg) -> tuple[Refusal, str] | None:
    """Return why a peer may not send a request: a code and a sentence. None: it may."""
    if peer.role is None:
        return Refusal.FORBIDDEN, _unknown_key_text(peer)
    right = PERMISSIONS.get(query.type, _UNLISTED)
    if peer.role not in right.roles:
        return Refusal.FORBIDDEN, (
            f"key {peer.name!r}: {with_article(peer.role)} may not {right.action} (this needs "
            f"{with_article(right.roles[0])}'s key)"
        )
    if right.is_by_worker and peer.role is Role.WORKER:
        return _refusal_of_name(peer, query.location)
    return None


def may_act_as(key: str, location: bytes) -> bool:
    """Return whether a worker's key of that name allows a worker of this name."""
    own = key.encode()
    return location == own or location.startswith(own + b"/")


def with_article(role: Role) -> str:
    """Return the role with its article: `a viewer`, `an admin`."""
    return f"{'an' if role is Role.ADMIN else 'a'} {role}"


def _unknown_key_text(peer: AuthenticatedPeer) -> str:
    if peer.name:
        return f"key {peer.name!r} was revoked"
    return "this key is no longer known to the broker"


def _refusal_of_name(peer: AuthenticatedPeer, location: bytes) -> tuple[Refusal, str] | None:
    if may_act_as(peer.name, location):
        return None
    return Refusal.FORBIDDEN, (
        f"key {peer.name!r}: workers must be named {peer.name} or {peer.name}/…, not "
        f"{shown(location[:_SHOWN])!r}"
    )
