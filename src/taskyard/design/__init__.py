"""The one design of the page and the report: colours, type, charts, and the words for states.

Owns every colour, for light and for dark. `stylesheet` is CSS with custom properties, `script` is
JavaScript that styles a Plotly figure, and `PALETTES` serves programs that draw by themselves. A
figure names its colours, such as `@done`, so that it follows the reader's light or dark mode.
Durations and sizes read the same in both. Must not know the core: a test compares the names of
states.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

#: Colours of text and surfaces. Text has a contrast of at least 4.5 to `ground` and `card`.
_TEXT_LIGHT: Final = {
    "ground": "#ffffff", "card": "#f6f7f9", "ink": "#1b2430", "quiet": "#5a6675", "line": "#dde2e8",
    "good": "#006b4f", "good-ground": "#dff3ea", "bad": "#a3290c", "bad-ground": "#fbe3db",
    "link": "#005a8f", "blue": "#00659e", "orange": "#8f5a00", "grey": "#5f6975",
    "purple": "#8f4470",
}  # fmt: skip
_TEXT_DARK: Final = {
    "ground": "#14181e", "card": "#1c222a", "ink": "#e6eaf0", "quiet": "#9aa7b6", "line": "#2d3641",
    "good": "#6fdcb4", "good-ground": "#123529", "bad": "#ff9d7d", "bad-ground": "#43200f",
    "link": "#7cc4f2", "blue": "#6bbbed", "orange": "#f0b429", "grey": "#9aa7b6",
    "purple": "#dd9dc0",
}  # fmt: skip

#: Colours of charts: Okabe and Ito's, made for every kind of colour vision. Colours that are too
#: pale on white are darker here. Series have a contrast of at least 3 to `ground`.
_CHART_LIGHT: Final = {
    "blue": "#0072b2", "orange": "#c98500", "green": "#009e73", "red": "#d55e00", "sky": "#3096d3",
    "purple": "#c2689b", "grey": "#87919d", "pale": "#c9d1da", "ink": "#1b2430", "quiet": "#5a6675",
    "line": "#e4e8ed", "card": "#ffffff",
}  # fmt: skip
_CHART_DARK: Final = {
    "blue": "#4aa8e0", "orange": "#f0b429", "green": "#2fc79b", "red": "#f07f3c", "sky": "#8fd0f5",
    "purple": "#dd9dc0", "grey": "#7d8997", "pale": "#465260", "ink": "#e6eaf0", "quiet": "#9aa7b6",
    "line": "#2a323c", "card": "#1c222a",
}  # fmt: skip

#: Colours of series without a meaning, in the order of use. Neighbours also differ in lightness.
SERIES: Final = ("@blue", "@orange", "@green", "@purple", "@sky", "@red", "@grey")

FONT: Final = 'system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif'


class StateDesign(NamedTuple):
    """How one state of a task is shown. The word alone must be enough."""

    word: str
    meaning: str
    #: A colour of charts, and one of text.
    chart_colour: str
    text_colour: str


#: By the state's name, in the order of a task's life.
STATES: Final = {
    "blocked": StateDesign("blocked", "waits for tasks", "grey", "grey"),
    "delayed": StateDesign("delayed", "waits for time", "purple", "purple"),
    "ready": StateDesign("ready", "waits for a worker", "blue", "blue"),
    "leased": StateDesign("leased", "held by a worker", "orange", "orange"),
    "done": StateDesign("done", "ended with a result", "green", "good"),
    "failed": StateDesign("failed", "ended without a result", "red", "bad"),
    "cancelled": StateDesign("cancelled", "ended by a command", "pale", "grey"),
}


def _with_states(chart: dict[str, str]) -> dict[str, str]:
    return {**chart, **{name: chart[one.chart_colour] for name, one in STATES.items()}}


#: Colours of charts by mode and name. The names of states are names of colours too.
PALETTES: Final = {"light": _with_states(_CHART_LIGHT), "dark": _with_states(_CHART_DARK)}

#: Colours of text and surfaces by mode and name.
TEXT: Final = {"light": _TEXT_LIGHT, "dark": _TEXT_DARK}

_AXIS: Final = {
    "title": {"standoff": 10, "font": {"color": "@quiet", "size": 13}},
    "gridcolor": "@line",
    "linecolor": "@line",
    "zerolinecolor": "@line",
    "tickfont": {"color": "@quiet", "size": 12},
    "automargin": True,
}

#: A template for Plotly: the look of every chart that its layout doesn't override.
TEMPLATE: Final[dict[str, Any]] = {
    "layout": {
        "font": {"family": FONT, "size": 13, "color": "@ink"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(SERIES),
        "margin": {"l": 56, "r": 16, "t": 28, "b": 44},
        "hoverlabel": {"font": {"family": FONT, "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left"},
        "bargap": 0.15,
        "xaxis": _AXIS,
        # Ticks without a colour keep the labels away from bars.
        "yaxis": {**_AXIS, "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"},
    }
}


@cache
def stylesheet() -> str:
    """Return the CSS: custom properties for light, dark and print, and the common rules."""
    light, dark = (_properties(mode) for mode in ("light", "dark"))
    return (
        f":root {{ {light} --font: {FONT}; }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        + _read("base.css")
    )


@cache
def script() -> str:
    """Return JavaScript that defines `styled(figure)`, which applies the template and colours."""
    constants = {"palettes": PALETTES, "template": TEMPLATE}
    lines = [f"const {name} = {json.dumps(value)};" for name, value in constants.items()]
    return "\n".join([*lines, _read("styled.js")])


def module() -> str:
    """Return `script` as an ES module."""
    return script() + "export { darkMode, styled };\n"


def _properties(mode: str) -> str:
    text, chart = TEXT[mode], PALETTES[mode]
    values = {
        **text,
        **{f"state-{name}": text[one.text_colour] for name, one in STATES.items()},
        **{f"chart-{name}": chart[name] for name in (*_CHART_LIGHT, *STATES)},
    }
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def _read(name: str) -> str:
    return (files("taskyard.design") / name).read_text(encoding="utf-8")


_MICROSECOND_NS: Final = 1_000
_MILLISECOND_NS: Final = 1_000_000
_SECOND_NS: Final = 1_000_000_000

#: Below this, milliseconds and seconds have a fraction.
_FEW: Final = 10

#: Seconds of each unit, the largest first, with the unit below it.
_UNITS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))

_SIZES: Final = ("B", "kB", "MB", "GB", "TB")
_SIZE_STEP: Final = 1000


def format_duration(time_ns: float) -> str:
    """Format a duration: `35 µs`, `2.5 ms`, `4.2 s`, `41 min`, `5 h 12 min`."""
    seconds = time_ns / _SECOND_NS
    if 0 < time_ns < _MILLISECOND_NS:
        return f"{time_ns / _MICROSECOND_NS:.3g} µs"
    if 0 < seconds < 1:
        millis = time_ns / _MILLISECOND_NS
        return f"{millis:.2g} ms" if millis < _FEW else f"{millis:.0f} ms"
    if seconds < _FEW:
        return f"{seconds:.1f} s" if seconds else "0 s"
    whole = round(seconds)
    for large, name, small, part in _UNITS:
        if whole >= large:
            return _two_units(whole, (large, name), (small, part))
    return f"{whole} s"


def _two_units(whole: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    """Format two units, or one if the second adds little."""
    count, rest = divmod(whole, large[0])
    left = rest // small[0]
    if count >= _FEW or not left:
        return f"{round(whole / large[0])} {large[1]}"
    return f"{count} {large[1]} {left} {small[1]}"


def format_bytes(number: float) -> str:
    """Format a number of bytes: `512 B`, `1.2 GB`."""
    amount, units = float(number), iter(_SIZES)
    unit = next(units)
    for larger in units:
        if round(amount) < _SIZE_STEP:
            break
        amount, unit = amount / _SIZE_STEP, larger
    return f"{amount:.3g} {unit}"
