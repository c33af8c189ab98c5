"""The story of a task in plain words, from its events.

Pure: takes the events and the attempts, returns sentences with their times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.web import format  # noqa: A004  # a module of formats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.web.event_log import TaskEvent


class StoryLine(Struct, frozen=True):
    """One sentence of a story."""

    time_ns: int
    text: str
    #: Good, bad, or neither, for its colour.
    tone: str = ""
    #: The reason in the words of the worker.
    detail: str = ""


#: Why a task became ready, by the reason of its event.
_READY: Final = {
    "submitted": "became ready",
    "released": "became ready: every task that it waits for is done",
    "returned": "became ready again",
    "expired": "became ready again",
    "due": "became ready",
    "retried": "became ready again",
}

#: Why a worker returned a task, by the name of the reason.
_RETURNED: Final = {
    "refused": "had no room for it after all",
    "transferred": "returned it to the queue",
    "deferred_back": "returned it to the end of its lane",
    "unlisted": "never received it",
    "left": "left",
    "restarted": "restarted",
    "broker_restarted": "can't list its tasks after the broker restarted",
}

#: Kinds that need only their sentence.
_PLAIN: Final = {
    "extended": "has to wait for more tasks",
    "cancelled": "cancelled",
    "retried": "retried with all its attempts",
    "moved": "moved to another lane",
    "reported": "reported as late",
    "released": "released from a held lane",
    "edited": "its terms were changed",
    "refunded": "the replaced worker came back, so its loss is not counted",
}

#: Kinds that a client requests. Their reason is the key of the client.
_COMMANDS: Final = ("submitted", "cancelled", "retried", "moved", "released", "edited")

_TONES: Final = {"finished": "good", "failed": "bad", "aged": "bad", "expired": "bad"}


def story_of(events: Sequence[TaskEvent], attempts: Sequence[Mapping[str, Any]]) -> list[StoryLine]:
    """Return the story of a task: a sentence for each event, the oldest first.

    `attempts` are those of the task's document. They add hosts and run times.
    """
    by_number = {one["attempt"]: one for one in attempts}
    lines: list[StoryLine] = []
    for place, event in enumerate(events):
        last = events[place - 1] if place else None
        if event.kind == "ready" and last is not None and last.time_ns == event.time_ns:
            if last.kind != "due":
                lines[-1] = _joined(lines[-1], _READY.get(event.reason, "became ready"))
            continue
        is_again = event.kind == "submitted" and place > 0
        lines.append(_line(event, by_number.get(event.attempt), is_again=is_again))
    return lines


def _joined(line: StoryLine, more: str) -> StoryLine:
    return StoryLine(line.time_ns, f"{line.text}, {more}", line.tone, line.detail)


def _line(event: TaskEvent, attempt: Mapping[str, Any] | None, *, is_again: bool) -> StoryLine:
    tone = _TONES.get(event.kind, "")
    describe = _SENTENCES.get(event.kind)
    if event.kind == "submitted":
        text = "submitted again under the same name" if is_again else "submitted"
        text = _with_key(text, event)
    elif describe is not None:
        text = describe(event, attempt or {})
    elif event.kind == "ready":
        text = _READY.get(event.reason, "became ready")
    else:
        text = _with_key(_PLAIN.get(event.kind, event.kind.replace("_", " ")), event)
    detail = event.reason if event.kind in ("failed", "postponed", "aged") else ""
    return StoryLine(event.time_ns, text, tone, detail)


def _with_key(text: str, event: TaskEvent) -> str:
    """Add the key behind a client's command. Commands by a local socket have none."""
    return f"{text} {event.reason}" if event.reason and event.kind in _COMMANDS else text


def _leased(event: TaskEvent, attempt: Mapping[str, Any]) -> str:
    return f"attempt {event.attempt}: leased to {_worker(event)}{_host(attempt)}"


def _finished(event: TaskEvent, attempt: Mapping[str, Any]) -> str:
    return f"attempt {event.attempt} finished{_ran(attempt)}"


def _failed(event: TaskEvent, attempt: Mapping[str, Any]) -> str:
    return f"attempt {event.attempt} failed{_ran(attempt)}" if event.attempt else "failed"


def _postponed(event: TaskEvent, attempt: Mapping[str, Any]) -> str:
    if not event.worker:
        return "postponed by request"
    if not event.is_own_fault:
        return f"attempt {event.attempt} postponed by {_worker(event)}"
    return f"attempt {event.attempt} failed{_ran(attempt)}, to be tried again"


def _returned(event: TaskEvent, _: Mapping[str, Any]) -> str:
    why = _RETURNED.get(event.reason, "returned it")
    return f"attempt {event.attempt} ended: {_worker(event)} {why}"


def _expired(event: TaskEvent, _: Mapping[str, Any]) -> str:
    return f"attempt {event.attempt} lost: no heartbeat from {_worker(event)} in time"


def _stale(event: TaskEvent, _: Mapping[str, Any]) -> str:
    return f"a late report of {_worker(event)} on attempt {event.attempt} was refused"


def _replaced(event: TaskEvent, _: Mapping[str, Any]) -> str:
    return f"{_worker(event)} was replaced by another process"


_SENTENCES: Final[dict[str, Callable[[TaskEvent, Mapping[str, Any]], str]]] = {
    "leased": _leased,
    "finished": _finished,
    "failed": _failed,
    "postponed": _postponed,
    "returned": _returned,
    "expired": _expired,
    "stale": _stale,
    "worker_replaced": _replaced,
    "due": lambda _event, _attempt: "due, became ready",
    "aged": lambda _event, _attempt: "expired before it ran",
}


def _worker(event: TaskEvent) -> str:
    return f"worker {event.worker}" if event.worker else "its worker"


def _host(attempt: Mapping[str, Any]) -> str:
    return f" on {attempt['host']}" if attempt.get("host") else ""


def _ran(attempt: Mapping[str, Any]) -> str:
    """Return how long an attempt ran, if it was measured."""
    started, ended = attempt.get("started"), attempt.get("ended")
    if started is None or ended is None:
        return ""
    return f" after {format.duration(format.seconds(ended - started)) or '0 s'}"
