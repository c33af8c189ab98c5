"""Marks in the report's chart of throughput. Without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.core.limits import SECOND_NS
from taskyard.journal import lock
from taskyard.pipeline.report import charts, marks, page
from taskyard.pipeline.report.figures import TimeUnit
from taskyard.pipeline.report.headline import sentences, tiles
from taskyard.pipeline.report.marks import Mark, MarkKind, Span
from taskyard.pipeline.report.page import Page, Tile
from taskyard.pipeline.report.summary import TimeSeries
from tests.pipeline.event_log import START_NS, EventLog
from tests.pipeline.test_report import facts, traces_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: 12:00:00 to 12:01:40.
SPAN = Span(START_NS, START_NS + 100 * SECOND_NS)


def at_ns(seconds: float) -> int:
    return START_NS + round(seconds * SECOND_NS)


def pause_events(*rows: tuple[float, str, str | None, str | None]) -> list[dict[str, Any]]:
    log = EventLog()
    for seconds, kind, service, lane in rows:
        log.add(seconds, kind, service=service, lane=lane)
    events, _ = log.tables()
    return [row | {"broker": "b"} for row in events.to_pylist()]


def test_pauses_are_paired_by_service_and_lane() -> None:
    events = pause_events(
        (10, "paused", None, None),
        (12, "paused", "exec", "slow"),
        (15, "paused", None, None),  # it is paused already
        (20, "resumed", None, None),
        (25, "resumed", "exec", None),  # it was not
        (30, "paused", "other", None),
        (35, "paused", "exec", None),
        (40, "resumed", "exec", "slow"),
    )
    found = marks.pauses(events, {"exec"}, {"b": "north"})
    assert SPAN.clip(found) == [
        Mark(MarkKind.PAUSED, at_ns(10), at_ns(20), "", "north"),
        Mark(MarkKind.PAUSED, at_ns(12), at_ns(40), "exec/slow", "north"),
        Mark(MarkKind.PAUSED, at_ns(35), None, "exec", "north"),
    ]


def test_restarts_are_read_from_the_state(tmp_path: Path) -> None:
    assert marks.restarts(tmp_path) == []
    words = [(-5, "started"), (40, "started"), (50, "stopped"), (60, "started"), (200, "started")]
    for seconds, word in words:
        lock.note_start(tmp_path, lock.StartWord(word), at_ns(seconds))
    lock.note_start(tmp_path, lock.StartWord.STARTED, at_ns(206), at_ns(202))
    *_, last = found = marks.restarts(tmp_path)
    assert last == Mark(MarkKind.KILLED, at_ns(202), at_ns(206))
    late = Span(at_ns(201), at_ns(300))
    assert marks.text(late.clip(found), late).endswith(
        ": at 12:03:26 UTC, 4.0 s after the last record."
    )
    assert SPAN.clip(marks.restarts(tmp_path, "north")) == [
        Mark(MarkKind.KILLED, at_ns(40), at_ns(40), broker="north"),
        Mark(MarkKind.STOPPED, at_ns(50), at_ns(60), broker="north"),
    ]


def test_marks_are_drawn_and_described() -> None:
    shown = [
        Mark(MarkKind.KILLED, at_ns(20), at_ns(20)),
        Mark(MarkKind.PAUSED, at_ns(21), None, "<b>exec"),
        Mark(MarkKind.STOPPED, at_ns(90), at_ns(120)),
    ]
    layout: Any = marks.layout(shown, SPAN, TimeUnit(100 * SECOND_NS))
    spans = [(one["type"], one["x0"], one["x1"]) for one in layout["shapes"]]
    assert spans == [
        ("line", 20, 20),
        *(("rect", 21, 100), ("line", 21, 21), ("line", 100, 100)),
        *(("rect", 90, 100), ("line", 90, 90), ("line", 100, 100)),
    ]
    labels = [(one["x"], one["xanchor"], one["text"]) for one in layout["annotations"]]
    assert labels == [  # that of the pause would cover the first one
        (20, "left", "broker restarted 12:00:20"),
        (90, "right", "broker restarted 12:02:00"),
    ]
    assert marks.layout(shown[1:2], SPAN, TimeUnit(1))["annotations"][0]["text"] == (  # type: ignore[index]
        "&lt;b&gt;exec paused"
    )
    assert marks.text(shown, SPAN) == (
        "1 restart of a broker after a kill or crash: at 12:00:20 UTC. "
        "1 stop of a broker: at 12:01:30 UTC for 30 s. "
        "1 pause: <b>exec since 12:00:21 UTC."
    )
    many = [Mark(MarkKind.KILLED, at_ns(n), at_ns(n), broker="n") for n in range(9)]
    assert marks.text(many, SPAN).endswith("n at 12:00:03 UTC, 5 more.")
    days = Span(START_NS, START_NS + 86_400 * SECOND_NS)
    assert days.time_text(START_NS) == "2026-03-01 12:00:00"


def test_chart_of_throughput_has_the_marks() -> None:
    series = TimeSeries(SECOND_NS, [0, 1], [0, 0], [1, 0], [0, 0], [0, 0])
    plain = facts(over_time=series)
    begin_ns = plain.span.begin_ns
    assert plain.span == Span(begin_ns, begin_ns + 2 * SECOND_NS)
    kill = Mark(MarkKind.KILLED, begin_ns + SECOND_NS, begin_ns + SECOND_NS)
    section = charts.over_time(facts(over_time=series, marks=[kill]))
    assert [trace["name"] for trace in traces_of(section)][-1] == MarkKind.KILLED
    assert section.figure is not None
    layout: Any = section.figure["layout"]
    assert [one["x0"] for one in layout["shapes"]] == [1]
    assert section.paragraphs[1].startswith("1 restart of a broker")
    (first,) = charts.over_time(plain).paragraphs
    assert section.paragraphs[0] == first


def test_campaign_that_is_running_is_called_so() -> None:
    ended = facts()
    running = msgspec.structs.replace(ended, totals=ended.totals | {"tasks": 4, "failed": 1})
    first, second, *_ = sentences(running)
    assert first == (
        "4 tasks: 1 done, 1 failed, 2 unfinished. The last one so far ended 2.0 s after the first "
        "submission."
    )
    assert second == (
        "The campaign is still running: 2 tasks have not ended. All numbers are those so far."
    )
    assert "makespan so far" in [one.caption for one in tiles(running)]
    assert "makespan" in [one.caption for one in tiles(ended)]
    assert not any("running" in text for text in sentences(ended))


def test_tile_has_room_for_minutes_and_seconds(tmp_path: Path, browser: Browser) -> None:
    shown = [Tile(text, "makespan so far") for text in ("3 min 48 s", "9 h 59 min", "4.2 s")] * 2
    (tmp_path / "page.html").write_text(page.render(Page("tiles", ["Text."], shown, [])))
    tab = browser.new_page(viewport={"width": 1100, "height": 800})
    tab.goto((tmp_path / "page.html").as_uri())
    for width in (1100, 390):
        tab.set_viewport_size({"width": width, "height": 800})
        heights = tab.evaluate(
            "[...document.querySelectorAll('dd')].map((one) => one.offsetHeight)"
        )
        assert len(set(heights)) == 1, width  # all on one line
        assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.close()
