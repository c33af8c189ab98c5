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


class Link(Struct):
    """A text that leads to an address. Without an address, it is plain text."""

    text: str
    address: str


class Table(Struct):
    """Rows of text. A cell that is one of `STATUS_WORDS` is shown in colour."""

    head: list[str]
    rows: list[list[str | Link]]
    #: Columns with numbers, aligned to the right.
    numbers: tuple[int, ...] = ()


class Block(Struct):
    """A part of a section under a title of its own: some links, and lines of output."""

    title: str
    links: list[Link]
    output: str = ""


class Section(Struct):
    """One section: its paragraphs, and a chart, a table or blocks if there is data."""

    name: str
    title: str
    paragraphs: list[str]
    figure: Figure | None = None
    table: Table | None = None
    #: Height of the chart in pixels.
    height: int = 320
    blocks: list[Block] = []


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


#: A higher chart has a sheet of paper of its own, so its section may break before it.
PAPER_HEIGHT_MAX: Final = 700

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
    shown += "".join(_block(one) for one in section.blocks)
    title = html.escape(section.title)
    kind = ' class="long"' if section.blocks or section.height > PAPER_HEIGHT_MAX else ""
    return f'<section id="section-{name}"{kind}><h2>{title}</h2>{paragraphs}{shown}</section>'


_NUMBER: Final = ' class="number"'


def _block(block: Block) -> str:
    title = f"<h3>{html.escape(block.title)}</h3>"
    links = ", ".join(_text(one) for one in block.links)
    output = f"<pre>{html.escape(block.output)}</pre>" if block.output else ""
    return f"<article>{title}<p>{links}</p>{output}</article>"


def _text(text: str | Link) -> str:
    """Return escaped text. Addresses are those of a page, which begin with its own."""
    if isinstance(text, str):
        return html.escape(text)
    if not text.address:
        return html.escape(text.text)
    return f'<a href="{html.escape(text.address)}">{html.escape(text.text)}</a>'


def _table(table: Table) -> str:
    kinds = [
        ' class="number"' if place in table.numbers else "" for place in range(len(table.head))
    ]
    head = "".join(
        f"<th{kind}>{html.escape(text)}</th>" for kind, text in zip(kinds, table.head, strict=True)
    )
    rows = "".join(f"<tr>{_cells(row, table.numbers)}</tr>" for row in table.rows)
    table_text = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="wide">{table_text}</div>'


def _cells(row: list[str | Link], numbers: tuple[int, ...]) -> str:
    cells = []
    for place, text in enumerate(row):
        looks = "number" if place in numbers else ""
        looks = STATUS_WORDS.get(text, looks) if isinstance(text, str) else looks
        kind = f' class="{looks}"' if looks else ""
        cells.append(f"<td{kind}>{_text(text)}</td>")
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
.tiles { margin-top: 18px; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); }
.tiles dd { font-size: 1.2rem; white-space: normal; }
.figure { width: 100%; margin-top: 6px; }
.wide { margin-top: 10px; }
td.good, td.bad { font-weight: 600; white-space: nowrap; padding-left: 10px; padding-right: 10px;
  border-radius: var(--radius-small); }
td.good { color: var(--good); background: var(--good-ground); }
td.bad { color: var(--bad); background: var(--bad-ground); }
h3 { font-size: 1rem; margin: var(--space-3) 0 0; overflow-wrap: anywhere; }
pre { max-height: 22em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 6px 0 0; }
.figure.linked .nsewdrag { cursor: pointer; }
footer { margin-top: 32px; }
@media (max-width: 640px) {
  main { padding: 18px 14px 32px; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); }
  th, td { padding-right: 10px; }
  .wide table { font-size: var(--text-small); }
}
@page { size: A4; margin: 14mm; }
@media print {
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h1, h2, h3, section > p { break-after: avoid; }
  section, article, .figure, tr { break-inside: avoid; }
  section.long { break-inside: auto; }
  .wide, pre { overflow: visible; max-height: none; }
  a { color: inherit; text-decoration: none; }
  .tiles > div, pre { border: 1px solid var(--line); }
}
"""

#: Draws every chart, and again when the reader switches between light and dark. For print, charts
#: are light and get the width of the paper, because they don't follow it by themselves. A click on
#: a bar opens its tasks on the page of the state.
_SCRIPT: Final = """
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const paperWidth = 680; // pixels of A4 within its margins
  const isNarrow = matchMedia("(max-width: 640px)");
  const open = ({ points: [point] }) => {
    const [row] = [point.pointIndex ?? point.pointNumber].flat(); // a heat map has two numbers
    const link = point.data.meta?.links?.[row] ?? point.data.meta?.link;
    if (link) window.open(link, "_blank", "noopener");
  };
  const labelLetters = 18; // on a phone
  const narrowed = (data, layout) => {
    const labels = data.find((one) => one.orientation === "h" || one.type === "heatmap")?.y;
    const cut = (text) => text.length > labelLetters ? text.slice(0, labelLetters) + "…" : text;
    const yaxis = labels && { tickmode: "array", tickvals: labels, ticktext: labels.map(cut) };
    const margin = { ...template.layout.margin, l: 40, r: 6 };
    const annotations = []; // they would cover each other, and the text above has them
    return { ...layout, margin, annotations, yaxis: { ...layout.yaxis, ...yaxis } };
  };
  let isPrinting = false;
  const sized = ({ data, layout }) => {
    if (isPrinting) return { ...layout, width: paperWidth };
    return isNarrow.matches ? narrowed(data, layout) : layout;
  };
  const draw = () => {
    for (const [name, figure] of Object.entries(figures)) {
      const shown = styled(figure, isPrinting ? "light" : undefined);
      const options = { responsive: !isPrinting, displayModeBar: false };
      Plotly.react(name, shown.data, sized(shown), options);
    }
    document.body.dataset.drawn = "yes";
  };
  const print = (isPrinted) => { isPrinting = isPrinted; draw(); };
  darkMode.addEventListener("change", draw);
  isNarrow.addEventListener("change", draw);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  draw();
  for (const [name, { data }] of Object.entries(figures)) {
    if (!data.some((trace) => trace.meta?.link || trace.meta?.links?.some(Boolean))) continue;
    const element = document.getElementById(name);
    element.classList.add("linked");
    element.on("plotly_click", open);
  }
})();
"""
