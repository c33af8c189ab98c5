"""Write all pages that are generated from the code: `python -m docs.pages DOCS`, or `./yard docs`.

Owns the list of generated pages. Needs a checkout: an installed Taskyard has no pages.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from docs import api, error_codes, reference, schemas
from docs import settings as settings_page

_FLAGS: Final = re.MULTILINE | re.DOTALL


def pages(docs: Path) -> dict[str, str]:
    """Return every generated page by its name. `docs` has the hand-written parts."""
    made = {
        "api.md": api.page(),
        "errors.md": error_codes.page(),
        "reference.md": reference.page(),
    }
    settings = (docs / "settings.md").read_text()
    for name, table in settings_page.tables().items():  # the rest of the page is hand-written
        pattern = rf"^\| {name} \|.*?\n(?!\|)"
        settings = re.sub(pattern, table.replace("\\", r"\\"), settings, count=1, flags=_FLAGS)
    made |= {"settings.md": settings, "taskyard.schema.json": settings_page.schema_text()}
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
