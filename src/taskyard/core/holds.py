"""Reasons why a lane with ready tasks gives none: pauses, holds, limits and rates.

Reads the ledger and the rules, and counts leases against rates. `selection` and `reservations` use
it to choose tasks, `explain` turns the reasons into sentences.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from taskyard.core import lane_rates
from taskyard.core.limits import RATE_BURST_NS_MAX, TASKS_MAX

if TYPE_CHECKING:
    from taskyard.core.entities import Lane, Worker
    from taskyard.core.ledger import Ledger
    from taskyard.core.rules import ActiveRule


class HoldReason(Enum):
    """Why a lane with ready tasks gives none. The values are sentences for users."""

    PAUSED_BROKER = "everything is paused"
    PAUSED_SERVICE = "its service is paused"
    PAUSED_LANE = "its lane is paused"
    HELD = "its lane is held until it is released"
    DEBOUNCED = "its lane collects more tasks before it starts (debounce)"
    LIMIT_BROKER = "the broker's limit on workers is reached"
    LIMIT_SERVICE = "its service's limit on workers is reached"
    LIMIT_LANE = "its lane's limit on leased tasks is reached"
    RATE = "its service's rate limit is reached"
    LANE_RATE = "its lane's rate limit is reached"
    NO_WORKER = "no worker of its service is connected"
    TROUBLE = "no worker of its service can start its agent"


def pause_reason(ledger: Ledger, lane: Lane) -> HoldReason | None:
    """Return the pause that holds a lane back, if any."""
    if ledger.paused:
        return HoldReason.PAUSED_BROKER
    if lane.service.paused:
        return HoldReason.PAUSED_SERVICE
    return HoldReason.PAUSED_LANE if lane.paused else None


def hold_reason(lane: Lane, now_ns: int) -> HoldReason | None:
    """Return the rule that holds a lane back, limits aside, if any."""
    if lane.options.is_held and lane.released <= lane.leased:
        return HoldReason.HELD
    return HoldReason.DEBOUNCED if lane.debounce_until_ns > now_ns else None


def limit_reason(ledger: Ledger, lane: Lane, now_ns: int) -> HoldReason | None:
    """Return the limit that refuses a task of a lane to one more worker, if any.

    Limits apply in this order: broker, rule, lane, rate, rate of the lane.
    """
    active_rule = lane.lane_group.active_rule
    if remaining(ledger.rules.workers_max, ledger.lane_worker_pairs) <= 0:
        return HoldReason.LIMIT_BROKER
    if remaining(active_rule.options.workers_max, active_rule.lane_worker_pairs) <= 0:
        return HoldReason.LIMIT_SERVICE
    if lane.name and remaining(active_rule.options.lane_workers_max, lane.workers) <= 0:
        return HoldReason.LIMIT_LANE
    if lane.name and lane.leased >= active_rule.lane_tasks_max:
        return HoldReason.LIMIT_LANE
    if not rate_allowance(active_rule, now_ns):
        return HoldReason.RATE
    return None if lane_rates.allowance(lane, now_ns) else HoldReason.LANE_RATE


def rate_allowance(active_rule: ActiveRule, now_ns: int) -> int:
    """Return how many tasks the rule's rate allows now."""
    interval_ns = active_rule.options.rate_interval_ns
    if not interval_ns:
        return TASKS_MAX
    since_ns = max(active_rule.rate_next_ns, now_ns - RATE_BURST_NS_MAX)
    return (now_ns - since_ns) // interval_ns + 1 if now_ns >= since_ns else 0


def spend_rate(active_rule: ActiveRule, count: int, now_ns: int) -> None:
    """Count leased tasks against the rule's rate."""
    interval_ns = active_rule.options.rate_interval_ns
    if interval_ns:
        since_ns = max(active_rule.rate_next_ns, now_ns - RATE_BURST_NS_MAX)
        active_rule.rate_next_ns = since_ns + count * interval_ns


def remaining(maximum: int, count: int) -> int:
    """Return how many more a limit allows. A maximum of 0 means no limit."""
    return maximum - count if maximum else TASKS_MAX


def is_open_to(ledger: Ledger, lane: Lane, worker: Worker, now_ns: int) -> bool:
    """Return whether the limits of a lane allow one more task of it for this worker."""
    if limit_reason(ledger, lane, now_ns) is None:
        return True
    active_rule = lane.lane_group.active_rule
    room = not lane.name or lane.leased < active_rule.lane_tasks_max
    in_rate = rate_allowance(active_rule, now_ns) > 0 and lane_rates.allowance(lane, now_ns) > 0
    return room and in_rate and lane.is_served_by(worker)


def block_reason(ledger: Ledger, lane: Lane, now_ns: int) -> HoldReason | None:
    """Return the pause or rule that holds a lane back for every worker, limits aside."""
    return pause_reason(ledger, lane) or hold_reason(lane, now_ns)
