"""The story of a task: its events from the journal, in plain words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from taskyard.journal.history_rows import KINDS, READY
from taskyard.journal.row_file import ColumnBuilder
from taskyard.web import events
from taskyard.web.events import Catalog, EventColumns, EventLog, TaskEvent, columns_of
from taskyard.web.views.tasks import story_of


def told(events: list[TaskEvent], *attempts: dict[str, Any]) -> list[str]:
    return [f"{line.text}: {line.detail}".removesuffix(": ") for line in story_of(events, attempts)]


def test_task_that_failed_once_and_then_finished() -> None:
    events = [
        TaskEvent("submitted", 1),
        TaskEvent("ready", 2, reason="released"),
        TaskEvent("leased", 3, 1, worker="w1"),
        TaskEvent("postponed", 4, 1, is_own_fault=True, worker="w1", reason="exit status 5"),
        TaskEvent("due", 5, 1),
        TaskEvent("ready", 5, 1, reason="due"),
        TaskEvent("leased", 6, 2, worker="w2"),
        TaskEvent("finished", 7, 2, worker="w2"),
    ]
    attempts: list[dict[str, Any]] = [
        {"attempt": 1, "host": "alpha", "started": 10.0, "ended": 12.5},
        {"attempt": 2, "host": None, "started": None, "ended": None},
    ]
    assert told(events, *attempts) == [
        "submitted",
        "became ready: every task that it waits for is done",
        "attempt 1: leased to worker w1 on alpha",
        "attempt 1 failed after 2.5 s, to be tried again: exit status 5",
        "due, became ready",
        "attempt 2: leased to worker w2",
        "attempt 2 finished",
    ]


def test_task_whose_worker_was_lost() -> None:
    events = [
        TaskEvent("submitted", 1),
        TaskEvent("leased", 2, 1, worker="w1"),
        TaskEvent("expired", 3, 1, worker="w1"),
        TaskEvent("ready", 3, 1, reason="expired"),
        TaskEvent("stale", 4, 1, worker="w1"),
        TaskEvent("leased", 5, 2, worker="w2"),
        TaskEvent("returned", 6, 2, worker="w2", reason="left"),
        TaskEvent("cancelled", 7, 2, reason="by key ops"),
        TaskEvent("submitted", 8, 2),
    ]
    assert told(events) == [
        "submitted",
        "attempt 1: leased to worker w1",
        "attempt 1 lost: no heartbeat from worker w1 in time, became ready again",
        "a late report of worker w1 on attempt 1 was refused",
        "attempt 2: leased to worker w2",
        "attempt 2 ended: worker w2 left",
        "cancelled by key ops",
        "submitted again under the same name",
    ]
    assert [line.tone for line in story_of(events, [])][2] == "bad"


@pytest.mark.parametrize("kind", [*(kind.decode() for kind in KINDS.values()), READY.decode()])
def test_every_kind_of_event_has_a_sentence(kind: str) -> None:
    (line,) = story_of([TaskEvent(kind, 1, 1, worker="w", reason="r")], [])
    assert line.text
    assert "_" not in line.text


def test_log_returns_the_events_of_one_task_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog()
    log = EventLog(catalog)
    for time_ns in range(1, 22, 3):
        log.add(np.array([0, 1, -1], np.int64), _columns(catalog, "leased", time_ns))
    log.add(np.array([0, 1, 0], np.int64), _columns(catalog, "progressed", 50))
    assert len(log) == 14
    assert [event.time_ns for event in log.of_task(1)] == list(range(2, 21, 3))
    assert {event.kind for event in log.of_task(1)} == {"leased"}
    monkeypatch.setattr(events, "EVENTS_MAX", 2)
    assert [event.time_ns for event in log.of_task(0)] == [16, 19]  # the latest ones


def test_output_of_tasks_is_not_kept_among_the_reasons() -> None:
    builder = ColumnBuilder("events")
    builder.add(2, {"kind": b"progressed", "task": [b"a", b"b"], "reason": [b"one", b"two"]})
    builder.add(1, {"kind": b"failed", "task": [b"a"], "reason": [b"exit status 1"]})
    catalog = Catalog()
    columns = columns_of(builder.take(), catalog)
    assert catalog["reason"].names == [b"", b"exit status 1"]
    assert columns.codes["reason"].tolist() == [0, 0, 1]


def _columns(catalog: Catalog, kind: str, time_ns: int) -> EventColumns:
    """Return three events of a kind, one after the other."""
    kinds = np.full(3, catalog["kind"].number(kind.encode()), np.int32)
    none = np.zeros(3, np.int32)
    numbers = {name: none.astype(np.int64) for name in ("attempt", "own_fault")}
    numbers["time_ns"] = np.arange(time_ns, time_ns + 3, dtype=np.int64)
    return EventColumns(3, [], numbers, {"kind": kinds, "worker": none, "reason": none})
