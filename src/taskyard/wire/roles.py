"""Permissions as one table: the roles that may send each request of each dialect. Pure: no keys, no
sockets.

An authenticated peer connected with a key. The key has one or several roles, and each of its
messages is checked before it is handled. A request without a row is for admins only, so that a new
one is denied by default. A test demands a row for each. A worker's key is bound to a name, so that
its holder can't take tasks, report on them or leave in place of another worker. The role `relay`
lifts that, and permits nothing by itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from taskyard.core.model import Refusal, shown
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

_Q: Final = pb.QueryMsg


class Role(StrEnum):
    """A role of a key. The value is used in files and on the command line."""

    VIEWER = "viewer"
    PRODUCER = "producer"
    WORKER = "worker"
    #: Forwards messages of workers with any name. Permits nothing without another role.
    RELAY = "relay"
    ADMIN = "admin"


class AuthenticatedPeer(Struct, frozen=True):
    """A peer that connected with a key."""

    name: str
    #: Empty: the key was revoked.
    roles: tuple[Role, ...]

    @property
    def is_bound(self) -> bool:
        """Return whether its workers must have the name of the key."""
        return Role.ADMIN not in self.roles and Role.RELAY not in self.roles


#: Has a key that is unknown by now, or the keys can't be read.
UNKNOWN_PEER: Final = AuthenticatedPeer("", ())


class Permission(Struct, frozen=True):
    """The roles that may send a request, the role with the fewest rights first."""

    roles: tuple[Role, ...]
    #: The action, after "may not" in errors.
    action: str
    #: The request names a worker, to which a worker's key is bound.
    is_by_worker: bool = False


#: A request in the table: the type of a QueryMsg, or a word of the dialect.
Request: TypeAlias = int | str

# Dialects, as the table names them.
DWORK: Final = "dwork"
ROUND_ROBIN: Final = "round-robin"
PING_PONG: Final = "ping-pong"
WMP: Final = "wmp"

# A Read of a worker.
READ_FOR_TASK: Final = "Read for a task"
# Requests of round-robin that are not one word of it.
SUBMIT: Final = "EXEC or TRACKEXEC of another key"
FORWARD: Final = "forwarded message"
FORWARD_REPLY: Final = "forwarded reply"
# And of ping-pong.
JOB: Final = "job"
RESULT: Final = "result"


_ALL: Final = (Role.VIEWER, Role.PRODUCER, Role.WORKER, Role.ADMIN)
_READERS: Final = (Role.VIEWER, Role.PRODUCER, Role.ADMIN)
_PRODUCERS: Final = (Role.PRODUCER, Role.ADMIN)
_WORKERS: Final = (Role.WORKER, Role.ADMIN)
_ADMINS: Final = (Role.ADMIN,)

#: The table. A key is admitted by ZAP, so a message that any key may send has a row, too.
PERMISSIONS: Final[dict[str, dict[Request, Permission]]] = {
    DWORK: {
        # All our peers send it as a ping. The reply has counts and no names.
        _Q.OK: Permission(_ALL, "ask for the counts"),
        _Q.Lookup: Permission(_ALL, "look a task up"),
        # Every message in it is checked as if the relay had sent it.
        _Q.Relay: Permission(_ALL, "relay messages"),
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
        _Q.Read: Permission(_READERS, "read results and output"),
        _Q.Values: Permission(_ALL, "ask how values are kept"),
        # Producers store arguments, workers store results.
        _Q.PutValue: Permission((Role.PRODUCER, Role.WORKER, Role.ADMIN), "store values"),
        _Q.Numbers: Permission(_READERS, "look up lines"),
        _Q.Create: Permission(_PRODUCERS, "submit tasks"),
        _Q.Number: Permission(_PRODUCERS, "record numbers of lines"),
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
        # Only what a task needs which the worker holds.
        READ_FOR_TASK: Permission(_WORKERS, "read for tasks", is_by_worker=True),
        _Q.Drain: Permission(_ADMINS, "drain workers"),
        _Q.Failover: Permission(_ADMINS, "hand over to a standby"),
        _Q.Pause: Permission(_ADMINS, "pause services and lanes"),
        _Q.Resume: Permission(_ADMINS, "resume services and lanes"),
    },
    # The peers of round-robin have no names, and are bound to a key by their routing id.
    ROUND_ROBIN: {
        "PING": Permission(_ALL, "ping"),
        "PONG": Permission(_ALL, "reply to a ping"),
        "REGISTER": Permission(_WORKERS, "register workers"),
        "INCREMENT": Permission(_WORKERS, "take tasks"),
        "DEREGISTER": Permission(_WORKERS, "deregister workers"),
        "ONGOING": Permission(_WORKERS, "send heartbeats"),
        "RESPONSE": Permission(_WORKERS, "report on tasks"),
        SUBMIT: Permission(_PRODUCERS, "submit tasks"),
        # Reaches a worker without the queue, so it needs the same role as a task.
        FORWARD: Permission(_PRODUCERS, "send messages to other peers"),
        # RESPONSE, PONG and TRACKADDRESS to another peer.
        FORWARD_REPLY: Permission((Role.WORKER, Role.PRODUCER, Role.ADMIN), "reply to peers"),
    },
    # A worker is a connection.
    PING_PONG: {
        "READY": Permission(_WORKERS, "take tasks"),
        "PING": Permission(_WORKERS, "send heartbeats"),
        "DISCONNECT": Permission(_WORKERS, "deregister workers"),
        RESULT: Permission(_WORKERS, "report on tasks"),
        JOB: Permission(_PRODUCERS, "submit tasks"),
    },
    WMP: {
        "READY": Permission(_WORKERS, "take tasks", is_by_worker=True),
        "GIVE": Permission(_WORKERS, "take tasks", is_by_worker=True),
        "DONE": Permission(_WORKERS, "report on tasks", is_by_worker=True),
        "STATUS": Permission(_WORKERS, "report progress", is_by_worker=True),
        "PING": Permission(_WORKERS, "send heartbeats", is_by_worker=True),
        "PONG": Permission(_WORKERS, "send heartbeats", is_by_worker=True),
        "BYE": Permission(_WORKERS, "deregister workers", is_by_worker=True),
    },
}

_UNLISTED: Final = Permission(_ADMINS, "send this request")

#: Bytes of a wrong name that are shown in errors.
_SHOWN: Final = 64


def refusal(
    peer: AuthenticatedPeer, dialect: str, request: Request, worker: bytes = b""
) -> tuple[Refusal, str] | None:
    """Return why a peer may not send a request: a code and a sentence. None: it may.

    `worker` is the name in the request, if it is by a worker.
    """
    if not peer.roles:
        return Refusal.FORBIDDEN, _unknown_key_text(peer)
    right = PERMISSIONS[dialect].get(request, _UNLISTED)
    if not any(role in right.roles for role in peer.roles):
        return Refusal.FORBIDDEN, (
            f"key {peer.name!r}: {roles_text(peer.roles)} may not {right.action} (this needs "
            f"{with_article(right.roles[0])}'s key)"
        )
    if right.is_by_worker and peer.is_bound:
        return _refusal_of_name(peer, worker)
    return None


def check_roles(roles: Iterable[Role]) -> tuple[Role, ...]:
    """Return the roles of a key in the order of `Role`, each once. Raise ValueError."""
    given = set(roles)
    if not given:
        raise ValueError("a key needs a role")
    if given == {Role.RELAY}:
        raise ValueError("role relay: needs another one beside it, such as worker")
    return tuple(role for role in Role if role in given)


def relayed_roles(dialect: str) -> tuple[Role, ...]:
    """Return the roles whose keys permit a relay of the dialect more than any key does."""
    permissions = [one for one in PERMISSIONS[dialect].values() if one.roles != _ALL]
    return tuple(role for role in Role if any(role in one.roles for one in permissions))


def gateway_roles(dialect: str) -> tuple[Role, ...]:
    """Return the roles that unmodified programs of the dialect need behind a relay.

    Its key file is good in every dialect, so the key must not be an admin's.
    """
    needed = relayed_roles(dialect)
    return tuple(role for role in (Role.PRODUCER, Role.WORKER) if role in needed)


def may_act_as(key: str, location: bytes) -> bool:
    """Return whether a worker's key of that name allows a worker of this name."""
    own = key.encode()
    return location == own or location.startswith(own + b"/")


def with_article(role: Role) -> str:
    """Return the role with its article: `a viewer`, `an admin`."""
    return f"{'an' if role is Role.ADMIN else 'a'} {role}"


def roles_text(roles: tuple[Role, ...]) -> str:
    """Return the roles with an article: `a viewer`, `a producer and worker`."""
    return " and ".join([with_article(roles[0]), *roles[1:]])


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
