"""Marks in the chart of throughput: restarts of brokers, and pauses.

Restarts come from the file `starts` of a state directory, and pauses from events. A history without
its state has pauses only.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.journal import lock
from taskyard.pipeline.report.figures import escape_label, line_trace
from taskyard.pipeline.report.format import format_count, format_duration, shorten_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from taskyard.pipeline.report.figures import TimeUnit


class MarkKind(StrEnum):
    """The kinds of marks, in the words of the chart's legend."""

    KILLED = "from the last record to the restart after a kill"
    STOPPED = "broker stopped"
    PAUSED = "paused"


#: Colours of lines and spans.
_COLOURS: Final = {MarkKind.KILLED: "@red", MarkKind.STOPPED: "@grey", MarkKind.PAUSED: "@purple"}

#: Marks of one kind that the text lists. The chart has all of them.
LISTED_MAX: Final = 4

#: A letter of a label takes about this part of the chart's width.
_LETTER_PART: Final = 0.0064

#: Labels are between the two charts, at this part of the height.
_LABEL_HEIGHT: Final = 0.51


class Mark(Struct, frozen=True):
    """A moment or a span of time in which tasks did not move."""

    kind: MarkKind
    begin_ns: int
    #: The same as `begin_ns` if only one moment is known. None: it has not ended.
    end_ns: int | None
    #: The service or lane that was paused. Empty for the broker.
    subject: str = ""
    #: The label of the broker. Empty if the report has only one.
    broker: str = ""


class Span(Struct, frozen=True):
    """The time that the chart shows."""

    begin_ns: int
    end_ns: int

    def clip(self, marks: Iterable[Mark]) -> list[Mark]:
        """Select the marks within the span, in order of time. Pauses without an end last to it."""
        found = []
        for one in marks:
            end_ns = self.end_ns if one.end_ns is None else one.end_ns
            if end_ns >= self.begin_ns and one.begin_ns <= self.end_ns:
                found.append(one)
        return sorted(found, key=lambda one: (one.begin_ns, one.kind, one.subject))

    def time_text(self, time_ns: int) -> str:
        """Format a time of day, with the date if the span has several days."""
        begin, end, time = (
            datetime.fromtimestamp(one / 1e9, UTC) for one in (self.begin_ns, self.end_ns, time_ns)
        )
        is_one_day = begin.date() == end.date() == time.date()
        return f"{time:%H:%M:%S}" if is_one_day else f"{time:%Y-%m-%d %H:%M:%S}"


def restarts(state: Path, broker: str = "") -> list[Mark]:
    """Return the restarts of a broker, if its state directory has them."""
    return [
        Mark(
            MarkKind.KILLED if one.stopped_ns is None else MarkKind.STOPPED,
            one.since_ns,
            one.time_ns,
            broker=broker,
        )
        for one in lock.read_starts(state)
    ]


def pauses(
    events: Iterable[Mapping[str, Any]], services: set[str], labels: Mapping[str, str]
) -> list[Mark]:
    """Pair the events `paused` and `resumed` of the broker, of some services, or of their lanes.

    `labels` has the names of brokers that are shown.
    """
    open_ns: dict[tuple[str, str | None, str | None], int] = {}
    found = []
    for row in sorted(events, key=lambda one: int(one["record"])):
        service, lane = row["service"], row["lane"]
        place = (row["broker"], service, lane)
        if service is not None and service not in services:
            continue
        if row["kind"] == "paused":
            open_ns.setdefault(place, row["time_ns"])
        elif place in open_ns:
            found.append(_pause(place, open_ns.pop(place), row["time_ns"], labels))
    found += [_pause(place, begin_ns, None, labels) for place, begin_ns in open_ns.items()]
    return found


def _pause(
    place: tuple[str, str | None, str | None],
    begin_ns: int,
    end_ns: int | None,
    labels: Mapping[str, str],
) -> Mark:
    broker, service, lane = place
    subject = "/".join(part for part in (service, lane) if part)
    return Mark(MarkKind.PAUSED, begin_ns, end_ns, subject, labels.get(broker, ""))


def text(marks: list[Mark], span: Span) -> str:
    """Describe the marks in sentences. Empty if there are none."""
    sentences = []
    for kind in MarkKind:
        mine = [one for one in marks if one.kind is kind]
        if not mine:
            continue
        parts = [_described(one, span) for one in mine[:LISTED_MAX]]
        more = len(mine) - len(parts)
        parts += [f"{more:,} more"] if more else []
        sentences.append(f"{_count_text(kind, len(mine))}: {', '.join(parts)}.")
    return " ".join(sentences)


