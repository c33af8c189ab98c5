"""A self-contained HTML page: text, tables and charts in one file.

Owns the template and the escaping of users' text. `taskyard.design` has the look, in light and in
dark. Plotly's script is copied in from its wheel. Nothing is loaded from a network, and the
page's own policy forbids it.
"""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from taskyard.design import script, stylesheet
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
            f"<script>{_plotly()}</script>\n<script>{script()}{_SCRIPT}</script>\n"
        )
    return _TEMPLATE.format(
        title=html.escape(page.title),
        style=stylesheet() + _STYLE,
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
    title = html.escape(page.title)
    return f'<header><h1>{title}</h1>{lead}{more}<dl class="tiles">{tiles}</dl></header>'


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
        path = files("plotly") / "package_data" / "plotly.min.js"
        text = Path(str(path)).read_text(encoding="utf-8")
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

#: What the report alone has. The rest is in `taskyard.design`.
_STYLE: Final = """
main { max-width: 1080px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { margin: 0 0 .5rem; }
p { margin: .2rem 0; max-width: 78ch; overflow-wrap: anywhere; }
section > p { color: var(--quiet); }
.tiles { margin-top: 18px; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); }
.figure { width: 100%; margin-top: 6px; }
.wide { margin-top: 10px; }
td.good, td.bad { font-weight: 600; padding-left: 10px; padding-right: 10px;
  border-radius: var(--radius-small); }
td.good { color: var(--good); background: var(--good-ground); }
td.bad { color: var(--bad); background: var(--bad-ground); }
footer { margin-top: 32px; }
@media (max-width: 640px) { main { padding: 18px 14px 32px; } }
"""

#: Draws every chart, and again when the reader switches between light and dark.
_SCRIPT: Final = """
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const draw = async () => {
    for (const [name, figure] of Object.entries(figures)) {
      const { data, layout } = styled(figure);
      await Plotly.react(name, data, layout, { responsive: true, displayModeBar: false });
    }
    document.body.dataset.drawn = "yes";
  };
  darkMode.addEventListener("change", draw);
  draw();
})();
"""
