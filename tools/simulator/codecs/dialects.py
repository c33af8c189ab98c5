"""Codecs of model peers in plain dwork, ping-pong, round-robin and WMP: events to frames, frames to
effects.

Each is written from the dialect's page, with the frames spelled out. They share as little as
possible with the broker's adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from simulator.models import Violation
from taskyard.core import effects, events
from taskyard.core.blobs import text_of, texts_of
from taskyard.core.events import Outcome
from taskyard.core.model import Refusal
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.events import Event

_Q: Final = pb.QueryMsg

#: The start of a payload, before the task's name.
DO: Final = b"do "

#: The start of a job without a name.
JOB: Final = b"job "


class PlainCodec:
    """Plain dwork: one request, one answer, in turns."""

    def __init__(self) -> None:
        self._asked: Event | None = None

    @property
    def is_waiting(self) -> bool:
        """Return whether an answer is due."""
        return self._asked is not None

    def forget(self) -> None:
        """Drop the open request. It gets no answer."""
        self._asked = None

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]:
        event: Any = sent_events[-1]
        self._asked = event
        query = _Q(type=_Q.OK)
        if isinstance(event, events.TasksRequested):
            query = _Q(type=_Q.Steal, location=event.worker, n=event.count)
        elif isinstance(event, events.TasksReported):
            query = _Q(type=_Q.Complete, location=event.worker, task=_tasks(event.names))
        elif isinstance(event, events.TasksReturned):
            tasks = _tasks(event.names, event.after)
            query = _Q(type=_Q.Transfer, location=event.worker, task=tasks)
        elif isinstance(event, events.WorkerExited):
            query = _Q(type=_Q.Exit, location=event.worker)
        elif isinstance(event, events.SubmitRequested):
            submission = event.submission
            query = _Q(type=_Q.Create, task=_tasks(submission.names, submission.after))
        elif isinstance(event, events.LookupRequested):
            query = _Q(type=_Q.Lookup, name=event.names[0])
        return [b"", query.SerializeToString()]

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        answer, event = _Q.FromString(frames[1]), self._asked
        if event is None:
            raise Violation("answers", f"{answer} answers no open request")
        self._asked = None
        if isinstance(event, events.TasksRequested):
            return _work(event.worker, answer)
        request: int = getattr(event, "request", 0)
        if answer.type == _Q.Error:
            return [effects.Refused(b"", request, Refusal.MALFORMED, "")]
        if isinstance(event, events.TasksReported | events.TasksReturned):
            missing = [pb.TaskMsg.FromString(raw).name for raw in answer.task]
            if answer.type == _Q.NotFound:
                missing = missing or event.names
            return [effects.ReportAck(event.worker, request, missing)]
        if isinstance(event, events.SubmitRequested):
            return [effects.Accepted(b"", request, 0)]
        return [effects.ReplyDue(b"", request)]


def _tasks(names: list[bytes], after: list[list[bytes]] | None = None) -> list[bytes]:
    is_waiting = after or [[]] * len(names)
    return [
        pb.TaskMsg(
            name=name,
            origin=b"sim",
            pred=[pb.TaskMsg.Dep(name=before).SerializeToString() for before in befores],
        ).SerializeToString()
        for name, befores in zip(names, is_waiting, strict=True)
    ]


def _work(worker: bytes, answer: pb.QueryMsg) -> list[Effect]:
    if answer.type == _Q.Exit:
        return [effects.Shutdown(worker)]
    if answer.type != _Q.Transfer:
        return [effects.NoWork(worker, settled=False)]
    return [_assign(worker, [pb.TaskMsg.FromString(raw).name for raw in answer.task])]


def _assign(worker: bytes, names: list[bytes]) -> effects.Assign:
    """Return an assignment without attempts."""
    return effects.Assign(worker, names, [0] * len(names), [], [], [], 0)


class PingPongWorkerCodec:
    """A ping-pong worker."""

    def __init__(self, worker: bytes) -> None:
        self._worker = worker

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]:
        event = sent_events[-1]
        if isinstance(event, events.TasksReported):
            text = text_of(event.texts[0]) if event.texts else b""
            done = event.outcomes is None or event.outcomes[0] is Outcome.DONE
            return [b"", text] if done else [b"", b"ERROR", text]
        if isinstance(event, events.TasksRequested):
            return [b"", b"READY"]
        return [b"", b"DISCONNECT" if isinstance(event, events.WorkerExited) else b"PING"]

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        word = frames[1]
        if word == b"PONG":
            return [effects.HeartbeatAck(self._worker, 0, 0)]
        if word == b"EXIT":
            return [effects.Shutdown(self._worker)]
        return [_assign(self._worker, [word.removeprefix(DO)])]


_LMQ: Final = b"LMQv100"
_LMQ_PING, _LMQ_PONG, _EXEC, _TRACKEXEC, _RESPONSE = b"\x01", b"\x02", b"\x03", b"\x04", b"\x06"
_INCREMENT, _REGISTER, _DEREGISTER, _ONGOING = b"\x07", b"\x08", b"\x09", b"ongoing"


def argument_of(rest: Sequence[bytes]) -> bytes:
    """Return the last argument of a message, its command. `rest` starts after the id."""
    end = len(rest) - 1 - rest[::-1].index(b"")
    return rest[end - 1].removeprefix(DO)


class RoundRobinWorkerCodec:
    """A worker of LMQ's round robin. `HeartbeatAck.request` is 1 if the server requests a
    heartbeat. A refusal means that it does not know the worker."""

    def __init__(self, worker: bytes) -> None:
        self._worker = worker
        #: The id of the message and the way back to its client, by command.
        self._messages: dict[bytes, tuple[bytes, list[bytes]]] = {}
        #: The next heartbeat answers the server's request.
        self.answers = False

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]:
        event = sent_events[-1]
        if isinstance(event, events.TasksReported):
            number, way_back = self._messages.pop(event.names[0])
            return [*way_back, b"", _LMQ, _RESPONSE, number, *(event.texts or ()), b""]
        if isinstance(event, events.WorkerRegistered):
            slots = b"%d" % event.facts.slots_total
            return [b"", _LMQ, _TRACKEXEC, b"hello", _REGISTER, slots, b""]
        if isinstance(event, events.SlotFreed):
            return [b"", _LMQ, _EXEC, b"free", _INCREMENT, b""]
        if isinstance(event, events.WorkerExited):
            return [b"", _LMQ, _EXEC, b"WORKER", _DEREGISTER, b""]
        if self.answers:
            return [b"", _LMQ, _LMQ_PONG, b"PING", b""]
        return [b"", _LMQ, _TRACKEXEC, b"life", _ONGOING, b""]

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        _, _, command, number, *rest = frames
        if command == _LMQ_PING:
            return [effects.HeartbeatAck(self._worker, 1, 0)]
        if command == _RESPONSE:
            if rest[0].startswith(b"ERROR "):
                return [effects.UnknownWorker(self._worker)]
            return [effects.HeartbeatAck(self._worker, 0, 0)]
        what = argument_of(rest)
        end = len(rest) - 1 - rest[::-1].index(b"")
        self._messages[what] = (number, rest[:end:-1])
        return [_assign(self._worker, [what])]


class JobCodec:
    """The base of clients that send jobs without names."""

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]:
        event = sent_events[-1]
        if not isinstance(event, events.SubmitRequested):
            raise TypeError(f"{event} has no message")
        return self.ask(event.submission.text_of(0), event.request)

    def ask(self, job: bytes, request: int) -> list[bytes]:
        raise NotImplementedError

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the open jobs. They get no answers."""


