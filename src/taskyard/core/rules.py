"""Rules for lanes: their options, their patterns, and the usage counted against their limits.

A rule applies to the lanes that its pattern matches, in any service, and its limits are counted
over all of them. Rules are settings, not history: nothing here is durable, except the expiry times
that `with_expiry` puts into the terms of new tasks. Does not refer to lanes (`entities`).
"""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING, Final, TypeAlias
from zlib import crc32

from msgspec import Struct, msgpack, structs

from taskyard.core.limits import NUMBER_MAX, SECOND_NS, TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.core.model import Submission, Terms

    #: Matches a path `service/lane`.
    Matcher: TypeAlias = Callable[[bytes], object]
    #: Rules in the order in which they are tried. None: it matches everything.
    RuleMatchers: TypeAlias = list[tuple["ActiveRule", Matcher | None]]

#: The name of a service's open lane, which any number of workers serve.
OPEN_LANE: Final = b""

#: The literal beginning of a pattern.
_PLAIN: Final = re.compile(rb"[^*?\[]*")


class LaneOptions(Struct, frozen=True):
    """Options of lanes. Settings, not history: never journalled."""

    #: Workers that may serve lanes of the rule at once. 0: no limit.
    workers_max: int = 0
    #: Workers that may serve one lane at once. 0: no limit. The open lane has no limit.
    lane_workers_max: int = 1
    #: Tasks of a named lane that a worker gets beyond the task it works on.
    overfeed: int = 0
    #: Average time between two leased tasks. 0: no limit.
    rate_interval_ns: int = 0
    #: Average time between two leased tasks of one lane, also of the open lane. 0: no limit.
    lane_rate_interval_ns: int = 0
    #: Share of each of its lanes among waiting lanes of their service, relative to 1.
    weight: int = 1
    retry_delays_ns: tuple[int, ...] = ()
    jitter_percent: int = 0
    #: Unit of the retry schedule. A task that is deferred alone waits for one interval.
    interval_ns: int = SECOND_NS
    #: Age at which a tried task, and any task, expires unless its terms set a time. 0: never.
    expiry_ns: int = 0
    expiry_hard_ns: int = 0
    #: Age at which an unfinished task is reported as late. 0: never.
    report_after_ns: int = 0
    #: Ready tasks of a lane are leased in random order. False: by age.
    is_random: bool = False
    #: The lanes lease nothing until a client releases them.
    is_held: bool = False
    #: A lane that gets work starts this long after the first task.
    debounce_ns: int = 0
    # For worker hosts and clients. Passed on, never read. 0 or empty where not set.
    #: The command line of an agent.
    command: bytes = b""
    idle_ns_max: int = 0
    hunger_ns_max: int = 0
    #: The name of the agent's lines.
    lines: bytes = b""
    #: Template of the lane of tasks without one, filled in from their fields.
    lane_template: bytes = b""


class Rule(Struct, frozen=True):
    """Options for the lanes whose path `service/lane` matches, unless an earlier rule does.

    The open lane of a service has an empty name.
    """

    name: bytes
    #: `*` matches anything, including `/`.
    match: bytes = b"*"
    options: LaneOptions = LaneOptions()


#: Options of lanes that no rule matches, where the settings have no defaults.
NO_OPTIONS: Final = LaneOptions()


class ActiveRule(Struct, eq=False):
    """A rule in use, with the usage counted against its limits."""

    rule: Rule
    options: LaneOptions
    #: Tasks of one named lane that may be leased at once.
    lane_tasks_max: int
    #: The lanes wait only for workers and their own limits and rates: no rate or limit over all
    #: lanes, no random order.
    is_simple: bool
    #: Pairs of a lane and a worker that serves it. Counted only if some rule limits workers.
    lane_worker_pairs: int = 0
    #: When the rate allows the next lease.
    rate_next_ns: int = 0


class LaneRate(Struct, gc=False, eq=False):
    """The rate of one lane, as far as it is used up."""

    #: When it allows the next lease.
    next_ns: int = 0
    #: A timer is set for it (`lane_queues`).
    waits: bool = False


