"""A page that shows what notebook cells show: a client, a campaign and futures.

The boxes come from the client's `_repr_html_`. The frame around them imitates no program.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from taskyard.client import progress
from taskyard.client.client import Client

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_STYLE: Final = """
body { font: 15px system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }
pre { margin: 1em 0 .4em; padding: .5em .8em; background: rgba(128,128,128,.12); overflow: auto }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #111 } }
"""


def page(state: Path, campaign: str, tasks: Mapping[str, str]) -> str:
    """Return a page with the boxes of a client, a campaign and a task of each state."""
    with Client(state=state) as client:
        cells = {"client": client._repr_html_()}
        found = client.campaign(campaign)
        cells[f"client.campaign({campaign!r})"] = found._repr_html_()
        for name in tasks.values():
            cells[f"client.future({name!r})"] = client.future(name)._repr_html_()
        counts = found.status()

    def display(bundle: dict[str, str], **_: object) -> None:
        cells[f"client.campaign({campaign!r}).wait(progress=True)"] = bundle["text/html"]

    ended = sum(counts[state] for state in ("done", "failed", "cancelled"))
    bar = progress.DrawnBar(display)
    bar.show(ended, sum(counts.values()), f"{counts['failed']:,} failed")
    shown = "".join(f"<pre>{escape(code)}</pre>\n{box}\n" for code, box in cells.items())
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>Notebook</title><style>{_STYLE}</style>\n"
        f"<body data-drawn>\n{shown}</body></html>\n"
    )
