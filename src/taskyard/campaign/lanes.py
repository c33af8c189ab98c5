"""Lane templates: `{host}` in a lane stands for the task's field of that name.

Owns the syntax of templates and the fields of a task: the keys of a payload that is a JSON object,
a function's keyword arguments by name, the words of a command and positional arguments by number,
and always the task's name, campaign and service. Also caches the templates of services and sets
the lanes of tasks that give none. Does not import files or clients.
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

    from taskyard.core.model import Submission, Terms
    from taskyard.core.rules import Rule

#: A doubled brace stands for a brace. A single brace is an error.
_PIECE: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")

#: Fields that an error lists: enough to spot a typing mistake.
FIELDS_SHOWN: Final = 5

#: Types of fields that can be part of a lane's name.
_PLAIN: Final = (str, int, float)

#: Templates older than this are requested again at the next submission, so that a program that runs
#: for weeks sees a change of settings.
CACHE_NS: Final = 10 * SECOND_NS

_work = msgspec.json.Decoder()


def is_template(lane: str) -> bool:
    """Return whether a lane has to be expanded."""
    return "{" in lane or "}" in lane


def template_keys(template: str) -> list[str]:
    """Return the names of the fields in a template."""
    return [found[1] for found in _PIECE.finditer(template) if found[1] is not None]


def escape_template(lane: str) -> str:
    """Return a template that expands to this lane."""
    return lane.replace("{", "{{").replace("}", "}}")


def expand(template: str, fields: Mapping[str, object]) -> str:
    """Return the lane that a template gives with these fields. Raises `InvalidValue`."""
    lane = _PIECE.sub(lambda found: _piece(found, template, fields), template)
    if not lane:
        raise InvalidValue(f"is {shown(template)}, which expands to nothing")
    try:
        return read_name(lane)
    except InvalidValue as bad:
        raise InvalidValue(f"is {shown(template)}, which {bad}") from None


def _piece(found: re.Match[str], template: str, fields: Mapping[str, object]) -> str:
    if found[0] in ("{{", "}}"):
        return found[0][0]
    name = found[1]
    if name is None or (not name and not fields.get("")):
        hint = "write a field as {host}, and double a literal brace"
        raise InvalidValue(f"is {shown(template)}, with a single {found[0]!r} ({hint})")
    value = fields.get(name)
    if value is None:
        missing = f"is {shown(template)}, but the task has no field {shown(name)}"
        raise InvalidValue(f"{missing} (it has {_fields_text(fields)})")
    if not isinstance(value, _PLAIN):
        wrong = f"is {shown(template)}, but field {shown(name)} is {shown(value)}"
        raise InvalidValue(f"{wrong}, not a text or a number")
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _fields_text(fields: Mapping[str, object]) -> str:
    names = [shown(name) for name, value in fields.items() if name and isinstance(value, _PLAIN)]
    more = f" and {len(names) - FIELDS_SHOWN} more" if len(names) > FIELDS_SHOWN else ""
    return f"{', '.join(names[:FIELDS_SHOWN])}{more}"


def fields_of(work: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a task from its `argv`, its `call` and arguments, or its payload's keys.

    Fields in `extra` override them.
    """
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
    """Return the keys and values of a payload that is a JSON object, else nothing."""
    if not payload.lstrip().startswith(b"{"):
        return {}
    try:
        decoded = _work.decode(payload)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def template_of(service: bytes, rules: Iterable[Rule]) -> str:
    """Return the lane template of a service, by the first rule that matches its open lane."""
    lane = service + b"/"
    for rule in rules:
        if not rule.name or compile_glob(rule.match)(lane):
            return model.shown(rule.options.lane_template)
    return ""


class LaneTemplates:
    """A cache of the lane templates of services."""

    def __init__(self) -> None:
        #: The template of each service, and when it was received.
        self._templates: dict[bytes, tuple[str, int]] = {}

    def has(self, service: bytes) -> bool:
        return service in self._templates

    def get(self, service: bytes) -> str:
        """Return the cached template of a service. Empty: it has none."""
        return self._templates[service][0]

    def put(self, templates: Mapping[bytes, str]) -> None:
        """Cache the templates of services, for as long as this object lives."""
        self._templates |= {service: (one, 0) for service, one in templates.items()}

    def update(self, services: Sequence[bytes], rules: Sequence[Rule], now_ns: int) -> None:
        for service in services:
            self._templates[service] = (template_of(service, rules), now_ns)

    def drop_old(self, now_ns: int) -> None:
        old = [one for one, (_, at_ns) in self._templates.items() if now_ns - at_ns > CACHE_NS]
        for service in old:
            del self._templates[service]

    def lane_of(self, name: bytes, payload: bytes, terms: Terms) -> bytes:
        """Return the lane of a task by its service's cached template. Raises `InvalidValue`."""
        template = self._templates[terms.service][0]
        if not template:
            return b""
        own = {"name": name, "campaign": terms.campaign, "service": terms.service}
        always = {key: model.shown(value) for key, value in own.items()}
        try:
            lane = expand(template, fields_of(payload_keys(payload), always))
        except InvalidValue as bad:
            raise InvalidValue(f"the lane of service {always['service']} {bad}") from None
        return lane.encode()

    def assign(self, batch: Submission) -> list[tuple[int, str]]:
        """Set the lanes of a batch's tasks that give none, in place.

        Returns the index and the problem of each task that its template does not fit.
        """
        if not any(self.get(terms.service) for terms in batch.terms):
            return []
        lanes = batch.lanes or [b""] * len(batch.names)
        problems: list[tuple[int, str]] = []
        for index, name in enumerate(batch.names):
            if not lanes[index]:
                terms = batch.terms_of(index)
                try:
                    lanes[index] = self.lane_of(name, batch.text_of(index), terms)
                except InvalidValue as bad:
                    problems.append((index, str(bad)))
        batch.lanes = lanes
        return problems
