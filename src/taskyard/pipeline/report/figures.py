"""Charts as plain data for Plotly: axes with names and units, traces with named colours.

Text from users goes through `escape_label`, because Plotly interprets tags in labels.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.pipeline.report.format import shorten_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.pipeline.report.page import Figure

#: Units of a time axis: name, length, and the longest time they are used for.
_UNITS: Final = (
    ("milliseconds", SECOND_NS // 1000, 2 * SECOND_NS),
    ("seconds", SECOND_NS, 300 * SECOND_NS),
    ("minutes", 60 * SECOND_NS, 18_000 * SECOND_NS),
    ("hours", 3600 * SECOND_NS, 300_000 * SECOND_NS),
    ("days", 86_400 * SECOND_NS, 1 << 63),
)


def escape_label(name: str) -> str:
    """Shorten and escape a user's text for a chart."""
    return html.escape(shorten_name(name), quote=False)


class TimeUnit:
    """The unit for times up to a given length."""

    def __init__(self, longest_ns: int) -> None:
        self.name, self.length_ns = next(
            (name, length) for name, length, until in _UNITS if longest_ns < until
        )

    def of(self, times_ns: Sequence[int | None]) -> list[float | None]:
        return [None if one is None else round(one / self.length_ns, 6) for one in times_ns]


def axis(title: str, **more: object) -> dict[str, object]:
    return {"title": {"text": title}, **more}


def figure(traces: Sequence[object], **layout: object) -> Figure:
    """Return a chart. `taskyard.design` has the common layout and the named colours."""
    return {"data": list(traces), "layout": layout}


def line_trace(
    name: str, x: Sequence[object], y: Sequence[object], colour: str, **more: object
) -> object:
    """Return a stepped line: each value holds for its whole interval."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2, "shape": "hv"},
        **more,
    }


def bar_trace(
    name: str, x: Sequence[object], y: Sequence[object], colour: str, **more: object
) -> object:
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"color": colour},
        **more,
    }


def time_ticks(lowest_ns: float, highest_ns: float) -> dict[str, object]:
    """Return labelled ticks for a logarithmic time axis."""
    words = [
        (1_000, "1 µs"), (10_000, "10 µs"), (100_000, "100 µs"), (1_000_000, "1 ms"),
        (10_000_000, "10 ms"), (100_000_000, "100 ms"), (SECOND_NS, "1 s"),
        (10 * SECOND_NS, "10 s"),
        (60 * SECOND_NS, "1 min"), (600 * SECOND_NS, "10 min"), (3600 * SECOND_NS, "1 h"),
        (36_000 * SECOND_NS, "10 h"), (86_400 * SECOND_NS, "1 d"), (864_000 * SECOND_NS, "10 d"),
    ]  # fmt: skip
    shown = [(at, text) for at, text in words if lowest_ns / 4 <= at <= highest_ns * 4]
    return {
        "type": "log",
        "tickvals": [at for at, _ in shown],
        "ticktext": [text for _, text in shown],
    }
