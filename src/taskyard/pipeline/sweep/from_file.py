"""A workload from a campaign's file: what it says of run times, nobody has measured.

A task's time is what the file says it took (WfCommons), what it sleeps, its time limit, or what
the user says of all others; one that says nothing is an error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from taskyard.campaign.formats import FileOptions, Format, format_of
from taskyard.campaign.lines import open_input
from taskyard.campaign.reader import read_campaign
from taskyard.campaign.task_spec import service_of
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError
from taskyard.pipeline.sweep.workload import TaskKind, Workload

if TYPE_CHECKING:
    from taskyard.campaign.task_spec import TaskSpec


def workload_of_file(path: str, run_ns: int | None) -> Workload:
    """The campaign in a file; `run_ns` for tasks that say nothing of their time."""
    loaded = read_campaign(path, FileOptions(replay=_is_wfcommons(path)))
    if loaded.rejected:
        raise UserError(f"{loaded.rejected[0]}; mend it first: `taskyard load --dry-run {path}`")
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
    """WfCommons says how long tasks took, which a replay sleeps."""
    with open_input(path) as stream:
        return format_of(path, stream) is Format.WFCOMMONS


def _run_ns(spec: TaskSpec, otherwise_ns: int | None, path: str) -> int:
    slept_ns = _sleep_command_ns(spec.argv)
    if slept_ns is not None:
        return slept_ns
    if otherwise_ns is None and not spec.time_limit_ns:
        raise UserError(
            f"{path}: task {spec.name!r} does not say how long it runs; give --run-time, such as "
            "--run-time 30s, for all that do not, or a time_limit in the file"
        )
    return otherwise_ns if otherwise_ns is not None else spec.time_limit_ns


def _sleep_command_ns(argv: list[str] | None) -> int | None:
    """How long a command sleeps; None if it is another."""
    if argv is None or len(argv) != 2 or argv[0].rpartition("/")[2] != "sleep":  # noqa: PLR2004
        return None
    try:
        seconds = float(argv[1])
    except ValueError:
        return None
    return int(seconds * SECOND_NS) if math.isfinite(seconds) and seconds >= 0 else None
