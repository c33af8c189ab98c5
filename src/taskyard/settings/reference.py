"""The tables of settings for the pages, made from the table of keys.

`./yard docs` puts them into docs/settings.md.
"""

from __future__ import annotations

from taskyard.settings.keys import DEFAULTS, KEYS, Key, service_keys

_HEAD = "| setting | is | if not set | variable | |\n|---|---|---|---|---|\n"


def table() -> str:
    """As Markdown, a row a setting."""
    return _HEAD + "".join(_row(key) for key in KEYS)


def _row(key: Key) -> str:
    default = key.text(key.default)
    shown = default if default == key.unset else f"`{default}`"
    return (
        f"| `{key.path}` | {key.kind.description} | {shown} | `{key.environment}` | {key.help} |\n"
    )


_HEAD_OF_SERVICES = "| of a service | is | if not set | |\n|---|---|---|---|\n"


def service_table() -> str:
    """What can be set for a service; a star where `[defaults]` has it, too."""
    common = [key.name for key in service_keys(DEFAULTS)]
    return _HEAD_OF_SERVICES + "".join(
        f"| `{key.name}`{'*' if key.name in common else ''} | {key.kind.description} | "
        f"{_unset(key)} | {key.help} |\n"
        for key in service_keys("service.NAME")
    )


def _unset(key: Key) -> str:
    """A value as it would be written, or words."""
    return key.unset if key.unset in ("never", "none", "no limit") else f"`{key.unset}`"
