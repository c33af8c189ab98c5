"""The cost of lanes: 100,000 with ten tasks each, beside a million tasks in one open lane.

The whole broker, durable, workers after the producer. The lanes have no rules, rules found by
pattern, or limits and a rate that are counted and never reached: the cost of having them, not of
waiting.
"""

from typing import Final

from msgspec import Struct

from bench.broker.campaigns import Campaign, CampaignRun, measure
from bench.settings import Settings
from bench.table import TableLine, table_line
from bench.targets import SHAPE_COST
from taskyard.core.events import RulesSet
from taskyard.core.rules import LaneOptions, Rule

COUNT: Final = 1_000_000

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
    return lines