def _count_text(kind: MarkKind, number: int) -> str:
    if kind is MarkKind.PAUSED:
        return format_count(number, "pause").capitalize()
    if kind is MarkKind.STOPPED:
        return format_count(number, "stop").capitalize() + " of a broker"
    return format_count(number, "restart").capitalize() + " of a broker after a kill or crash"


def _described(mark: Mark, span: Span) -> str:
    words = [f"{shorten_name(one)}" for one in (mark.broker, mark.subject) if one]
    begin = f"{span.time_text(mark.begin_ns)} UTC"
    if mark.kind is MarkKind.KILLED and mark.end_ns not in (None, mark.begin_ns):
        end, length = span.time_text(mark.end_ns), format_duration(mark.end_ns - mark.begin_ns)
        return " ".join([*words, f"at {end} UTC, {length} after the last record"])
    if mark.end_ns is None:
        words.append(f"since {begin}")
    else:
        words.append(f"at {begin}")
        length_ns = mark.end_ns - mark.begin_ns
        words += [f"for {format_duration(length_ns)}"] if length_ns else []
    return " ".join(words)


def legend_traces(marks: list[Mark]) -> list[object]:
    """Return an entry of the legend for each kind of mark."""
    known = {one.kind for one in marks}
    return [
        line_trace(kind.value, [None], [None], _COLOURS[kind], hoverinfo="skip")
        for kind in MarkKind
        if kind in known
    ]


def layout(marks: list[Mark], span: Span, unit: TimeUnit) -> dict[str, object]:
    """Return shapes and labels for a chart whose axis counts from the begin of the span."""
    if not marks:
        return {}
    return {
        "shapes": [shape for one in marks for shape in _shapes(one, span, unit)],
        "annotations": _labels(marks, span, unit),
    }


def _shapes(mark: Mark, span: Span, unit: TimeUnit) -> list[dict[str, object]]:
    """Return a line where the mark begins and one where it ends, and a shade between them."""
    ends = [max(mark.begin_ns, span.begin_ns)]
    if mark.end_ns != mark.begin_ns:
        ends.append(span.end_ns if mark.end_ns is None else min(mark.end_ns, span.end_ns))
    places = unit.of([one - span.begin_ns for one in ends])
    colour = _COLOURS[mark.kind]
    high: dict[str, object] = {"yref": "paper", "y0": 0, "y1": 1}
    shade = {
        **high,
        "type": "rect",
        "x0": places[0],
        "x1": places[-1],
        "fillcolor": colour,
        "opacity": 0.16,
        "line": {"width": 0},
        "layer": "below",
    }
    lines: list[dict[str, object]] = [
        {
            **high,
            "type": "line",
            "x0": place,
            "x1": place,
            "line": {"color": colour, "width": 1.5, "dash": "dot"},
        }
        for place in places
    ]
    return [shade, *lines] if len(places) > 1 else lines


def _labels(marks: list[Mark], span: Span, unit: TimeUnit) -> list[dict[str, object]]:
    """Return a label at each mark, if it does not cover the one before it."""
    width_ns = max(1, span.end_ns - span.begin_ns)
    found: list[dict[str, object]] = []
    taken = 0.0
    for one in marks:
        text = _label(one, span)
        since_ns = max(0, one.begin_ns - span.begin_ns)
        place, part = since_ns / width_ns, len(text) * _LETTER_PART
        is_left = place + part <= 1
        begin = place if is_left else place - part
        if begin < taken:
            continue
        taken = begin + part
        found.append(
            {
                "x": unit.of([since_ns])[0],
                "xref": "x",
                "y": _LABEL_HEIGHT,
                "yref": "paper",
                "yanchor": "middle",
                "xanchor": "left" if is_left else "right",
                "showarrow": False,
                "text": text,
                "font": {"size": 11, "color": "@quiet"},
            }
        )
    return found


def _label(mark: Mark, span: Span) -> str:
    names = [escape_label(one) for one in (mark.broker, mark.subject) if one]
    if mark.kind is MarkKind.PAUSED:
        return " ".join([*names, "paused"])
    restarted_ns = mark.begin_ns if mark.end_ns is None else mark.end_ns
    return " ".join([*(names or ["broker"]), "restarted", span.time_text(restarted_ns)])
