"""Placeholders in an agent's command: `{lane}` and `{service}`, `{{` and `}}` for braces.

The settings check a command, and a worker host fills it in when it starts an agent for a lane.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from taskyard.core.scripts import scripts_in

if TYPE_CHECKING:
    from collections.abc import Sequence

LANE: Final = "{lane}"
SERVICE: Final = "{service}"

_PLACE: Final = re.compile(r"\{\{|\}\}|\{lane\}|\{service\}")
_LITERALS: Final = {"{{": "{", "}}": "}"}


def problem_of(words: Sequence[str]) -> str | None:
    """Return what is wrong with the braces in a command; None: nothing."""
    for word in words:
        rest = _PLACE.sub("", word)
        if "{" in rest or "}" in rest:
            known = f"{LANE} and {SERVICE}"
            return f"{word!r} has other braces than {known} (write {{{{ and }}}} for a brace)"
    if LANE in _places(words[0]):
        return f"{words[0]!r} has {LANE} in the program, which clients would choose then"
    for place, script in scripts_in(words).items():
        if LANE in _places(words[place]):
            return (
                f"{words[place]!r} has {LANE} in the script of {script.program}, which clients "
                f"would write then ({script.hint.replace('{}', LANE)})"
            )
    return None


def has_places(words: Sequence[str]) -> bool:
    """Return whether a command differs from lane to lane, or from service to service."""
    return any(place not in _LITERALS for word in words for place in _places(word))


def fill(words: tuple[str, ...], service: str, lane: str) -> tuple[str, ...]:
    """Return a command for one lane. Other braces stay as they are."""
    if not any(map(_places, words)):
        return words
    values = {**_LITERALS, LANE: lane, SERVICE: service}
    return tuple(_PLACE.sub(lambda found: values[found[0]], word) for word in words)


def _places(word: str) -> list[str]:
    return _PLACE.findall(word)
