"""The grid of a sweep: numbers of workers, numbers of slots, and rules.

Parses the user's options. A point is one combination, and its result is a `Forecast`.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Final, cast

from msgspec import Struct, structs

from taskyard.core.events import RulesSet
from taskyard.core.rules import LaneOptions
from taskyard.errors import UserError
from taskyard.pipeline.sweep.workload import SettingsRules
from taskyard.settings.keys import RATE
from taskyard.settings.values import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Limit of the points in a sweep. Each simulates the whole campaign.
POINTS_MAX: Final = 100_000

#: Limit of workers and slots: more than any installation has, few enough to name each worker.
NUMBER_MAX: Final = 1_000_000


class Point(Struct, frozen=True):
    """One combination of workers, slots per worker, and rules."""

    workers: int
    slots: int
    #: Changes to the default rules, as `name=value`, in the given order.
    policy: tuple[str, ...] = ()

    @property
    def slots_total(self) -> int:
        return self.workers * self.slots

    def rules(self) -> tuple[LaneOptions, int]:
        """Return the rules of every service, and the limit of workers over all services."""
        made = self.rules_set(None)
        return made.defaults, made.workers_max

    def rules_set(self, base: SettingsRules | None) -> RulesSet:
        """Return the event that sets the rules: those of the settings with this point's changes.

        A change applies to every section of the settings.
        """
        base = SettingsRules() if base is None else base
        changes: dict[str, object] = {}
        for pair in self.policy:
            name, _, text = pair.partition("=")
            changes |= POLICIES[name](text)
        workers_max = changes.pop("broker_workers_max", base.workers_max)
        rules = [
            structs.replace(rule, options=structs.replace(rule.options, **changes))
            for rule in base.rules
        ]
        defaults = structs.replace(base.defaults, **changes)
        return RulesSet(0, tuple(rules), defaults, cast("int", workers_max))


class Forecast(Struct, frozen=True):
    """The simulated result of one point, in simulated time."""

    makespan_ns: int
    #: Total time that slots were in use.
    busy_ns: int
    #: Share of the slot time in use, from 0 to 1.
    utilisation: float
    wait_ns_mean: int
    wait_ns_p50: int
    wait_ns_p95: int
    wait_ns_max: int
    done: int
    failed: int
    #: Never run: blocked by a failure, or in need of more slots than any worker has.
    unfinished: int
    #: CPU time of the simulation, in real time.
    cpu_ns: int


def _number(field: str) -> Callable[[str], dict[str, object]]:
    def read(text: str) -> dict[str, object]:
        if not re.fullmatch(r"\d{1,7}", text):
            raise UserError(f"--policy {field}={text}: not a whole number of at most 7 digits")
        return {field: int(text)}

    return read


def _rate(field: str) -> Callable[[str], dict[str, object]]:
    def read(text: str) -> dict[str, object]:
        try:
            return {f"{field}_interval_ns": RATE.read(text).interval_ns}
        except InvalidValue as error:
            raise UserError(f"--policy {field}={text}: {error}") from None

    return read


def _order(text: str) -> dict[str, object]:
    if text not in ("age", "random"):
        raise UserError(f"--policy order={text}: not age or random")
    return {"is_random": text == "random"} if "is_random" in LaneOptions.__struct_fields__ else {}


#: The rules that can be varied, with the function that parses the value.
POLICIES: Final[dict[str, Callable[[str], dict[str, object]]]] = {
    "lane_workers_max": _number("lane_workers_max"),
    "workers_max": _number("workers_max"),
    "broker_workers_max": _number("broker_workers_max"),
    "overfeed": _number("overfeed"),
    "rate": _rate("rate"),
    "lane_rate": _rate("lane_rate"),
    "order": _order,
}


def read_numbers(text: str, option: str) -> list[int]:
    """Parse a list of numbers such as `1,2,4,…,1024`.

    The omission (… or ...) continues the two numbers before it, by factor or by step.
    """
    numbers: list[int] = []
    cells = [cell.strip() for cell in text.replace("...", "…").split(",")]
    for place, cell in enumerate(cells):
        if cell == "…":
            following = cells[place + 1] if place + 1 < len(cells) else ""
            numbers += _between(numbers, _read(following, text, option), text, option)
        else:
            numbers.append(_read(cell, text, option))
    return list(dict.fromkeys(numbers))


def _read(cell: str, text: str, option: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", cell) or int(cell) > NUMBER_MAX:
        raise UserError(
            f"{option} {text}: {cell!r} is not a number from 1 to {NUMBER_MAX} (example: "
            "1,2,4,…,64)"
        )
    return int(cell)


def _between(numbers: list[int], last: int, text: str, option: str) -> list[int]:
    if len(numbers) < 2 or not numbers[-2] < numbers[-1] <= last:  # noqa: PLR2004  # two make a step
        raise UserError(
            f"{option} {text}: … needs two increasing numbers before it and one after it"
        )
    before, number = numbers[-2:]
    by_factor = number % before == 0 and number // before > 1 and _is_power(numbers)
    factor, step = (number // before, 0) if by_factor else (1, number - before)
    more: list[int] = []
    while (number := number * factor + step) < last:
        more.append(number)
        if len(more) > POINTS_MAX:
            raise UserError(f"{option} {text}: more than {POINTS_MAX} numbers")
    return more


def _is_power(numbers: list[int]) -> bool:
    """Return whether numbers continue by factor: 1,2 and 1,2,4 do, 1,2,3 and 10,20 do not."""
    tail = numbers[-3:]
    if len(tail) < 3:  # noqa: PLR2004
        return tail[0] == 1
    return tail[2] * tail[0] == tail[1] ** 2


def read_policies(pairs: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every combination of `name=value,value` pairs."""
    axes: list[list[str]] = []
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if name not in POLICIES or not equals:
            names = ", ".join(POLICIES)
            raise UserError(f"--policy {pair}: not NAME=VALUE (the names are {names})")
        texts = [value.strip() for value in values.split(",")]
        for text in texts:
            POLICIES[name](text)
        axes.append([f"{name}={text}" for text in texts])
    return list(product(*axes))


def grid(workers: Sequence[int], slots: Sequence[int], policies: Sequence[str]) -> list[Point]:
    """Return every combination, the fewest slots first."""
    points = [
        Point(count, room, policy)
        for policy, room, count in product(read_policies(policies), slots, workers)
    ]
    if len(points) > POINTS_MAX:
        raise UserError(f"{len(points)} points, the limit is {POINTS_MAX}")
    return points
