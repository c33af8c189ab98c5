"""Decode the messages of product workers to events, for the checkers alone.

Written from the dialects' pages with the frames spelled out. Shares as little as possible with the
adapters that decode the same bytes for the broker, and with the loops that encode them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from simulator.listeners import Listener
from taskyard.core import events
from taskyard.core.events import Outcome
from taskyard.core.model import WorkerFacts
from taskyard.wire import dialect
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import attempt_columns
from taskyard.wire.ping_pong import server as ping_pong_backend
from taskyard.wire.round_robin import workers as round_robin_leases

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.events import Event

_Q: Final = pb.QueryMsg
_OUTCOMES: Final = tuple(Outcome)

#: Separates the names of task and worker in a result.
BY: Final = b" by "

_MILLISECOND_NS: Final = 1_000_000


def decode(route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
    """Return the events in a message that leaves on a route."""
    return _DECODERS[route[0]](route, frames)


def task_in(text: bytes) -> bytes:
    """Return the task of a simulated result or failure."""
    return text.rpartition(BY)[0]


# The native dialect.


def _native(_route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
    query = _Q.FromString(frames[1])
    worker, kind = query.location, query.type
    if kind == _Q.Heartbeat:
        held = [*zip(query.batch.name, query.batch.attempt, strict=True)]
        heard = events.WorkerHeartbeat(0, worker, held, query.heartbeat_ns, query.request)
        heard.incarnation = query.worker.incarnation
        return _registered(query), heard
    if kind == _Q.Steal:
        asks = events.TasksRequested(0, worker, query.n, bool(query.wait_ms), query.request)
        asks.incarnation = query.worker.incarnation
        return _registered(query), asks
    if kind == _Q.Complete:
        report = _native_report(query)
        return (_registered(query), report) if query.n else (report,)
    if kind in (_Q.Progress, _Q.Append):
        return (_native_output(query),)
    if kind == _Q.Exit:
        return (events.WorkerExited(0, worker, query.request, query.incarnation),)
    return ()


def _native_output(query: pb.QueryMsg) -> events.TasksProgressed | events.OutputAppended:
    batch, worker = query.batch, query.location
    if query.type == _Q.Append:
        columns = attempt_columns.decode_chunks(batch)
        return events.OutputAppended(0, worker, *columns, query.request, query.incarnation)
    headers = events.TasksProgressed(0, worker, batch.name[:], batch.attempt[:])
    headers.incarnation = query.incarnation
    return headers


def _registered(query: pb.QueryMsg) -> events.WorkerRegistered:
    said = query.worker
    facts = WorkerFacts(
        services=tuple(said.service),
        slots_total=said.slots,
        lease_timeout_ns=said.silence_ns,
        incarnation=said.incarnation,
        heartbeat_ns=said.heartbeat_ns or said.silence_ns // 3,
        resources=tuple(
            (one.name, one.amount) for one in map(pb.Resource.FromString, said.resources)
        ),
    )
    return events.WorkerRegistered(0, query.location, facts, said.ahead, said.replaces)


def _native_report(query: pb.QueryMsg) -> events.TasksReported:
    batch = query.batch
    outcomes = [_OUTCOMES[value] for value in batch.outcome] or [Outcome.DONE] * len(batch.name)
    report = events.TasksReported(0, query.location, batch.name[:], batch.attempt[:], outcomes)
    report.request = query.request
    report.incarnation = query.worker.incarnation or query.incarnation
    return report


# WMP.

_READY, _WAKE, _GIVE, _TAKE, _NO, _DONE, _STATUS, _CANCEL, _PING, _PONG, _BYE = (
    bytes([number]) for number in range(1, 12)
)
_STATUSES: Final = {"ok": Outcome.DONE, "error": Outcome.FAILED}


def _wmp(_route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
    at = [*frames].index(b"")
    command, headers = frames[at + 2], msgspec.json.decode(frames[at + 3])
    worker = dialect.WMP + headers["worker"].encode()
    if command == _READY:
        facts = WorkerFacts(
            services=tuple(one.encode() for one in headers.get("services", ["default"])),
            slots_total=headers.get("slots", 0),
            incarnation=headers.get("incarnation", 0),
            heartbeat_ns=headers.get("heartbeat_ms", 0) * _MILLISECOND_NS,
            wants_wake=True,
        )
        who = events.WorkerRegistered(0, worker, facts, replaces=headers.get("replaces", 0))
        asks = events.TasksRequested(0, worker, headers.get("slots", 1))
        asks.incarnation = headers.get("incarnation")
        return who, asks
    event = _wmp_event(command, worker, headers)
    event.incarnation = headers.get("incarnation")
    return (event,)


def _wmp_event(command: bytes, worker: bytes, headers: dict[str, Any]) -> Any:  # noqa: ANN401  # many
    if command == _GIVE:
        return events.TasksRequested(0, worker, 1, parks=False)
    if command == _DONE:
        outcome = _STATUSES.get(headers["status"], Outcome.REFUSED)
        names, attempts = [headers["task"].encode()], [headers["attempt"]]
        return events.TasksReported(0, worker, names, attempts, [outcome])
    if command == _STATUS:
        return events.TasksProgressed(0, worker, [headers["task"].encode()], [headers["attempt"]])
    if command in (_PING, _PONG):
        held = headers.get("held")
        named = None if held is None else [(name.encode(), number) for name, number in held]
        used_ns = headers.get("heartbeat_ms", 0) * _MILLISECOND_NS if headers.get("follows") else 0
        return events.WorkerHeartbeat(0, worker, named, used_ns)
    return events.WorkerExited(0, worker)


# Ping-pong.


def _ping_pong(route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
    worker, word = ping_pong_backend.name_of(route), frames[1]
    if word == b"READY":
        who = events.WorkerRegistered(0, worker, WorkerFacts(incarnation=-1))
        return who, events.TasksRequested(0, worker)
    if word == b"PING":
        return (events.WorkerHeartbeat(0, worker),)
    if word == b"DISCONNECT":
        return (events.WorkerExited(0, worker),)
    failed = word == b"ERROR"
    outcome = Outcome.FAILED if failed else Outcome.DONE
    return (events.TasksReported(0, worker, [task_in(frames[-1])], None, [outcome]),)


# Round-robin.

_LMQ_PONG, _EXEC, _TRACKEXEC, _RESPONSE = b"\x02", b"\x03", b"\x04", b"\x06"
_INCREMENT, _REGISTER, _DEREGISTER, _ONGOING = b"\x07", b"\x08", b"\x09", b"ongoing"


def _round_robin(route: bytes, frames: Sequence[bytes]) -> tuple[Event, ...]:
    worker = round_robin_leases.name_of(route[1:])
    at = [*frames].index(b"")
    command, arguments = frames[at + 2], frames[at + 4 : -1]
    key = arguments[0] if arguments else b""
    if command == _RESPONSE:
        report = events.TasksReported(0, worker, [task_in(key)], None, [Outcome.DONE])
        return (report,)
    if command == _LMQ_PONG or key == _ONGOING:
        return (events.WorkerHeartbeat(0, worker),)
    if key == _REGISTER:
        facts = WorkerFacts(slots_total=int(arguments[1]), incarnation=-1)
        return (events.WorkerRegistered(0, worker, facts),)
    if key == _INCREMENT:
        return (events.SlotFreed(0, worker),)
    return (events.WorkerExited(0, worker),) if key == _DEREGISTER else ()


_DECODERS: Final[dict[int, Callable[[bytes, Sequence[bytes]], tuple[Event, ...]]]] = {
    Listener.NATIVE: _native,
    Listener.WMP: _wmp,
    Listener.PING_BACKEND: _ping_pong,
    Listener.ROUND_ROBIN: _round_robin,
}