class RuleTable:
    """All rules in the order in which they are tried, and last the defaults."""

    def __init__(
        self, rules: Sequence[Rule] = (), defaults: LaneOptions = NO_OPTIONS, workers_max: int = 0
    ) -> None:
        self._all = [_activate(rule) for rule in rules]
        self._all.append(_activate(Rule(b"", b"*", defaults)))
        self._globs = [compile_glob(active_rule.rule.match) for active_rule in self._all]
        each = [active_rule.options for active_rule in self._all]
        #: Some rule has a rate.
        self.has_rates = any(one.rate_interval_ns for one in each)
        #: Some rule has a rate for each of its lanes.
        self.has_lane_rates = any(one.lane_rate_interval_ns for one in each)
        #: The broker or some rule limits workers.
        self.has_worker_limits = bool(workers_max) or any(one.workers_max for one in each)
        #: Some rule has a debounce time.
        self.has_debounce = any(one.debounce_ns for one in each)
        #: Some rule sets an expiry or a time for late reports.
        self.has_expiry = any(
            one.expiry_ns or one.expiry_hard_ns or one.report_after_ns for one in each
        )
        #: Changes when the rules change.
        self.version = crc32(msgpack.encode((tuple(rules), defaults, workers_max)))

    def __iter__(self) -> Iterator[ActiveRule]:
        return iter(self._all)

    def for_service(self, name: bytes) -> RuleMatchers:
        """Return the rules that lanes of a service may have. The first that matches applies."""
        start = name + b"/"
        found: RuleMatchers = []
        for active_rule, fits in zip(self._all, self._globs, strict=True):
            match = active_rule.rule.match
            if match in (b"*", start + b"*"):
                return [*found, (active_rule, None)]
            if may_match(match, start):
                found.append((active_rule, fits))
        return found

    def carry_rates_over(self, former: RuleTable, now_ns: int) -> None:
        """Keep used-up rates used up, but no longer than their new interval."""
        used_ns = {active_rule.rule.name: active_rule.rate_next_ns for active_rule in former}
        for active_rule in self._all:
            soonest_ns = now_ns + active_rule.options.rate_interval_ns
            active_rule.rate_next_ns = min(used_ns.get(active_rule.rule.name, 0), soonest_ns)


def first_match(matchers: RuleMatchers, service: bytes, lane: bytes) -> ActiveRule:
    """Return the first of these rules that matches a lane."""
    if len(matchers) > 1:
        path = service + b"/" + lane
        for active_rule, fits in matchers[:-1]:
            if fits is None or fits(path):
                return active_rule
    return matchers[-1][0]


def _activate(rule: Rule) -> ActiveRule:
    options = rule.options
    special = options.workers_max or options.rate_interval_ns or options.debounce_ns
    return ActiveRule(
        rule,
        options,
        lane_tasks_max=options.lane_workers_max * (1 + options.overfeed) or TASKS_MAX,
        is_simple=not (special or options.is_random or options.is_held),
    )


def compile_glob(pattern: bytes) -> Matcher:
    """Compile a case-sensitive glob pattern into a function that matches bytes."""
    return re.compile(translate(pattern.decode("latin-1")).encode("latin-1")).match


def may_match(pattern: bytes, start: bytes) -> bool:
    """Return whether a pattern can match a text with this beginning."""
    plain = _PLAIN.match(pattern)
    known = b"" if plain is None else plain[0]
    return known.startswith(start) or start.startswith(known)


def with_expiry(rule_table: RuleTable, submission: Submission, at_ns: int) -> Submission:
    """Return a submission with the expiry times that the rules of each task's lane set.

    They become part of the journalled terms, so that a change of the rules changes no known task.
    Tasks of one submission may be in lanes of different rules.
    """
    terms: list[Terms] = []
    indexes: dict[tuple[int, int], int] = {}
    terms_at = []
    for index, active_rule in _rules_of_tasks(rule_table, submission):
        key = (index, id(active_rule))
        if key not in indexes:
            indexes[key] = len(terms)
            terms.append(_with_defaults(submission.terms[index], active_rule.options, at_ns))
        terms_at.append(indexes[key])
    alike = len(terms) == 1
    return structs.replace(submission, terms=terms, terms_at=None if alike else terms_at)


def _rules_of_tasks(rule_table: RuleTable, submission: Submission) -> list[tuple[int, ActiveRule]]:
    """Return for each task the index of its terms and the rule of its lane."""
    count = len(submission.names)
    services = [terms.service for terms in submission.terms]
    choices = [rule_table.for_service(name) for name in services]
    indexes = submission.terms_at or [0] * count
    lanes = submission.lanes or [OPEN_LANE] * count
    return [
        (index, first_match(choices[index], services[index], lane))
        for index, lane in zip(indexes, lanes, strict=True)
    ]


def _with_defaults(terms: Terms, options: LaneOptions, at_ns: int) -> Terms:
    """Return terms with times from the rules where they set none. Ages count from the due time."""
    since_ns = max(at_ns, terms.due_ns)

    def after_ns(age_ns: int) -> int:
        return min(since_ns + age_ns, NUMBER_MAX) if age_ns else 0

    return structs.replace(
        terms,
        expires_ns=terms.expires_ns or after_ns(options.expiry_ns),
        expires_hard_ns=terms.expires_hard_ns or after_ns(options.expiry_hard_ns),
        report_ns=after_ns(options.report_after_ns),
    )
