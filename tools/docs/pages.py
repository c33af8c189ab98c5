"""Write all pages that are generated from the code: `python -m docs.pages DOCS`, or `./yard docs`.

Owns the list of generated pages. Needs a checkout: an installed Taskyard has no pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from docs import api, error_codes, reference, schemas
from taskyard.settings import keys as settings_keys
from taskyard.settings import listeners as settings_listeners

#: The tables of settings are part of a hand-written page.
_TABLE: Final = re.compile(r"^\| setting \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)
_SERVICE_TABLE: Final = re.compile(r"^\| of a service \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)

_LISTENER_TABLE: Final = re.compile(r"^\| of a listener \|.*?\n(?!\|)", re.MULTILINE | re.DOTALL)


def pages(docs: Path) -> dict[str, str]:
    """Return every generated page by its name. `docs` has the hand-written parts."""
    made = {
        "api.md": api.page(),
        "errors.md": error_codes.page(),
        "reference.md": reference.page(),
    }
    settings = (docs / "settings.md").read_text()
    settings = _TABLE.sub(lambda _: settings_keys.table(), settings, count=1)
    settings = _LISTENER_TABLE.sub(lambda _: settings_listeners.listener_table(), settings, count=1)
    made["settings.md"] = _SERVICE_TABLE.sub(
        lambda _: settings_keys.service_table(), settings, count=1
    )
    return made | {f"schemas/{name}": text for name, text in schemas.schemas().items()}


def write(docs: Path) -> list[str]:
    """Write pages that differ and remove schemas of former documents. Return their names."""
    made = pages(docs)
    old = [f"schemas/{path.name}" for path in (docs / "schemas").glob("*.json")]
    gone = [name for name in old if name not in made]
    for name in gone:
        (docs / name).unlink()
    changed = [name for name, text in made.items() if _differs(docs / name, text)]
    for name in changed:
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(made[name])
    return sorted(changed + gone)


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text() != text


def main(directory: str) -> None:
    changed = write(Path(directory))
    sys.stdout.write("".join(f"docs: wrote {name}\n" for name in changed) or "docs: unchanged\n")


if __name__ == "__main__":
    main(sys.argv[1])
