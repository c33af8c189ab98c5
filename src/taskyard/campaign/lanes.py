"""Lanes by template: `{host}` in a lane stands for what the task has under that name.

Owns what a template may say, and which fields a task has: the keys of a payload that is a JSON
object, a function's named arguments by name, the words of a command and a function's other
arguments by number, and always the task's name, campaign and service. Knows neither files nor
brokers; who calls knows where a template came from.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from taskyard.campaign.values import InvalidValue, read_name, shown
from taskyard.core import model
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import compile_glob

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from taskyard.core.model import Terms
    from taskyard.core.rules import Rule

#: A doubled brace is one that is meant; a single one is a mistake.
_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")

#: Fields that a message names; who mistyped one sees it among them, or looks at the task.
FIELDS_SHOWN: Final = 5

#: What can stand in a lane's name as it is, or as JSON writes it.
_PLAIN: Final = (str, int, float)

#: What was told is asked for again when it is older and somebody submits: settings change rarely,
#: and a program that runs for weeks sees it when they do.
CACHE_NS: Final = 10 * SECOND_NS

_work = msgspec.json.Decoder()


def is_template(lane: str) -> bool:
    """Whether a lane has to be expanded."""
    return "{" in lane or "}" in lane


def escape_template(lane: str) -> str:
    """The template of this very lane."""
    return lane.replace("{", "{{").replace("}", "}}")


def expand(template: str, fields: Mapping[str, object]) -> str:
    """The lane that a template makes of a task's fields. Raises `InvalidValue`."""
    lane = _PIECE.sub(lambda found: _piece(found, template, fields), template)
    if not lane:
        raise InvalidValue(f"is {shown(template)}, which comes out empty; give its fields a value")
    try:
        return read_name(lane)
    except InvalidValue as bad:
        raise InvalidValue(f"is {shown(template)}, which {bad}") from None


def _piece(found: re.Match[str], template: str, fields: Mapping[str, object]) -> str:
    if found[0] in ("{{", "}}"):
        return found[0][0]
    name = found[1]
    if name is None or (not name and not fields.get("")):
        example = "write a field as {host}, and a brace that is meant twice"
        raise InvalidValue(f"is {shown(template)}, which has {found[0]!r} alone; {example}")
    value = fields.get(name)
    if value is None:
        missing = f"is {shown(template)}, and there is no field {shown(name)}"
        raise InvalidValue(f"{missing}; use {_fields_text(fields)}")
    if not isinstance(value, _PLAIN):
        wrong = f"is {shown(template)}, and field {shown(name)} is {shown(value)}"
        raise InvalidValue(f"{wrong}; it must be a text or a number")
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _fields_text(fields: Mapping[str, object]) -> str:
    names = [shown(name) for name, value in fields.items() if name and isinstance(value, _PLAIN)]
    more = f" or {len(names) - FIELDS_SHOWN} more" if len(names) > FIELDS_SHOWN else ""
    return f"{', '.join(names[:FIELDS_SHOWN])}{more}"


def fields_of(work: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    """The fields of a task that does this: `argv`, `call` with its arguments, or the keys of a
    payload. What there is `extra` is the task's own, whatever that says."""
    fields: dict[str, object] = {}
    for key, value in work.items():
        if key == "kwargs" and isinstance(value, dict):
            fields |= value
        elif key in ("argv", "args") and isinstance(value, list | tuple):
            fields |= {str(number): one for number, one in enumerate(value)}
        else:
            fields[key] = value
    return fields | {**extra}


def payload_keys(payload: bytes) -> dict[str, Any]:
    """What a payload that is a JSON object has; nothing if it is something else."""
    if not payload.lstrip().startswith(b"{"):
        return {}
    try:
        decoded = _work.decode(payload)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def template_of(service: bytes, clauses: Iterable[Rule]) -> str:
    """The template of a service: that of the first clause which its open lane fits."""
    lane = service + b"/"
    for clause in clauses:
        if not clause.name or compile_glob(clause.match)(lane):
            return model.shown(clause.options.lane_template)
    return ""


class LaneTemplates:
    """What is known of services' templates."""

    def __init__(self) -> None:
        #: The template, and when it was told.
        self._templates: dict[bytes, tuple[str, int]] = {}

    def has(self, service: bytes) -> bool:
        return service in self._templates

    def update(self, services: Sequence[bytes], clauses: Sequence[Rule], now_ns: int) -> None:
        for service in services:
            self._templates[service] = (template_of(service, clauses), now_ns)

    def drop_old(self, now_ns: int) -> None:
        old = [one for one, (_, at_ns) in self._templates.items() if now_ns - at_ns > CACHE_NS]
        for service in old:
            del self._templates[service]

    def lane_of(self, name: bytes, payload: bytes, terms: Terms) -> bytes:
        """The lane of a task that gives none, of a service that is known. Raises `InvalidValue`."""
        return expand_lane(self._templates[terms.service][0], name, payload, terms)


def expand_lane(template: str, name: bytes, payload: bytes, terms: Terms) -> bytes:
    """The lane that its service's template makes of a task. Raises `InvalidValue`."""
    if not template:
        return b""
    own = {"name": name, "campaign": terms.campaign, "service": terms.service}
    always = {key: model.shown(value) for key, value in own.items()}
    try:
        lane = expand(template, fields_of(payload_keys(payload), always))
    except InvalidValue as bad:
        raise InvalidValue(f"the lane of service {always['service']} {bad}") from None
    return lane.encode()
