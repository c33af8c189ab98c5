"""The grid: which numbers of workers and slots, and which rules, are tried.

Reads what a user wrote. A point is one combination; what came out of one is a `Forecast`.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from taskyard.core.rules import LaneOptions
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Points in one sweep: each is a run of the whole campaign.
POINTS_MAX: Final = 100_000

#: Workers and slots of one point: more than any yard has, and few enough to name each worker.
NUMBER_MAX: Final = 1_000_000


class Point(Struct, frozen=True):
    """One combination: so many workers, each with so many slots, by these rules."""

    workers: int
    slots: int
    #: What differs from the usual rules: `name=value`, in the order given.
    policy: tuple[str, ...] = ()

    @property
    def slots_total(self) -> int:
        return self.workers * self.slots

    def rules(self) -> tuple[LaneOptions, int]:
        """The rules of every service, and the limit of workers at once over all of them."""
        rules, workers_max = LaneOptions(), 0
        for pair in self.policy:
            name, _, text = pair.partition("=")
            if name == "broker_workers_max":
                workers_max = int(text)
            else:
                rules = structs.replace(rules, **POLICIES[name](text))
        return rules, workers_max


class Forecast(Struct, frozen=True):
    """What came out of one point. Times are of the simulated campaign."""

    makespan_ns: int
    #: Time that slots were at work, all together.
    busy_ns: int
    #: Of all slots and the whole time, the part at work: from 0 to 1.
    utilisation: float
    wait_ns_mean: int
    wait_ns_p50: int
    wait_ns_p95: int
    wait_ns_max: int
    done: int
    failed: int
    #: Never run: behind a failure, or too wide for every worker.
    unfinished: int
    #: CPU time that the simulation took, by the real clock.
    cpu_ns: int


def _number(field: str) -> Callable[[str], dict[str, object]]:
    def read(text: str) -> dict[str, object]:
        if not re.fullmatch(r"\d{1,7}", text):
            raise UserError(f"--policy {field}={text}: must be a whole number from 0 on")
        return {field: int(text)}

    return read


def _order(text: str) -> dict[str, object]:
    if text not in ("age", "random"):
        raise UserError(f"--policy order={text}: must be age or random")
    return {"is_random": text == "random"} if "is_random" in LaneOptions.__struct_fields__ else {}


#: What of the scheduler's rules can be varied, and who reads its value.
POLICIES: Final[dict[str, Callable[[str], dict[str, object]]]] = {
    "lane_workers_max": _number("lane_workers_max"),
    "workers_max": _number("workers_max"),
    "broker_workers_max": _number("broker_workers_max"),
    "overfeed": _number("overfeed"),
    "order": _order,
}


def read_numbers(text: str, option: str) -> list[int]:
    """`1,2,4,…,1024` as numbers: what is left out (… or ...) goes on as the two before it do,
    by the same factor or the same step."""
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
            f"{option} {text}: {cell or 'nothing'} is no number from 1 to {NUMBER_MAX}; write "
            "numbers with commas between them, such as 1,2,4,…,64"
        )
    return int(cell)


def _between(numbers: list[int], last: int, text: str, option: str) -> list[int]:
    if len(numbers) < 2 or not numbers[-2] < numbers[-1] <= last:  # noqa: PLR2004  # two make a step
        raise UserError(f"{option} {text}: two rising numbers must stand before …, and one after")
    before, number = numbers[-2:]
    by_factor = number % before == 0 and number // before > 1 and _is_power(numbers)
    factor, step = (number // before, 0) if by_factor else (1, number - before)
    more: list[int] = []
    while (number := number * factor + step) < last:
        more.append(number)
        if len(more) > POINTS_MAX:
            raise UserError(f"{option} {text}: are more than {POINTS_MAX} numbers; give fewer")
    return more


def _is_power(numbers: list[int]) -> bool:
    """1,2,4 goes on by the factor; so does 1,2, but 1,2,3 does not, nor 10,20."""
    tail = numbers[-3:]
    if len(tail) < 3:  # noqa: PLR2004
        return tail[0] == 1
    return tail[2] * tail[0] == tail[1] ** 2


def read_policies(pairs: Sequence[str]) -> list[tuple[str, ...]]:
    """`name=value,value` pairs as every combination of them."""
    axes: list[list[str]] = []
    for pair in pairs:
        name, equals, values = pair.partition("=")
        if name not in POLICIES or not equals:
            known = ", ".join(POLICIES)
            raise UserError(f"--policy {pair}: write NAME=VALUE; the names are {known}")
        texts = [value.strip() for value in values.split(",")]
        for text in texts:
            POLICIES[name](text)
        axes.append([f"{name}={text}" for text in texts])
    return list(product(*axes))


def grid(workers: Sequence[int], slots: Sequence[int], policies: Sequence[str]) -> list[Point]:
    """Every combination, the fewest slots first."""
    points = [
        Point(count, room, policy)
        for policy, room, count in product(read_policies(policies), slots, workers)
    ]
    if len(points) > POINTS_MAX:
        raise UserError(f"{len(points)} points are more than {POINTS_MAX}; give fewer numbers")
    return points
