"""The broker's rules as agents need them: which command serves a lane, and with which limits.

The first rule that matches a task's service and lane applies. If it names a command, agents of that
command take the task. Otherwise the runner runs it by its payload. Knows no processes.
"""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, structs

from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions, compile_glob
from taskyard.settings.values import LANE, PLACEHOLDER, SERVICE, placeholders
from taskyard.wire.hungry import HUNGRY_LINES
from taskyard.worker.jobs import AGENT_HUNGER_NS_MAX, AGENT_IDLE_NS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.rules import Rule
    from taskyard.worker.jobs import Job

LaneKey: TypeAlias = tuple[bytes, bytes]

_LITERALS: Final = {"{{": "{", "}}": "}"}

#: Lanes in the cache. They come and go, and a new lookup is cheap.
LANES_CACHE_SIZE: Final = 10_000


class AgentSettings(Struct, frozen=True):
    """An agent's command and limits."""

    argv: tuple[str, ...]
    #: The command before its placeholders were filled in. Empty: it has none.
    template: tuple[str, ...] = ()
    #: Tasks that an agent may hold beyond the current task.
    overfeed: int = 0
    #: An idle agent exits after this time.
    idle_ns_max: int = AGENT_IDLE_NS_MAX
    #: An agent that holds a task and sends nothing is ended after this time.
    hunger_ns_max: int = AGENT_HUNGER_NS_MAX
    #: The delay of a task that an agent passed over.
    interval_ns: int = SECOND_NS
    #: The name of its lines. Empty: the rule names them.
    lines: str = HUNGRY_LINES

    @property
    def pool(self) -> tuple[str, ...]:
        """The lines and words. If these are equal, agents can take each other's tasks."""
        return (self.lines, *self.argv)

    @property
    def command(self) -> tuple[str, ...]:
        """The command as in the rules."""
        return self.template or self.argv

    def for_lane(self, lane: LaneKey) -> AgentSettings:
        """Return the settings with the placeholders of the command filled in."""
        service, name = (part.decode(errors="surrogateescape") for part in lane)
        argv = fill_command(self.argv, service, name)
        return self if argv is self.argv else structs.replace(self, argv=argv, template=self.argv)


class AgentRules:
    """The rules of the broker. `program` replaces every command that they name."""

    def __init__(self, clauses: Sequence[Rule] = (), program: AgentSettings | None = None) -> None:
        self._clauses = tuple(clauses)
        self._globs = [(compile_glob(clause.match), clause.options) for clause in self._clauses]
        self._program = program
        self._cached = lru_cache(LANES_CACHE_SIZE)(self._compute)
        rules = [clause.options for clause in self._clauses]
        #: The highest overfeed of any rule.
        self.overfeed_max = max((one.overfeed for one in rules), default=0)
        #: The commands in use. Agents of other commands can exit.
        self.commands = tuple(
            dict.fromkeys(split_command(one.command) for one in rules if one.command)
        )
        if program is not None:
            self.commands = (program.argv,)
        #: Some agents serve one lane or one service only.
        self.has_places = any(map(has_places, self.commands))

    def updated(self, clauses: Sequence[Rule]) -> AgentRules | None:
        """Return new rules, or None if nothing has changed."""
        return None if tuple(clauses) == self._clauses else AgentRules(clauses, self._program)

    def agents_for(self, lane: LaneKey) -> AgentSettings | None:
        """Return the settings of the agents that serve a lane; None: no agent does."""
        return self._cached(lane)[1]

    def rules_for(self, lane: LaneKey) -> LaneOptions:
        return self._cached(lane)[0]

    def _compute(self, lane: LaneKey) -> tuple[LaneOptions, AgentSettings | None]:
        name = b"/".join(lane)
        rules = next((rules for fits, rules in self._globs if fits(name)), LaneOptions())
        return rules, self._settings(rules, lane)

    def _settings(self, rules: LaneOptions, lane: LaneKey) -> AgentSettings | None:
        """Return the settings of a rule's agents for a lane; None: it has none."""
        if self._program is None and not rules.command:
            return None
        settings = self._program or AgentSettings(split_command(rules.command), lines="")
        return structs.replace(
            settings.for_lane(lane),
            overfeed=rules.overfeed or settings.overfeed,
            idle_ns_max=rules.idle_ns_max or settings.idle_ns_max,
            hunger_ns_max=rules.hunger_ns_max or settings.hunger_ns_max,
            interval_ns=rules.interval_ns,
            lines=settings.lines or rules.lines.decode() or HUNGRY_LINES,
        )


def has_places(words: Sequence[str]) -> bool:
    """Return whether a command differs from lane to lane, or from service to service."""
    return any(one not in _LITERALS for word in words for one in placeholders(word))


def fill_command(words: tuple[str, ...], service: str, lane: str) -> tuple[str, ...]:
    """Return a command for one lane. Other braces stay as they are."""
    if not any(map(placeholders, words)):
        return words
    values = {**_LITERALS, LANE: lane, SERVICE: service}
    return tuple(PLACEHOLDER.sub(lambda found: values[found[0]], word) for word in words)


def split_command(command: bytes) -> tuple[str, ...]:
    """Split a command into words. A malformed one stays one word, and fails to start."""
    text = command.decode(errors="surrogateescape")
    try:
        return tuple(shlex.split(text)) or (text,)
    except ValueError:
        return (text,)


def lane_of(job: Job) -> LaneKey:
    return (job.service, job.lane)
