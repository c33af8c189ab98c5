"""Clauses at work: which lane is run by which rules, and what is counted against their limits.

A clause is for the lanes that its pattern fits, of whichever services, and its limits are counted
over all of them. Settings, not history: nothing here is durable. Which lanes there are and whose
turn it is stands in `agenda`.
"""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING, Final, TypeAlias
from zlib import crc32

from msgspec import Struct, field, msgpack

from taskyard.core.events import Rule
from taskyard.core.limits import TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.core.events import LaneOptions, RulesSet
    from taskyard.core.queues import LaneGroup

    #: Whether a lane is one of those that a pattern is for.
    Matcher: TypeAlias = Callable[[bytes], object]
    #: Regimes in the order in which they are tried; None: it fits all that is left.
    RuleMatchers: TypeAlias = list[tuple["ActiveRule", Matcher | None]]

#: What a pattern says of any text before it names none in particular.
_PLAIN: Final = re.compile(rb"[^*?\[]*")


class ActiveRule(Struct, eq=False):
    """A clause at work."""

    rule: Rule
    rules: LaneOptions
    #: Tasks of one named lane that may be out at once.
    lane_tasks_max: int
    #: Its lanes wait for nothing but workers and their own limits: no rate, no limit of all of
    #: them, no order but age.
    is_simple: bool
    #: Pairs of a lane and a worker that serves it; kept while there are limits of workers.
    lane_worker_pairs: int = 0
    #: When the rate allows the next lease.
    rate_next_ns: int = 0
    #: Its lanes, by service.
    lane_groups: list[LaneGroup] = field(default_factory=list)


class RuleTable:
    """All clauses, in the order in which they are tried, and what is for the rest."""

    def __init__(self, rules: RulesSet, former: RuleTable | None = None) -> None:
        self._all = [_activate(rule) for rule in rules.rules]
        self._all.append(_activate(Rule(b"", b"*", rules.defaults)))
        self._globs = [compile_glob(active_rule.rule.match) for active_rule in self._all]
        if former is not None:
            self._carry_rates_over(former, rules.now_ns)
        each = [active_rule.rules for active_rule in self._all]
        #: Some regime has a rate; the broker or some regime has a limit of workers.
        self.has_rates = any(one.rate_interval_ns for one in each)
        self.has_worker_limits = bool(rules.workers_max) or any(one.workers_max for one in each)
        #: Lanes of some regime gather tasks before they begin.
        self.has_debounce = any(one.debounce_ns for one in each)
        #: Some regime sets ages that tasks may not reach, or are reported at.
        self.has_expiry = any(
            one.expiry_ns or one.expiry_hard_ns or one.report_after_ns for one in each
        )
        #: Another number when the rules are others.
        self.version = crc32(msgpack.encode((rules.rules, rules.defaults, rules.workers_max)))

    def __iter__(self) -> Iterator[ActiveRule]:
        return iter(self._all)

    def for_service(self, name: bytes) -> RuleMatchers:
        """The regimes that a lane of a service may have; the first that fits holds."""
        start = name + b"/"
        found: RuleMatchers = []
        for active_rule, fits in zip(self._all, self._globs, strict=True):
            match = active_rule.rule.match
            if match in (b"*", start + b"*"):
                return [*found, (active_rule, None)]
            if may_match(match, start):
                found.append((active_rule, fits))
        return found

    def _carry_rates_over(self, former: RuleTable, now_ns: int) -> None:
        """A rate that is used up stays used up, but for no longer than its interval says now."""
        used_ns = {active_rule.rule.name: active_rule.rate_next_ns for active_rule in former}
        for active_rule in self._all:
            soonest_ns = now_ns + active_rule.rules.rate_interval_ns
            active_rule.rate_next_ns = min(used_ns.get(active_rule.rule.name, 0), soonest_ns)


def first_match(matchers: RuleMatchers, service: bytes, lane: bytes) -> ActiveRule:
    """The regime of a lane, of those that lanes of its service may have."""
    if len(matchers) > 1:
        path = service + b"/" + lane
        for active_rule, fits in matchers[:-1]:
            if fits is None or fits(path):
                return active_rule
    return matchers[-1][0]


def _activate(rule: Rule) -> ActiveRule:
    rules = rule.rules
    special = rules.workers_max or rules.rate_interval_ns or rules.debounce_ns
    return ActiveRule(
        rule,
        rules,
        lane_tasks_max=rules.lane_workers_max * (1 + rules.overfeed) or TASKS_MAX,
        is_simple=not (special or rules.is_random or rules.is_held),
    )


def compile_glob(pattern: bytes) -> Matcher:
    """Whether a text is one that a pattern is for; upper and lower case differ."""
    return re.compile(translate(pattern.decode("latin-1")).encode("latin-1")).match


def may_match(pattern: bytes, start: bytes) -> bool:
    """Some text that begins so may fit a pattern; False: none does."""
    plain = _PLAIN.match(pattern)
    known = b"" if plain is None else plain[0]
    return known.startswith(start) or start.startswith(known)
