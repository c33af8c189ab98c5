"""Options for the resources of workers, of commands that start some.

Amounts that are not given are detected. The options of tasks are in `task_options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.errors import UserError
from taskyard.process.machine import Machine, this_machine
from taskyard.settings.values import (
    OTHER_RESOURCES_MAX,
    InvalidValue,
    read_amount,
    read_memory,
    read_resources,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.cli.options import CommandFunction

#: More GPUs than one machine has.
GPUS_MAX: Final = 10_000


class _Amount(click.ParamType[int]):
    """An amount of a resource, as a task's key of that name takes it."""

    def __init__(self, name: str, read: Callable[[object], int]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            return self._read(value)
        except InvalidValue as bad:
            self.fail(str(bad), param, ctx)


class _Gpus(click.ParamType[tuple[str, ...]]):
    """A number of GPUs, or ids with a comma between or after them."""

    name = "N|IDS"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        text = str(value)
        if "," in text:
            ids = [one.strip() for one in text.split(",") if one.strip()]
            if len(dict.fromkeys(ids)) < len(ids):
                self.fail("names an id twice", param, ctx)
            return tuple(ids)
        if not text.isdecimal() or int(text) > GPUS_MAX:
            limits = f"a number from 0 to {GPUS_MAX}, or ids such as 0,3"
            self.fail(f"must be {limits}, not {text!r}", param, ctx)
        found = this_machine().gpus
        return found[: int(text)] if int(text) <= len(found) else tuple(map(str, range(int(text))))


class _NamedAmount(click.ParamType[tuple[bytes, int]]):
    """A pair `NAME=N`."""

    name = "NAME=N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[bytes, int]:
        name, _, amount = str(value).partition("=")
        try:
            ((key, number),) = read_resources({name: amount}) or [(name.encode(), 0)]
        except InvalidValue as bad:
            self.fail(str(bad), param, ctx)
        return key, number


def resource_options(command: CommandFunction) -> CommandFunction:
    """Add the options for the resources of workers: cpus, memory, gpus and resources."""
    detected: dict[str, Any] = {"show_default": "detected"}
    kinds = {
        "--resource": (_NamedAmount(), "Another resource, as in license=2. Repeatable."),
        "--gpus": (_Gpus(), "Number of GPUs, or their ids, as in 0,3."),
        "--memory": (_Amount("SIZE", read_memory), "Memory for tasks that ask for some, as in 8G."),
        "--cpus": (_Amount("N", read_amount), "Cores for tasks that ask for some."),
    }
    for flag, (kind, text) in kinds.items():
        is_other = flag == "--resource"
        names = (flag, "resources") if is_other else (flag,)
        more: dict[str, Any] = {"multiple": True} if is_other else detected
        command = click.option(*names, type=kind, help=text, **more)(command)
    return command


def machine_of(
    cpus: int | None,
    memory: int | None,
    gpus: tuple[str, ...] | None,
    resources: tuple[tuple[bytes, int], ...],
) -> Machine:
    """Return the resources of workers: those of the options, and the others detected."""
    found, others = this_machine(), dict(resources)
    if len(others) > OTHER_RESOURCES_MAX:
        raise UserError(f"--resource: at most {OTHER_RESOURCES_MAX} names, not {len(others)}")
    return Machine(
        found.cpus if cpus is None else cpus,
        found.memory if memory is None else memory,
        found.gpus if gpus is None else gpus,
        tuple(sorted((name, amount) for name, amount in others.items() if amount)),
    )
