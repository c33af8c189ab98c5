"""The differences between two versions of the settings, as text for the broker's log.

Separates changes that a broker applies at once from those that need a restart. The broker applies
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.settings.keys import DEFAULTS, KEYS, LISTEN, SERVICE

if TYPE_CHECKING:
    from taskyard.settings.sections import Settings

#: Changes named in a log line. The rest is counted.
NAMED_MAX: Final = 8

#: Keys of the table that a broker applies without a restart.
_APPLIED_LIVE: Final = (*("broker.workers_max", "blobs.quota", "blobs.keep", "blobs.grace"),)

#: Keys for clients and the page, which a broker ignores.
_OF_CLIENTS: Final = ("broker.url", "broker.key", "broker.invite", "broker.page")

_RULES: Final = (f"{DEFAULTS}.", f"{SERVICE}.")


class Changes(Struct, frozen=True):
    """The changes between two versions of the settings."""

    #: A short text each: `service.smtp.workers_max 20 → 5`.
    applied: tuple[str, ...]
    #: Keys that need a restart.
    needs_restart: tuple[str, ...]

    def sentence(self) -> str:
        """Return the changes as a log line."""
        applied = f"applied {_first_few(self.applied)}" if self.applied else ""
        if self.needs_restart:
            needs_restart = f"restart needed for {_first_few(self.needs_restart)}"
            return f"{applied}; {needs_restart}" if applied else needs_restart
        return applied or "no changes"


def diff(before: Settings, after: Settings) -> Changes:
    """Compare two versions of the settings."""
    return Changes((*_sections(before, after), *_rules(before, after)), _later(before, after))


def _sections(before: Settings, after: Settings) -> list[str]:
    new = [f"[{SERVICE}.{name}] added" for name in after.services if name not in before.services]
    gone = [f"[{SERVICE}.{name}] removed" for name in before.services if name not in after.services]
    return new + gone + _order(before, after)


def _order(before: Settings, after: Settings) -> list[str]:
    """Report a changed order of the services: the first match is used."""
    was = [name for name in before.services if name in after.services]
    now = [name for name in after.services if name in before.services]
    return [] if was == now else ["order of the services"]


def _rules(before: Settings, after: Settings) -> list[str]:
    """Describe changed values of services that exist before and after."""
    paths = [path for path in dict.fromkeys((*before.all, *after.all)) if _is_rule(path)]
    return [
        f"{path} {_text(before, after, path)} → {_text(after, before, path)}"
        for path in paths
        if _section_stays(before, after, path) and _value(before, path) != _value(after, path)
    ]


def _is_rule(path: str) -> bool:
    return path in _APPLIED_LIVE or path.startswith(_RULES)


def _section_stays(before: Settings, after: Settings, path: str) -> bool:
    """Return whether a key's section exists before and after."""
    section, _, _ = path.rpartition(".")
    name = section.removeprefix(f"{SERVICE}.")
    return section == name or (name in before.services and name in after.services)


def _later(before: Settings, after: Settings) -> tuple[str, ...]:
    others = [key.path for key in KEYS if key.path not in (*_APPLIED_LIVE, *_OF_CLIENTS)]
    set_paths = dict.fromkeys((*before.all, *after.all))
    tables = [path for path in set_paths if path.startswith(f"{LISTEN}.") and path not in others]
    return tuple(path for path in (*others, *tables) if _value(before, path) != _value(after, path))


def _value(settings: Settings, path: str) -> object:
    return settings.all[path].value if path in settings.all else None


def _text(settings: Settings, other: Settings, path: str) -> str:
    """Format the effective value. The key may be set only in `other`."""
    common = f"{DEFAULTS}.{path.rpartition('.')[2]}"
    for one in (path, common):
        if one in settings.all:
            return settings.all[one].key.text(settings.all[one].value)
    return other.all[path].key.unset


def _first_few(texts: tuple[str, ...]) -> str:
    more = len(texts) - NAMED_MAX
    return ", ".join(texts[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
