"""What the settings of services mean to the scheduler: a clause a section, in the file's order.

Owns how a section, `[defaults]` and what holds without either become rules. Which clause a lane is
run by, and what its rules do, is the scheduler's business.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from msgspec import structs

from taskyard.core.events import RulesSet
from taskyard.core.rules import LaneOptions, Rule
from taskyard.settings.sections import INTERVAL_NS, ServiceSection

if TYPE_CHECKING:
    from taskyard.settings.sections import Settings


def to_rules_set(settings: Settings) -> RulesSet:
    """All of it, as the scheduler wants it."""
    return RulesSet(
        now_ns=0,
        rules=tuple(
            _rule(name, section, settings.defaults) for name, section in settings.services.items()
        ),
        defaults=lane_options(settings.defaults),
        workers_max=settings.broker.workers_max,
    )


def _rule(name: str, section: ServiceSection, defaults: ServiceSection) -> Rule:
    match = section.match_for(name).encode()
    return Rule(name.encode(), match, lane_options(with_defaults(section, defaults)))


def with_defaults(section: ServiceSection, defaults: ServiceSection) -> ServiceSection:
    """A section with what it does not set from the defaults."""
    own = {key: value for key, value in structs.asdict(section).items() if value is not None}
    return structs.replace(defaults, **own)


def lane_options(section: ServiceSection) -> LaneOptions:
    """What a section says, over what holds where nobody says anything."""
    rate = section.rate
    said: dict[str, Any] = {
        "workers_max": section.workers_max,
        "lane_workers_max": section.lane_workers_max,
        "overfeed": section.overfeed,
        "rate_interval_ns": None if rate is None else rate.interval_ns,
        "retry_delays_ns": _delays_ns(section),
        "jitter_percent": section.jitter,
        "expiry_ns": section.expiry_ns,
        "expiry_hard_ns": section.expiry_hard_ns,
        "is_random": None if section.order is None else section.order == "random",
        "is_held": section.hold,
        "debounce_ns": section.debounce_ns,
        "report_after_ns": section.report_after_ns,
        "interval_ns": section.interval_ns or INTERVAL_NS,
        "command": None if section.command is None else _encoded(section.command),
        "idle_ns_max": section.idle_max_ns,
        "hunger_ns_max": section.hunger_max_ns,
        "lane_template": None if section.lane is None else section.lane.encode(),
    }
    return LaneOptions(**{name: value for name, value in said.items() if value is not None})


def _encoded(words: tuple[str, ...]) -> bytes:
    """A command in one line, to be split again by whoever runs it."""
    return shlex.join(words).encode(errors="surrogateescape")


def _delays_ns(section: ServiceSection) -> tuple[int, ...] | None:
    """How long to wait before each further attempt."""
    if section.retries is None:
        return None
    interval_ns = section.interval_ns or INTERVAL_NS
    return tuple(round(multiple * interval_ns) for multiple in section.retries)
