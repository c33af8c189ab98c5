"""What a broker says of lanes: the templates for tasks that give none, by their service.

Owns how long that is believed, and which of a broker's rules counts. The lane of a task is made
where it is submitted, because only there its fields are known; what makes it is `campaign.lanes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.campaign import lanes
from taskyard.campaign.values import InvalidValue
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.core.rules import compile_glob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.core.model import Terms
    from taskyard.core.rules import Rule

#: What was told is asked for again when it is older and somebody submits: settings change rarely,
#: and a program that runs for weeks sees it when they do.
CACHE_NS: Final = 10 * SECOND_NS


def template_of(service: bytes, clauses: Iterable[Rule]) -> str:
    """The template of a service: that of the first clause which its open lane fits."""
    lane = service + b"/"
    for clause in clauses:
        if not clause.name or compile_glob(clause.match)(lane):
            return shown(clause.options.lane_template)
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
    always = {key: shown(value) for key, value in own.items()}
    try:
        lane = lanes.expand(template, lanes.fields_of(lanes.payload_keys(payload), always))
    except InvalidValue as bad:
        raise InvalidValue(f"the lane of service {always['service']} {bad}") from None
    return lane.encode()
