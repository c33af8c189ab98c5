"""Options that describe workers: their slots, their resources and what they offer.

Amounts that are not given are settings, or detected. `worker` has bare words, as in --cpus.
Commands that start local workers have --worker-cpus: their bare words are of tasks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from taskyard.cli.options import CliContext, SettingOption, setting_option
from taskyard.errors import UserError
from taskyard.process.machine import Machine, this_machine, usable_cores
from taskyard.settings.keys import PROCESSES_MAX, SLOTS_MAX
from taskyard.settings.kinds import GPUS_MAX
from taskyard.settings.values import (
    OTHER_RESOURCES_MAX,
    InvalidValue,
    read_amount,
    read_resources,
    read_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskyard.cli.options import CommandFunction
    from taskyard.settings.loader import Settings


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
        return _gpu_ids(int(text)) or ()


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


class WorkerResource(SettingOption):
    """An option for a resource of workers. Its default is a setting of the section `worker`."""


def _setting_callback(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that takes the setting if the option is not given."""

    def choose(context: click.Context, option: click.Parameter, given: object) -> object:
        if context.resilient_parsing or _is_given(context, option):
            return given
        value = context.ensure_object(CliContext).settings().value(f"worker.{key}")
        return _gpu_ids(value) if key == "gpus" else value

    return choose


def _is_given(context: click.Context, option: click.Parameter) -> bool:
    return context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE


def _gpu_ids(value: int | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the ids of a number of GPUs: those of the machine, if it has so many."""
    if not isinstance(value, int):
        return value
    found = this_machine().gpus
    return found[:value] if value <= len(found) else tuple(map(str, range(value)))


def worker_resource_options(command: CommandFunction) -> CommandFunction:
    """Add the options for the resources of local workers, such as --worker-cpus."""
    return resource_options(command, "worker-")


def resource_options(command: CommandFunction, prefix: str = "") -> CommandFunction:
    """Add the options for the resources of workers: cpus, memory, gpus and resources."""
    kinds = {
        "resource": (_NamedAmount(), "Another resource of workers, as in license=2. Repeatable."),
        "gpus": (_Gpus(), "GPUs of workers: their number, or their ids, as in 0,3."),
        "memory": (
            _Amount("SIZE", read_size),
            "Memory of workers for tasks that ask for some, as in 8G.",
        ),
        "cpus": (_Amount("N", read_amount), "Cores of workers for tasks that ask for some."),
    }
    for flag, (kind, text) in kinds.items():
        is_other = flag == "resource"
        key = "resources" if is_other else flag
        more: dict[str, Any] = {"multiple": True} if is_other else {"show_default": "detected"}
        command = click.option(
            f"--{prefix}{flag}",
            f"{prefix}{key}".replace("-", "_"),
            cls=WorkerResource,
            envvar=f"TASKYARD_WORKER_{key.upper()}",
            callback=_setting_callback(key),
            type=kind,
            help=text,
            **more,
        )(command)
    return command


def given_resource_options() -> list[str]:
    """Return the options for resources of workers on the command line of this command."""
    context = click.get_current_context()
    return [
        option.opts[0]
        for option in context.command.params
        if isinstance(option, WorkerResource) and _is_given(context, option)
    ]


def local_machine(values: Mapping[str, Any]) -> Machine | None:
    """Return the resources of local workers from `worker_resource_options`. None: detected."""
    keys = ("cpus", "memory", "gpus", "resources")
    cpus, memory, gpus, resources = (values[f"worker_{key}"] for key in keys)
    return machine_if_set(cpus, memory, gpus, resources)


def machine_if_set(
    cpus: int | None,
    memory: int | None,
    gpus: tuple[str, ...] | None,
    resources: tuple[tuple[bytes, int], ...],
) -> Machine | None:
    """Return the resources of workers, or None if all are detected."""
    if not resources and (cpus, memory, gpus) == (None, None, None):
        return None
    return machine_of(cpus, memory, gpus, resources)


def machine_of(
    cpus: int | None,
    memory: int | None,
    gpus: tuple[str, ...] | None,
    resources: tuple[tuple[bytes, int], ...],
) -> Machine:
    """Return the resources of workers: those of the options, and the others detected."""
    found, others = this_machine(), dict(resources)
    if len(others) > OTHER_RESOURCES_MAX:
        raise UserError(
            f"--worker-resource: at most {OTHER_RESOURCES_MAX} names, not {len(others)}"
        )
    return Machine(
        found.cpus if cpus is None else cpus,
        found.memory if memory is None else memory,
        found.gpus if gpus is None else gpus,
        tuple(sorted((name, amount) for name, amount in others.items() if amount)),
    )


# What workers offer, and how much at once.

#: For commands that start workers.
allow_option = setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module. Repeatable.",
)

allow_pickle_option = click.option(
    "--allow-pickle",
    is_flag=True,
    help="Offer the service pickle, which calls any pickled function.",
)


_DIGITS: Final = re.compile(r"\d{1,9}", re.ASCII)


class SlotCount(click.ParamType[int]):
    """A number of slots, or a share of the cores: `4`, `50%`."""

    name = "N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value).strip()
        number = text.removesuffix("%")
        slots = int(number) if _DIGITS.fullmatch(number) else 0
        if slots and number != text:
            slots = max(1, usable_cores() * slots // 100)
        if not 1 <= slots <= SLOTS_MAX:
            self.fail(
                f"expected a number from 1 to {SLOTS_MAX}, or a share of the cores such as 50%, "
                f"not {text!r}",
                param,
                ctx,
            )
        return slots


#: For commands that start workers. The setting `worker.slots` is for each worker.
jobs_option = click.option(
    "-j",
    "-P",
    "--jobs",
    type=SlotCount(),
    metavar="N",
    show_default="one per core",
    help="Tasks to run at once, by all workers: a number, or a share of the cores, as in 50%.",
)


def jobs_of_workers(settings: Settings, jobs: int | None, workers: int) -> int:
    """Return the slots of all workers. Raises `UserError` if there are fewer than workers."""
    if jobs is not None and jobs < workers:
        raise UserError(f"-j {jobs}: fewer slots than workers (--workers {workers})")
    if jobs is None and settings.worker.slots is not None:
        return settings.worker.slots * workers
    return jobs or max(usable_cores(), workers)


def service_options(command: CommandFunction) -> CommandFunction:
    """Add the options of local workers."""
    workers = setting_option(
        "worker.processes",
        "--workers",
        type=click.IntRange(1, PROCESSES_MAX),
        metavar="N",
        show_default="1",
        help="Worker processes, unless a broker is running.",
    )
    for option in (
        allow_pickle_option,
        allow_option,
        worker_resource_options,
        workers,
        jobs_option,
    ):
        command = option(command)
    return command
