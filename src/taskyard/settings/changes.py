"""What differs between two readings of the settings, in words: what a broker obeys at once, and
what counts only when something is started again.

Owns the sentences that a broker says when it has read its settings again. Obeying is its business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.settings.keys import DEFAULTS, KEYS, SERVICE

if TYPE_CHECKING:
    from taskyard.settings.sections import Settings

#: A sentence names so many changes and counts the rest: it is a line of a log.
NAMED_MAX: Final = 8

#: Keys of the table that a broker obeys without being started again.
_APPLIED_LIVE: Final = ("broker.workers_max",)

#: Keys that are for whoever asks a broker: it does not look at them itself.
_OF_CLIENTS: Final = ("broker.url", "broker.key")

_RULES: Final = (f"{DEFAULTS}.", f"{SERVICE}.")


class Changes(Struct, frozen=True):
    """What has changed."""

    #: A few words each: `service.smtp.workers_max 20 → 5`.
    applied: tuple[str, ...]
    #: Keys that count at the next start.
    needs_restart: tuple[str, ...]

    def sentence(self) -> str:
        """For the log."""
        told = f"obeyed from now on: {_first_few(self.applied)}" if self.applied else ""
        if self.needs_restart:
            needs_restart = (
                f"changed, but counts at the next start: {_first_few(self.needs_restart)}"
            )
            return f"{told}; {needs_restart}" if told else needs_restart
        return told or "nothing has changed"


def diff(before: Settings, after: Settings) -> Changes:
    """What is not as it was."""
    return Changes((*_sections(before, after), *_rules(before, after)), _later(before, after))


def _sections(before: Settings, after: Settings) -> list[str]:
    new = [f"[{SERVICE}.{name}] is new" for name in after.services if name not in before.services]
    gone = [f"[{SERVICE}.{name}] is gone" for name in before.services if name not in after.services]
    return new + gone + _order(before, after)


def _order(before: Settings, after: Settings) -> list[str]:
    """The first section that fits counts."""
    was = [name for name in before.services if name in after.services]
    now = [name for name in after.services if name in before.services]
    return [] if was == now else ["another order of the services"]


def _rules(before: Settings, after: Settings) -> list[str]:
    """What services that were and are there set."""
    paths = [path for path in dict.fromkeys((*before.all, *after.all)) if _is_rule(path)]
    return [
        f"{path} {_text(before, after, path)} → {_text(after, before, path)}"
        for path in paths
        if _section_stays(before, after, path) and _value(before, path) != _value(after, path)
    ]


def _is_rule(path: str) -> bool:
    return path in _APPLIED_LIVE or path.startswith(_RULES)


def _section_stays(before: Settings, after: Settings, path: str) -> bool:
    """Of sections that are new or gone nothing more is said."""
    section, _, _ = path.rpartition(".")
    name = section.removeprefix(f"{SERVICE}.")
    return section == name or (name in before.services and name in after.services)


def _later(before: Settings, after: Settings) -> tuple[str, ...]:
    others = (key.path for key in KEYS if key.path not in (*_APPLIED_LIVE, *_OF_CLIENTS))
    return tuple(path for path in others if before.value(path) != after.value(path))


def _value(settings: Settings, path: str) -> object:
    return settings.all[path].value if path in settings.all else None


def _text(settings: Settings, other: Settings, path: str) -> str:
    """What counts; the others know the key, if it is set only there."""
    common = f"{DEFAULTS}.{path.rpartition('.')[2]}"
    for one in (path, common):
        if one in settings.all:
            return settings.all[one].key.text(settings.all[one].value)
    return other.all[path].key.unset


def _first_few(words: tuple[str, ...]) -> str:
    more = len(words) - NAMED_MAX
    return ", ".join(words[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
