"""The cost of lanes: 100,000 with ten tasks each, beside a million tasks in one open lane.

The whole broker, durable, workers after the producer. The lanes have no rules, rules found by
pattern, or limits and a rate that are counted and never reached: the cost of having them, not of
waiting.

Then 1,000 lanes with a rate each that is used up all the time, beside lanes without. The scheduler
alone, in simulated time.
"""

from typing import Final

from msgspec import Struct

from bench.broker.campaigns import Campaign, CampaignRun, measure
from bench.core import rated_lanes
from bench.core.rated_lanes import RatedLanes
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import LANE_RATE_COST, LANE_RATE_DEVIATION, SHAPE_COST
from taskyard.core.events import RulesSet
from taskyard.core.rules import LaneOptions, Rule

COUNT: Final = 1_000_000

#: Lanes with rates, their tasks per second, and simulated seconds.
LANES: Final = 1000
RATE: Final = 5
SECONDS: Final = 100

#: The case that has a floor.
PLAIN: Final = "lanes of ten"

#: More than two workers ever serve at once.
_FAR: Final = 100_000

#: The last rule matches most lanes, so that those before it are tried in vain.
_BY_PATTERN: Final = (
    Rule(b"first", b"default/lane-000*"),
    Rule(b"odd", b"default/*7"),
    Rule(b"others", b"default/lane-*"),
)


class LaneCase(Struct, frozen=True):
    """A campaign and the name of its line."""

    what: str
    campaign: Campaign


def cases(count: int) -> list[LaneCase]:
    """Return all cases. The first is the base of comparison."""

    def lanes(rules: RulesSet | None = None) -> Campaign:
        return Campaign(count, shape="lanes", rules=rules)

    return [
        LaneCase("flat, one open lane", Campaign(count)),
        LaneCase(PLAIN, lanes()),
        LaneCase("lanes, sections by pattern", lanes(RulesSet(0, _BY_PATTERN))),
        LaneCase("lanes, limits", lanes(_limits(LaneOptions(workers_max=_FAR)))),
        LaneCase("lanes, limits and rate", lanes(_limits(LaneOptions(_FAR, rate_interval_ns=1)))),
    ]


def _limits(rules: LaneOptions) -> RulesSet:
    return RulesSet(0, (Rule(b"all", b"default/*", rules),), workers_max=_FAR)


def run(settings: Settings) -> list[TableLine]:
    """Run the cases in turns, so that other load on the machine meets all of them. Return the
    lines of the table."""
    wanted = cases(settings.count(COUNT))
    runs: list[list[CampaignRun]] = [[] for _ in wanted]
    for turn in settings.times():
        for case, done in zip(wanted, runs, strict=True):
            settings.say(f"{turn + 1}. {case.what}: {case.campaign.count:,} tasks")
            done.append(measure(case.campaign, settings))
    flat, *others = [
        (case.what, [one.task_us for one in done]) for case, done in zip(wanted, runs, strict=True)
    ]
    lines = [table_line(flat[0], "µs/task", flat[1])]
    for what, costs in others:
        bound = SHAPE_COST if what == PLAIN else None  # rules have no target
        lines.append(table_line(what, "µs/task", costs))
        lines.append(table_line("  over flat", "×", [one / min(flat[1]) for one in costs], bound))
    return lines + _rate_lines(settings)


def _rate_lines(settings: Settings) -> list[TableLine]:
    """Return the lines of lanes with a rate each, beside the same number of lanes without."""
    runs: dict[bool, list[RatedLanes]] = {False: [], True: []}
    for turn in settings.times():
        for rated, done in runs.items():
            settings.say(f"{turn + 1}. {LANES:,} lanes, {'rates' if rated else 'no rates'}")
            case = RatedLanes(LANES, RATE, settings.count(SECONDS), rated=rated)
            done.append(rated_lanes.measure(case))
    plain, costs = ([one.task_us for one in done] for done in runs.values())
    deviations = [100 * one.deviation for one in runs[True]]
    what = f"{LANES:,} lanes, scheduler alone"
    return [
        table_line(what, "µs/task", plain),
        table_line(f"  {RATE}/s in each", "µs/task", costs),
        table_line("  over no rate", "×", [one / min(plain) for one in costs], LANE_RATE_COST),
        table_line("  largest deviation", "%", deviations, LANE_RATE_DEVIATION),
    ]
