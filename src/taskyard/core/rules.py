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

from msgspec import Struct, msgpack, structs

from taskyard.core.limits import NUMBER_MAX, SECOND_NS, TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.core.model import Submission, Terms

    #: Whether a lane is one of those that a pattern is for.
    Matcher: TypeAlias = Callable[[bytes], object]
    #: Regimes in the order in which they are tried; None: it fits all that is left.
    RuleMatchers: TypeAlias = list[tuple["ActiveRule", Matcher | None]]

#: The name of a service's open lane, which any number of workers serve.
OPEN_LANE: Final = b""

#: What a pattern says of any text before it names none in particular.
_PLAIN: Final = re.compile(rb"[^*?\[]*")


class LaneOptions(Struct, frozen=True):
    """How lanes are run. Settings, not history: never journalled."""

    #: Workers that may serve lanes of the clause at once; 0 for no limit.
    workers_max: int = 0
    #: Workers that may serve one lane at once; 0 for no limit. The open lane has none.
    lane_workers_max: int = 1
    #: Tasks handed over beyond the one in hand, in a named lane.
    overfeed: int = 0
    #: Time from one leased task to the next, on average; 0 for no limit.
    rate_interval_ns: int = 0
    retry_delays_ns: tuple[int, ...] = ()
    jitter_percent: int = 0
    #: What the steps of a schedule are multiples of; a task that is put back alone waits for it.
    interval_ns: int = SECOND_NS
    #: Age at which a task ends that was tried, and tried or not, if it sets none; 0 for never.
    expiry_ns: int = 0
    expiry_hard_ns: int = 0
    #: Age at which a task that has not ended is reported as late; 0 for never.
    report_after_ns: int = 0
    #: Ready tasks of a lane go in no particular order, else by age.
    is_random: bool = False
    #: Its lanes lease nothing until somebody asks for them.
    is_held: bool = False
    #: A lane that gets work begins this long after the first of it.
    debounce_ns: int = 0
    # For worker hosts and clients, handed on and never looked at; 0 and empty where not set.
    #: What starts an agent, in one line.
    command: bytes = b""
    idle_ns_max: int = 0
    hunger_ns_max: int = 0
    #: The lane of tasks that name none, made from their fields.
    lane_template: bytes = b""


class Rule(Struct, frozen=True):
    """Rules for lanes: for those that `match` fits, as `service/lane`, and no clause before it.
    The open lane of a service has an empty name."""

    name: bytes
    #: `*` stands for anything, also `/`.
    match: bytes = b"*"
    options: LaneOptions = LaneOptions()


#: Options of lanes that no rule matches, where the settings have no defaults.
NO_OPTIONS: Final = LaneOptions()


class ActiveRule(Struct, eq=False):
    """A clause at work."""

    rule: Rule
    options: LaneOptions
    #: Tasks of one named lane that may be out at once.
    lane_tasks_max: int
    #: Its lanes wait for nothing but workers and their own limits: no rate, no limit of all of
    #: them, no order but age.
    is_simple: bool
    #: Pairs of a lane and a worker that serves it; kept while there are limits of workers.
    lane_worker_pairs: int = 0
    #: When the rate allows the next lease.
    rate_next_ns: int = 0


class RuleTable:
    """All clauses, in the order in which they are tried, and what is for the rest."""

    def __init__(
        self, rules: Sequence[Rule] = (), defaults: LaneOptions = NO_OPTIONS, workers_max: int = 0
    ) -> None:
        self._all = [_activate(rule) for rule in rules]
        self._all.append(_activate(Rule(b"", b"*", defaults)))
        self._globs = [compile_glob(active_rule.rule.match) for active_rule in self._all]
        each = [active_rule.options for active_rule in self._all]
        #: Some regime has a rate; the broker or some regime has a limit of workers.
        self.has_rates = any(one.rate_interval_ns for one in each)
        self.has_worker_limits = bool(workers_max) or any(one.workers_max for one in each)
        #: Lanes of some regime gather tasks before they begin.
        self.has_debounce = any(one.debounce_ns for one in each)
        #: Some regime sets ages that tasks may not reach, or are reported at.
        self.has_expiry = any(
            one.expiry_ns or one.expiry_hard_ns or one.report_after_ns for one in each
        )
        #: Another number when the rules are others.
        self.version = crc32(msgpack.encode((tuple(rules), defaults, workers_max)))

    def __iter__(self) -> Iterator[ActiveRule]:
        return iter(self._all)

    def for_service(self, name: bytes) -> RuleMatchers:
        """The rule_table that a lane of a service may have; the first that fits holds."""
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
        """A rate that is used up stays used up, but for no longer than its interval says now."""
        used_ns = {active_rule.rule.name: active_rule.rate_next_ns for active_rule in former}
        for active_rule in self._all:
            soonest_ns = now_ns + active_rule.options.rate_interval_ns
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
    options = rule.options
    special = options.workers_max or options.rate_interval_ns or options.debounce_ns
    return ActiveRule(
        rule,
        options,
        lane_tasks_max=options.lane_workers_max * (1 + options.overfeed) or TASKS_MAX,
        is_simple=not (special or options.is_random or options.is_held),
    )


def compile_glob(pattern: bytes) -> Matcher:
    """Whether a text is one that a pattern is for; upper and lower case differ."""
    return re.compile(translate(pattern.decode("latin-1")).encode("latin-1")).match


def may_match(pattern: bytes, start: bytes) -> bool:
    """Some text that begins so may fit a pattern; False: none does."""
    plain = _PLAIN.match(pattern)
    known = b"" if plain is None else plain[0]
    return known.startswith(start) or start.startswith(known)


def with_expiry(rule_table: RuleTable, submission: Submission, at_ns: int) -> Submission:
    """The submission, with the ages that the rules of each task's lane set."""
    terms: list[Terms] = []
    places: dict[tuple[int, int], int] = {}
    terms_at = []
    for place, active_rule in _rules_of_tasks(rule_table, submission):
        key = (place, id(active_rule))
        if key not in places:
            places[key] = len(terms)
            terms.append(_with_defaults(submission.terms[place], active_rule.options, at_ns))
        terms_at.append(places[key])
    alike = len(terms) == 1
    return structs.replace(submission, terms=terms, terms_at=None if alike else terms_at)


def _rules_of_tasks(rule_table: RuleTable, submission: Submission) -> list[tuple[int, ActiveRule]]:
    """Of each task which terms it has, and which regime its lane."""
    count = len(submission.names)
    services = [terms.service for terms in submission.terms]
    choices = [rule_table.for_service(name) for name in services]
    places = submission.terms_at or [0] * count
    lanes = submission.lanes or [OPEN_LANE] * count
    return [
        (place, first_match(choices[place], services[place], lane))
        for place, lane in zip(places, lanes, strict=True)
    ]


def _with_defaults(terms: Terms, options: LaneOptions, at_ns: int) -> Terms:
    """Terms with what they leave to the rules. An age is counted from when the task is due."""
    since_ns = max(at_ns, terms.due_ns)

    def after_ns(age_ns: int) -> int:
        return min(since_ns + age_ns, NUMBER_MAX) if age_ns else 0

    return structs.replace(
        terms,
        expires_ns=terms.expires_ns or after_ns(options.expiry_ns),
        expires_hard_ns=terms.expires_hard_ns or after_ns(options.expiry_hard_ns),
        report_ns=after_ns(options.report_after_ns),
    )
