"""The table of settings for the pages, made from the table of keys: what nothing asks for yet is
left out. `./yard docs` puts it into docs/settings.md.
"""

from __future__ import annotations

from taskyard.settings.keys import KEYS, Key

_HEAD = "| setting | is | if not set | variable | |\n|---|---|---|---|---|\n"


def table() -> str:
    """As Markdown, a row a setting."""
    return _HEAD + "".join(_row(key) for key in KEYS if key.is_used)


def _row(key: Key) -> str:
    default = key.text(key.default)
    shown = default if default == key.unset else f"`{default}`"
    return f"| `{key.path}` | {key.kind.words} | {shown} | `{key.environment}` | {key.help} |\n"
