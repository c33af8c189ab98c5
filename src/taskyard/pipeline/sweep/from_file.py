"""A workload from a campaign file, with run times that were not measured.

A task's run time is the one recorded in the file (WfCommons), the duration of its sleep, its time
limit, or the user's default. A task without any of these is an error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from taskyard.campaign.formats import FileOptions, Format, choose_format
from taskyard.campaign.lines import open_input
from taskyard.campaign.reader import read_campaign
from taskyard.campaign.task_spec import service_of
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.pipeline.sweep.workload import TaskKind, Workload

if TYPE_CHECKING:
    from taskyard.campaign.task_spec import TaskSpec


def workload_of_file(path: str, run_ns: int | None) -> Workload:
    """Build the workload of a campaign file. `run_ns` is for tasks without a run time."""
    loaded = read_campaign(path, FileOptions(replay=_is_wfcommons(path)))
    if loaded.rejected:
        raise UserError(f"{loaded.rejected[0]} (see `taskyard load --dry-run {path}`)")
    specs = loaded.specs
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    kinds: dict[TaskKind, int] = {}
    places = [
        kinds.setdefault(
            TaskKind(service_of(spec).encode(), priority=spec.priority, slots=spec.slots),
            len(kinds),
        )
        for spec in specs
    ]
    workload = Workload(
        names=[spec.name.encode() for spec in specs],
        run_ns=[_run_ns(spec, run_ns, path) for spec in specs],
        kinds=list(kinds) or [TaskKind()],
        kind_at=places,
    )
    if any(spec.lane for spec in specs):
        workload.lanes = [spec.lane.encode() for spec in specs]
    if any(spec.after for spec in specs):
        workload.after = [
            [numbers[name] for name in spec.after if name in numbers] for spec in specs
        ]
    return workload


def _is_wfcommons(path: str) -> bool:
    """Return whether a file is in the WfCommons format, whose run times a replay sleeps."""
    with open_input(path) as stream:
        choice, _ = choose_format(path, stream)
        return choice.format is Format.WFCOMMONS


def _run_ns(spec: TaskSpec, otherwise_ns: int | None, path: str) -> int:
    slept_ns = _sleep_command_ns(spec.argv)
    if slept_ns is not None:
        return slept_ns
    if otherwise_ns is None and not spec.time_limit_ns:
        raise UserError(
            f"{path}: task {spec.name!r} has no run time (use --run-time, such as --run-time 30s, "
            "or set time_limit in the file)"
        )
    return otherwise_ns if otherwise_ns is not None else spec.time_limit_ns


def _sleep_command_ns(argv: list[str] | None) -> int | None:
    """Return how long a command sleeps, or None if it is another command."""
    if argv is None or len(argv) != 2 or argv[0].rpartition("/")[2] != "sleep":  # noqa: PLR2004
        return None
    try:
        seconds = float(argv[1])
    except ValueError:
        return None
    return int(seconds * SECOND_NS) if math.isfinite(seconds) and seconds >= 0 else None
