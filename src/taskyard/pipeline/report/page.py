"""A self-contained HTML page: text, tables and charts in one file.

Owns the template, the light and dark styles, and the escaping of users' text. Plotly's script is
copied in from its wheel. Nothing is loaded from a network, and the page's own policy forbids it.
Colours in charts are names that the page's script resolves, so they follow the reader's light or
dark mode.
"""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from taskyard.errors import NotInstalled

#: A chart for Plotly: traces and layout.
Figure = dict[str, object]


class Table(Struct):
    """Rows of text. A cell that is one of `STATUS_WORDS` is shown in colour."""

    head: list[str]
    rows: list[list[str]]
    #: Columns with numbers, aligned to the right.
    numbers: tuple[int, ...] = ()


class Section(Struct):
    """One section: its paragraphs, and a chart or a table if there is data."""

    name: str
    title: str
    paragraphs: list[str]
    figure: Figure | None = None
    table: Table | None = None
    #: Height of the chart in pixels.
    height: int = 320


class Tile(Struct):
    """A key figure with its caption."""

    value: str
    caption: str


class Page(Struct):
    """The content of a page."""

    title: str
    #: The sentences at the top.
    summary: list[str]
    tiles: list[Tile]
    sections: list[Section]
    footer: str = ""


#: Cells shown in colour. The word alone is enough, for readers who can't see the colour.
STATUS_WORDS: Final = {"holds": "good", "broken": "bad"}


def render(page: Page) -> str:
    """Render the page as HTML."""
    body = [_header(page), *(_section(section) for section in page.sections)]
    figures = {one.name: one.figure for one in page.sections if one.figure is not None}
    scripts = ""
    if figures:
        scripts = (
            f'<script type="application/json" id="figures">{_json(figures)}</script>\n'
            f"<script>{_plotly()}</script>\n<script>{_SCRIPT}</script>\n"
        )
    return _TEMPLATE.format(
        title=html.escape(page.title),
        style=_STYLE,
        body="\n".join(body),
        footer=html.escape(page.footer),
        scripts=scripts,
    )


def _header(page: Page) -> str:
    first, *others = page.summary
    lead = f'<p class="lead">{html.escape(first)}</p>'
    more = "".join(f"<p>{html.escape(text)}</p>" for text in others)
    tiles = "".join(
        f"<div><dt>{html.escape(tile.caption)}</dt><dd>{html.escape(tile.value)}</dd></div>"
        for tile in page.tiles
    )
    return f"<header><h1>{html.escape(page.title)}</h1>{lead}{more}<dl>{tiles}</dl></header>"


def _section(section: Section) -> str:
    paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in section.paragraphs)
    name = html.escape(section.name)
    shown = ""
    if section.figure is not None:
        shown = f'<div class="figure" id="{name}" style="height:{section.height}px"></div>'
    if section.table is not None:
        shown += _table(section.table)
    title = html.escape(section.title)
    return f'<section id="section-{name}"><h2>{title}</h2>{paragraphs}{shown}</section>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in table.head)
    rows = "".join(f"<tr>{_cells(row, table.numbers)}</tr>" for row in table.rows)
    table_text = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide">{table_text}</div>'


def _cells(row: list[str], numbers: tuple[int, ...]) -> str:
    cells = []
    for place, text in enumerate(row):
        looks = STATUS_WORDS.get(text, "number" if place in numbers else "")
        kind = f' class="{looks}"' if looks else ""
        cells.append(f"<td{kind}>{html.escape(text)}</td>")
    return "".join(cells)


def _json(value: object) -> str:
    """Encode JSON for a script element, so that it can't end the element or start another."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plotly() -> str:
    """Read Plotly's script from its wheel."""
    try:
        script = files("plotly") / "package_data" / "plotly.min.js"
        text = Path(str(script)).read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError):
        raise NotInstalled("plotly is not installed (`pip install 'taskyard[spark]'`)") from None
    return text.replace("</script", "<\\/script")


#: Nothing is loaded, and nothing is sent.
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_TEMPLATE: Final = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{{title}}</title>
<style>{{style}}</style>
</head>
<body>
<main>
{{body}}
<footer>{{footer}}</footer>
</main>
<noscript><p>The charts need JavaScript. The script is part of this page.</p></noscript>
{{scripts}}</body>
</html>
"""

_STYLE: Final = """
:root { --ground: #ffffff; --card: #f6f7f9; --ink: #1b2430; --quiet: #5a6675; --line: #dde2e8;
  --good: #006b4f; --good-ground: #dff3ea; --bad: #a3290c; --bad-ground: #fbe3db; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181e; --card: #1c222a; --ink: #e6eaf0; --quiet: #9aa7b6; --line: #2d3641;
    --good: #6fdcb4; --good-ground: #123529; --bad: #ff9d7d; --bad-ground: #43200f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Liberation Sans", "DejaVu Sans",
    sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .2rem; }
p { margin: .2rem 0; max-width: 78ch; overflow-wrap: anywhere; }
.lead { font-size: 1.15rem; }
section > p { color: var(--quiet); }
section { border-top: 1px solid var(--line); margin-top: 26px; padding-top: 18px; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px;
  margin: 18px 0 0; }
dl > div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
dt { color: var(--quiet); font-size: .85rem; }
dd { margin: 0; font-size: 1.45rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figure { width: 100%; margin-top: 6px; }
.wide { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; font-size: .95rem; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--quiet); font-weight: 500; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.good, td.bad { font-weight: 600; padding-left: 10px; padding-right: 10px; border-radius: 4px; }
td.good { color: var(--good); background: var(--good-ground); }
td.bad { color: var(--bad); background: var(--bad-ground); }
footer { color: var(--quiet); font-size: .85rem; margin-top: 32px; }
@media print { section { break-inside: avoid; } }
"""

#: Draws every chart, and again when the reader switches between light and dark. The palette is
#: Okabe and Ito's, made for every kind of colour vision.
_SCRIPT: Final = """
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const palettes = {
    light: { blue: "#0072b2", orange: "#e69f00", green: "#009e73", red: "#d55e00", sky: "#56b4e9",
      purple: "#cc79a7", grey: "#8b95a1", ink: "#1b2430", quiet: "#5a6675", line: "#e4e8ed",
      card: "#ffffff", pale: "#c9d1da" },
    dark: { blue: "#4aa8e0", orange: "#f0b429", green: "#2fc79b", red: "#f07f3c", sky: "#8fd0f5",
      purple: "#dd9dc0", grey: "#7d8997", ink: "#e6eaf0", quiet: "#9aa7b6", line: "#2a323c",
      card: "#1c222a", pale: "#465260" },
  };
  const coloured = (value, palette) => {
    if (typeof value === "string") {
      return value[0] === "@" && value.slice(1) in palette ? palette[value.slice(1)] : value;
    }
    if (Array.isArray(value)) return value.map((one) => coloured(one, palette));
    if (value && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([key, one]) => [key, coloured(one, palette)]));
    }
    return value;
  };
  const draw = async () => {
    const palette = palettes[dark.matches ? "dark" : "light"];
    for (const [name, figure] of Object.entries(figures)) {
      const { data, layout } = coloured(figure, palette);
      await Plotly.react(name, data, layout, { responsive: true, displayModeBar: false });
    }
    document.body.dataset.drawn = "yes";
  };
  dark.addEventListener("change", draw);
  draw();
})();
"""
