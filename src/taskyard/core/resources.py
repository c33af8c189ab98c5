"""Named resources of tasks and workers, beside slots: amounts, room and words for them.

Amounts are integers, so that fractions add up exactly: bytes of `memory`, and ten-thousandths of
everything else. The names mean nothing to the scheduler. A worker without a resource has 0 of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Names and amounts, sorted by name. Each amount is positive.
Resources: TypeAlias = tuple[tuple[bytes, int], ...]

#: A unit of a resource that is not memory.
UNIT: Final = 10_000

#: The resource whose amount is a number of bytes.
MEMORY: Final = b"memory"

#: Usual resources, whose names are plurals.
CPUS: Final = b"cpus"
GPUS: Final = b"gpus"

#: Resources of one task or worker. Each is compared at every choice of a task.
RESOURCES_MAX: Final = 32

_GIBIBYTE: Final = 1 << 30
_BINARY_UNITS: Final = ((1 << 40, "TiB"), (_GIBIBYTE, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Room:
    """Free slots and resources of a worker. `take` counts them down while tasks are chosen."""

    __slots__ = ("resources", "slots", "slots_widest")

    def __init__(self, slots: int, slots_widest: int, resources: dict[bytes, int]) -> None:
        self.slots = slots
        #: The most slots that one task may take.
        self.slots_widest = slots_widest
        self.resources = resources

    def fits(self, slots: int, resources: Resources) -> bool:
        """Return whether there are this many slots and these resources."""
        if slots > self.slots or slots > self.slots_widest:
            return False
        return fits(resources, self.resources)

    def take(self, slots: int, resources: Resources) -> None:
        """Count down what a task takes."""
        self.slots -= slots
        for name, amount in resources:
            self.resources[name] = self.resources.get(name, 0) - amount


def fits(resources: Resources, free: Mapping[bytes, int]) -> bool:
    """Return whether all these resources are free."""
    for name, amount in resources:  # noqa: SIM110 - called for every task that is passed over
        if free.get(name, 0) < amount:
            return False
    return True


def lacking(resources: Resources, free: Mapping[bytes, int]) -> Resources:
    """Return the resources of which less is free than needed."""
    return tuple([(name, amount) for name, amount in resources if free.get(name, 0) < amount])


def common_minimum(first: Resources, second: Resources) -> Resources:
    """Return the resources that both have, each in its smaller amount."""
    amounts = dict(second)
    return tuple([(name, min(amount, amounts[name])) for name, amount in first if name in amounts])


def free_beside(reserved: Resources, free: Mapping[bytes, int]) -> dict[bytes, int]:
    """Return what other tasks may take while a worker is kept for a task with these resources.

    Nothing of a resource that the task still lacks, and of the others all that it does not need.
    """
    left = dict(free)
    for name, amount in reserved:
        left[name] = max(0, free.get(name, 0) - amount)
    return left


def is_valid(resources: Resources, amount_max: int, name_bytes_max: int) -> bool:
    """Return whether resources are within the limits, sorted, and named once each."""
    names = [name for name, _ in resources]
    return (
        len(names) <= RESOURCES_MAX
        and names == sorted(dict.fromkeys(names))
        and all(0 < len(name) <= name_bytes_max for name in names)
        and all(0 < amount <= amount_max for _, amount in resources)
    )


def format_resource(name: bytes, amount: int) -> str:
    """Format an amount with its name: `2 gpus`, `1 gpu`, `4 GiB of memory`."""
    text = format_amount(name, amount)
    if name == MEMORY:
        return f"{text} of memory"
    noun = name.decode(errors="backslashreplace")
    return f"{text} {noun[:-1] if amount == UNIT and name in (CPUS, GPUS) else noun}"


def format_amount(name: bytes, amount: int) -> str:
    """Format an amount of a resource: `0.5`, or for memory `1.5 GiB`."""
    if name == MEMORY:
        return format_bytes(amount)
    return format(amount / UNIT, ".4f").rstrip("0").rstrip(".")


def format_bytes(count: int, *, up: bool = False) -> str:
    """Format a number of bytes with a binary unit: `4 GiB`, `1.5 GiB`, `512 MiB`.

    Rounds to a tenth, with `up` to the next higher one.
    """
    for unit, word in _BINARY_UNITS:
        if count >= unit:
            tenths = -(-10 * count // unit) if up else round(10 * count / unit)
            return f"{tenths / 10:.1f}".removesuffix(".0") + f" {word}"
    return f"{count} bytes"


def format_resources(resources: Iterable[tuple[bytes, int]]) -> str:
    """Format several resources: `2 gpus and 4 GiB of memory`."""
    words = [format_resource(name, amount) for name, amount in resources]
    return " and ".join([*filter(None, [", ".join(words[:-1])]), *words[-1:]])
