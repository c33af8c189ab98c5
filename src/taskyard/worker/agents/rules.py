"""How tasks are done by the broker's rules: which program is fed with a lane, and how.

The first clause that matches a task's service and lane counts. One that names a command has its
tasks fed to agents of that command; the others are done as they say themselves. Knows nothing of
processes, nor of who does a task.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, structs

from taskyard.core.rules import LaneOptions, compile_glob
from taskyard.worker.limits import AGENT_HUNGER_NS_MAX, AGENT_IDLE_NS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.rules import Rule
#: A service, and the name of a lane of it.
LaneKey: TypeAlias = tuple[bytes, bytes]

#: Lanes whose clause is remembered: they come and go, and to look again costs little.
LANES_CACHE_SIZE: Final = 10_000


class AgentSettings(Struct, frozen=True):
    """Which program is fed, and how."""

    argv: tuple[str, ...]
    #: Tasks that an agent may hold beyond the one in hand.
    overfeed: int = 0
    #: How long an agent may have nothing to do before it is let go.
    idle_ns_max: int = AGENT_IDLE_NS_MAX
    #: How long an agent may be silent with a task before it is ended.
    hunger_ns_max: int = AGENT_HUNGER_NS_MAX


class AgentRules:
    """What the broker says. `program` is fed whatever that names as a command."""

    def __init__(self, clauses: Sequence[Rule] = (), program: AgentSettings | None = None) -> None:
        self._clauses = tuple(clauses)
        self._globs = [(compile_glob(clause.match), clause.options) for clause in self._clauses]
        self._program = program
        self._cache: dict[LaneKey, tuple[LaneOptions, AgentSettings | None]] = {}
        rules = [clause.options for clause in self._clauses]
        #: The most that any lane is overfed by.
        self.overfeed_max = max((one.overfeed for one in rules), default=0)
        #: The commands that are to be had: an agent of another one is not needed any more.
        self.commands = tuple(
            dict.fromkeys(split_command(one.command) for one in rules if one.command)
        )
        if program is not None:
            self.commands = (program.argv,)

    def updated(self, clauses: Sequence[Rule]) -> AgentRules | None:
        """What the broker says now; None: the same."""
        return None if tuple(clauses) == self._clauses else AgentRules(clauses, self._program)

    def agents_for(self, lane: LaneKey) -> AgentSettings | None:
        """The agents that are fed with the tasks of a lane; None: they are done without."""
        return self._cached(lane)[1]

    def rules_for(self, lane: LaneKey) -> LaneOptions:
        return self._cached(lane)[0]

    def _cached(self, lane: LaneKey) -> tuple[LaneOptions, AgentSettings | None]:
        found = self._cache.get(lane)
        if found is None:
            if len(self._cache) >= LANES_CACHE_SIZE:
                self._cache.clear()
            found = self._cache[lane] = self._compute(lane)
        return found

    def _compute(self, lane: LaneKey) -> tuple[LaneOptions, AgentSettings | None]:
        name = b"/".join(lane)
        rules = next((rules for fits, rules in self._globs if fits(name)), None)
        if rules is None:
            return LaneOptions(), self._program
        if self._program is not None:
            return rules, _with_rule(self._program, rules)
        if not rules.command:
            return rules, None
        return rules, _with_rule(AgentSettings(split_command(rules.command)), rules)


def _with_rule(settings: AgentSettings, rules: LaneOptions) -> AgentSettings:
    return structs.replace(
        settings,
        overfeed=rules.overfeed,
        idle_ns_max=rules.idle_ns_max or settings.idle_ns_max,
        hunger_ns_max=rules.hunger_ns_max or settings.hunger_ns_max,
    )


def split_command(command: bytes) -> tuple[str, ...]:
    """A command that is none is one word: it can't be started, and that is told."""
    text = command.decode(errors="surrogateescape")
    try:
        return tuple(shlex.split(text)) or (text,)
    except ValueError:
        return (text,)