class PingPongClientCodec(JobCodec):
    """Ping-pong's frontend: an answer belongs to the oldest job."""

    def __init__(self) -> None:
        self._line: list[int] = []

    def ask(self, job: bytes, request: int) -> list[bytes]:
        self._line.append(request)
        return [b"", job]

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        if not self._line:
            raise Violation("answers", f"{frames} answers no open request")
        request, word = self._line.pop(0), frames[1]
        if word == b"FULL":
            return [effects.Refused(b"", request, Refusal.FULL, "")]
        if word == b"ERROR":
            return [effects.Refused(b"", request, Refusal.MALFORMED, frames[2].decode())]
        return [effects.Settled(b"", request, [], [], [word])]

    def forget(self) -> None:
        self._line = []


class RoundRobinClientCodec(JobCodec):
    """A client of LMQ's round robin."""

    def ask(self, job: bytes, request: int) -> list[bytes]:
        return [b"", _LMQ, _TRACKEXEC, b"%d" % request, b"work", job, b""]

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        _, _, command, number, *rest = frames
        if command != _RESPONSE:
            raise Violation("answers", f"{frames} is no answer to a client")
        request, text = int(number), rest[0]
        if not text.startswith(b"ERROR "):
            return [effects.Settled(b"", request, [], [], [text])]
        why = text.removeprefix(b"ERROR ").decode()
        is_full = "send more when" in why
        refusal = Refusal.FULL if is_full else Refusal.MALFORMED
        return [effects.Refused(b"", request, refusal, why)]


