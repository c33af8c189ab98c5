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

from taskyard.core.events import Clause
from taskyard.core.limits import TASKS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.core.agenda import Branch
    from taskyard.core.events import Rules, RulesSet

    #: Whether a lane is one of those that a pattern is for.
    Fits: TypeAlias = Callable[[bytes], object]
    #: Regimes in the order in which they are tried; None: it fits all that is left.
    Choices: TypeAlias = list[tuple["Regime", Fits | None]]

#: What a pattern says of any text before it names none in particular.
_PLAIN: Final = re.compile(rb"[^*?\[]*")


class Regime(Struct, eq=False):
    """A clause at work."""

    clause: Clause
    rules: Rules
    #: Tasks of one named lane that may be out at once.
    lane_room: int
    #: Its lanes wait for nothing but workers and their own limits: no rate, no limit of all of
    #: them, no order but age.
    is_plain: bool
    #: Pairs of a lane and a worker that serves it; kept while there are limits of workers.
    serving: int = 0
    #: When the rate allows the next lease.
    rate_next_ns: int = 0
    #: Its lanes, by service.
    branches: list[Branch] = field(default_factory=list)


class Regimes:
    """All clauses, in the order in which they are tried, and what is for the rest."""

    def __init__(self, rules: RulesSet, former: Regimes | None = None) -> None:
        self._all = [_regime(clause) for clause in rules.clauses]
        self._all.append(_regime(Clause(b"", b"*", rules.defaults)))
        self._globs = [glob(regime.clause.match) for regime in self._all]
        if former is not None:
            self._keep_rates(former, rules.now_ns)
        each = [regime.rules for regime in self._all]
        #: Some regime has a rate; the broker or some regime has a limit of workers.
        self.rated = any(one.rate_interval_ns for one in each)
        self.limited = bool(rules.workers_max) or any(one.workers_max for one in each)
        #: Lanes of some regime gather tasks before they begin.
        self.gathers = any(one.debounce_ns for one in each)
        #: Some regime sets ages that tasks may not reach, or are reported at.
        self.ages = any(one.expiry_ns or one.expiry_hard_ns or one.report_after_ns for one in each)
        #: Another number when the rules are others.
        self.version = crc32(msgpack.encode((rules.clauses, rules.defaults, rules.workers_max)))

    def __iter__(self) -> Iterator[Regime]:
        return iter(self._all)

    def of_service(self, name: bytes) -> Choices:
        """The regimes that a lane of a service may have; the first that fits holds."""
        start = name + b"/"
        found: Choices = []
        for regime, fits in zip(self._all, self._globs, strict=True):
            match = regime.clause.match
            if match in (b"*", start + b"*"):
                return [*found, (regime, None)]
            if may_fit(match, start):
                found.append((regime, fits))
        return found

    def _keep_rates(self, former: Regimes, now_ns: int) -> None:
        """A rate that is used up stays used up, but for no longer than its interval says now."""
        used_ns = {regime.clause.name: regime.rate_next_ns for regime in former}
        for regime in self._all:
            soonest_ns = now_ns + regime.rules.rate_interval_ns
            regime.rate_next_ns = min(used_ns.get(regime.clause.name, 0), soonest_ns)


def first_fit(choices: Choices, service: bytes, lane: bytes) -> Regime:
    """The regime of a lane, of those that lanes of its service may have."""
    if len(choices) > 1:
        path = service + b"/" + lane
        for regime, fits in choices[:-1]:
            if fits is None or fits(path):
                return regime
    return choices[-1][0]


def _regime(clause: Clause) -> Regime:
    rules = clause.rules
    special = rules.workers_max or rules.rate_interval_ns or rules.debounce_ns
    return Regime(
        clause,
        rules,
        lane_room=rules.lane_workers_max * (1 + rules.overfeed) or TASKS_MAX,
        is_plain=not (special or rules.is_random or rules.is_held),
    )


def glob(pattern: bytes) -> Fits:
    """Whether a text is one that a pattern is for; upper and lower case differ."""
    return re.compile(translate(pattern.decode("latin-1")).encode("latin-1")).match


def may_fit(pattern: bytes, start: bytes) -> bool:
    """Some text that begins so may fit a pattern; False: none does."""
    plain = _PLAIN.match(pattern)
    known = b"" if plain is None else plain[0]
    return known.startswith(start) or start.startswith(known)
