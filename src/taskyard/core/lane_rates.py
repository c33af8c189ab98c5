"""Rates of single lanes: when each allows the next task, and the timers of lanes that wait for it.

A lane without tasks is deleted, and its rate must not start anew with its next task. So a lane
group keeps the rates by the names of its lanes, and a lane refers to its own. Rates of deleted
lanes are dropped when they are over. All of it is volatile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core.limits import LANE_RATES_MAX, RATE_BURST_NS_MAX, SECOND_NS, TASKS_MAX
from taskyard.core.rules import LaneRate

if TYPE_CHECKING:
    from taskyard.core.entities import Lane, LaneGroup
    from taskyard.core.lane_queues import Counts
    from taskyard.core.timer_heap import TimerHeap

#: A group that keeps fewer rates is not searched for those that are over.
SWEEP_MIN: Final = 1000

#: Timers are rounded up to this, so that many lanes share a turn. A rate is still reached: what a
#: lane does not use meanwhile accumulates.
STEP_NS: Final = SECOND_NS // 1000

#: The units of rates, as in the settings.
_UNITS_NS: Final = {
    "s": SECOND_NS,
    "m": 60 * SECOND_NS,
    "h": 3600 * SECOND_NS,
    "d": 86_400 * SECOND_NS,
}


def set_timer(timers: TimerHeap, lane: Lane, rate: LaneRate) -> None:
    """Set a timer for a lane whose rate is used up, unless it has one."""
    if not rate.waits:
        rate.waits = True
        timers.add(-(-rate.next_ns // STEP_NS) * STEP_NS, None, lane)


def wait_ns(lane: Lane, now_ns: int) -> int:
    """Return how long a lane's rate allows no task."""
    return 0 if lane.rate is None else max(0, lane.rate.next_ns - now_ns)


def allowance(lane: Lane, now_ns: int) -> int:
    """Return how many tasks a lane's rate allows now."""
    interval_ns = lane.options.lane_rate_interval_ns
    if not interval_ns:
        return TASKS_MAX
    since_ns = now_ns - RATE_BURST_NS_MAX
    if lane.rate is not None and lane.rate.next_ns > since_ns:
        since_ns = lane.rate.next_ns
    return (now_ns - since_ns) // interval_ns + 1 if now_ns >= since_ns else 0


def spend(counts: Counts, now_ns: int) -> int:
    """Count leased tasks against the rates of their lanes. Return how many used-up rates of
    deleted lanes were forgotten."""
    idle_ns = now_ns - RATE_BURST_NS_MAX
    forgotten = 0
    for lane, count in counts:
        interval_ns = lane.lane_group.active_rule.options.lane_rate_interval_ns
        if not interval_ns:
            continue
        rate = lane.rate
        if rate is None:
            forgotten += _sweep_if_many(lane.lane_group, now_ns)
            rate = lane.rate = lane.lane_group.lane_rates[lane.name] = LaneRate()
        rate.next_ns = max(rate.next_ns, idle_ns) + count * interval_ns
    return forgotten


def _sweep_if_many(lane_group: LaneGroup, now_ns: int) -> int:
    """Drop rates of deleted lanes if there are many: those that are over, and some others if there
    are too many. Return how many of the latter."""
    rates, lanes = lane_group.lane_rates, lane_group.service.lanes
    if len(rates) < lane_group.lane_rates_sweep_at:
        return 0
    idle_ns = now_ns - RATE_BURST_NS_MAX
    deleted = [name for name, rate in rates.items() if name not in lanes and not rate.waits]
    over = [name for name in deleted if rates[name].next_ns <= idle_ns]
    for name in over:
        del rates[name]
    left = [name for name in deleted if name in rates]
    forgotten = left[: -LANE_RATES_MAX // 2] if len(left) > LANE_RATES_MAX else []
    for name in forgotten:
        del rates[name]
    lane_group.lane_rates_sweep_at = max(SWEEP_MIN, 2 * len(rates))
    return len(forgotten)


def carry_over(former: list[LaneGroup], now_ns: int) -> None:
    """Keep used-up rates used up in a service's new groups, but no longer than their new interval.

    The caller drops the timers and puts every lane with ready tasks into a rotation.
    """
    for lane_group in former:
        service = lane_group.service
        for name, rate in lane_group.lane_rates.items():
            group = service.lane_group_of(name)
            interval_ns = group.active_rule.options.lane_rate_interval_ns
            if interval_ns and rate.next_ns > now_ns - RATE_BURST_NS_MAX:
                group.lane_rates[name] = LaneRate(min(rate.next_ns, now_ns + interval_ns))
                if name in service.lanes:
                    service.lanes[name].rate = group.lane_rates[name]


def rate_text(interval_ns: int) -> str:
    """Format a rate as in the settings: `5/s`."""
    for unit, unit_ns in _UNITS_NS.items():
        tasks = round(unit_ns / interval_ns)
        if tasks and unit_ns // tasks == interval_ns:
            return f"{tasks}/{unit}"
    return f"1 in {interval_ns / SECOND_NS:g} s"