_READY, _WAKE, _GIVE, _TAKE, _NO, _DONE, _STATUS, _CANCEL, _PING, _PONG, _BYE = (
    bytes([number]) for number in range(1, 12)
)
_NAME_REFUSALS: Final = {
    "name-held": Refusal.NAME_HELD,
    "name-lost": Refusal.NAME_LOST,
}
_STATUSES: Final = {Outcome.DONE: "ok", Outcome.FAILED: "error", Outcome.REFUSED: "refused"}


class WmpWorkerCodec:
    """A WMP worker without relays. `HeartbeatAck.request` is 1 if the manager requests a
    heartbeat, `HeartbeatAck.record` is 1 if it remembers that the worker is ready."""

    def __init__(self, worker: bytes) -> None:
        self._worker = worker
        self._id = worker.partition(b":")[2].decode()
        #: The manager's id, once it is received.
        self._manager: str | None = None
        #: The next heartbeat answers the manager's request.
        self.answers = False

    def encode(self, sent_events: Sequence[Event]) -> list[bytes]:
        event: Any = sent_events[-1]
        headers: dict[str, Any] = {"worker": self._id}
        payload: list[bytes] = []
        if isinstance(event, events.TasksRequested) and event.parks:
            who = next(one for one in sent_events if isinstance(one, events.WorkerRegistered))
            facts = who.facts
            if facts.slots_total:
                headers["slots"] = facts.slots_total
            headers["services"] = [name.decode() for name in facts.services]
            headers["incarnation"] = facts.incarnation
            headers["heartbeat_ms"] = facts.heartbeat_ns // 1_000_000
            headers["replaces"] = who.replaces
            command = _READY
        elif isinstance(event, events.TasksRequested):
            headers["request"] = str(event.request)
            command = _GIVE
        elif isinstance(event, events.TasksReported):
            outcome = Outcome.DONE if event.outcomes is None else event.outcomes[0]
            headers |= {"task": event.names[0].decode(), "status": _STATUSES[outcome]}
            headers["attempt"] = (event.attempts or [0])[0]
            payload = texts_of(event.texts or ())
            command = _DONE
        elif isinstance(event, events.TasksProgressed):
            headers |= {"task": event.names[0].decode(), "attempt": (event.attempts or [0])[0]}
            headers |= {"percent": (event.percents or [0])[0]}
            headers |= {"text": texts_of(event.texts or [b""])[0].decode()}
            command = _STATUS
        elif isinstance(event, events.WorkerHeartbeat):
            headers["held"] = [(name.decode(), attempt) for name, attempt in event.held or ()]
            headers["heartbeat_ms"] = event.heartbeat_ns // 1_000_000
            command = _PONG if self.answers else _PING
        else:
            command = _BYE
        if command != _READY and event.incarnation is not None:
            headers["incarnation"] = event.incarnation
        if self._manager is not None and command not in (_READY, _GIVE, _BYE):
            headers["manager"] = self._manager
        return [b"", b"WMP01", command, msgspec.json.encode(headers), *payload]

    def decode(self, frames: Sequence[bytes]) -> list[Effect]:
        _, _, command, raw, *_ = frames
        headers, worker = msgspec.json.decode(raw), self._worker
        self._manager = headers.get("manager", self._manager)
        if command == _WAKE:
            return [effects.Wake(worker, headers["service"].encode())]
        if command == _TAKE:
            names, attempts = [headers["task"].encode()], [headers["attempt"]]
            request = int(headers["request"])
            return [effects.Assign(worker, names, attempts, [], [], [], 0, request=request)]
        if command == _NO:
            return [effects.NoWork(worker, settled=False, request=int(headers["request"]))]
        if command == _CANCEL:
            return [effects.Stop(worker, [headers["task"].encode()], [headers["attempt"]], [False])]
        if command in (_PING, _PONG):
            return [
                effects.HeartbeatAck(worker, int(command == _PING), int(headers.get("ready", True)))
            ]
        refusal = _NAME_REFUSALS.get(headers.get("code", ""))
        bye = effects.Refused(worker, 0, refusal, headers["reason"]) if refusal else None
        return [bye or effects.Shutdown(worker)]
