"""Convert the settings of services to the scheduler's rules, one for each section, in order.

Combines a section, `[defaults]` and the built-in defaults. The scheduler matches rules with lanes
and applies them.
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
    """Return all rules, as an event for the scheduler."""
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
    """Fill in the unset values of a section from the defaults."""
    own = {key: value for key, value in structs.asdict(section).items() if value is not None}
    return structs.replace(defaults, **own)


def lane_options(section: ServiceSection) -> LaneOptions:
    """Return a section's options over the built-in defaults."""
    rate, lane_rate = section.rate, section.lane_rate
    values: dict[str, Any] = {
        "workers_max": section.workers_max,
        "lane_workers_max": section.lane_workers_max,
        "overfeed": section.overfeed,
        "rate_interval_ns": None if rate is None else rate.interval_ns,
        "lane_rate_interval_ns": None if lane_rate is None else lane_rate.interval_ns,
        "weight": section.weight,
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
        "lines": None if section.lines is None else section.lines.encode(),
        "lane_template": None if section.lane is None else section.lane.encode(),
    }
    return LaneOptions(**{name: value for name, value in values.items() if value is not None})


def _encoded(words: tuple[str, ...]) -> bytes:
    """Join a command to one line, which the agent host splits again."""
    return shlex.join(words).encode(errors="surrogateescape")


def _delays_ns(section: ServiceSection) -> tuple[int, ...] | None:
    """Return the delay before each further attempt."""
    if section.retries is None:
        return None
    interval_ns = section.interval_ns or INTERVAL_NS
    return tuple(round(multiple * interval_ns) for multiple in section.retries)
