"""A whole campaign from a file: its tasks in an order to submit, and the rejected rows.

A task is rejected if its line is bad, its name is repeated, it is in a cycle, or it depends on a
rejected task. Dependencies that are not in the file are kept: the broker may have them. The Spark
pipeline words and writes its rejected rows here too. Submits nothing.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct, field, structs

from taskyard.campaign.formats import FileOptions, FileReport, rows
from taskyard.campaign.graph import (
    Duplicate,
    Graph,
    GraphSummary,
    cycles_of,
    graph_of,
    levels_of,
    summarize_graph,
)
from taskyard.campaign.lines import STDIN, InvalidCampaign, InvalidRow, file_label
from taskyard.campaign.task_spec import InvalidTask, TaskSpec, expand_row, to_row
from taskyard.campaign.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.campaign.formats import FormatChoice
    from taskyard.campaign.shell_lines import SkippedLines


#: Bad lines after which reading stops: the format is probably wrong, and memory is limited.
REJECTED_MAX: Final = 1_000_000

#: Names of a cycle in a message. A longer cycle is cut in the middle.
CYCLE_NAMES_SHOWN: Final = 10

REJECTED_SUFFIX: Final = ".rejected.jsonl"


class RejectedRow(Struct, gc=False):
    """A rejected line."""

    file: str
    line: int
    reason: str
    #: The object of a task, or the text of a line that is not one.
    raw: object

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


# Reasons. `file` is the file of another row, if it is not the row's own.


def duplicate_text(name: str, line_first: int, file: str = "") -> str:
    """Return the reason to reject the second row of a name."""
    first = f"in {file}:{line_first}" if file else f"on line {line_first}"
    return f"duplicate name {shown(name)}, first {first}"


def rejected_dependency_text(name: str, line: int, file: str = "") -> str:
    """Return the reason to reject a row that waits for a rejected one."""
    place = f"{file}:{line}" if file else f"line {line}"
    return f"waits for {shown(name)}, which was rejected ({place})"


def unknown_dependency_text(name: str) -> str:
    """Return the reason to reject a row that waits for an unknown name."""
    return f"waits for {shown(name)}, which neither the file nor the broker has"


def cycle_text(cycle: Sequence[str], tasks: int) -> str:
    """Return the reason to reject tasks in a cycle: one cycle, and how many tasks are in it."""
    names = [*map(shown, [*cycle, cycle[0]])]
    if len(names) > CYCLE_NAMES_SHOWN:
        left_out = len(names) - CYCLE_NAMES_SHOWN
        half = CYCLE_NAMES_SHOWN // 2
        names = [*names[:half], f"… {left_out} more …", *names[-half:]]
    more = f" ({tasks} tasks wait for each other)" if tasks > len(cycle) else ""
    return f"is in a cycle{more}: {' after '.join(names)}"


def too_many_error(first: RejectedRow) -> InvalidCampaign:
    """Return the error for a file with too many bad rows. `first` is the first of them."""
    limit = f"more than {REJECTED_MAX:,} bad lines"
    return InvalidCampaign(f"{first.file}: {limit}, the first: {first} (is the format right?)")


# Files.


def write_rejected(rejected: Iterable[RejectedRow], to: Path | None = None) -> list[Path]:
    """Write rejected rows to one file, or beside each input file. Return the paths.

    A line is a JSON object. Replaces the files of an earlier run. Raises `InvalidCampaign`.
    """
    by_path: dict[Path, list[RejectedRow]] = {}
    for one in rejected:
        by_path.setdefault(to or Path(one.file + REJECTED_SUFFIX), []).append(one)
    encoder = msgspec.json.Encoder(enc_hook=repr)
    for path, some in by_path.items():
        unfinished = path.with_name(f".{path.name}.new")
        try:
            with unfinished.open("wb") as file:
                file.writelines(encoder.encode(row) + b"\n" for row in some)
            os.replace(unfinished, path)  # noqa: PTH105  # atomic, and named for it
        except OSError as wrong:
            raise InvalidCampaign(f"{path}: {wrong.strerror}") from None
    return list(by_path)


#: Keys that tasks with a payload can't have.
_OF_COMMANDS: Final = ("env", "cwd", "final_exit_status")


class LoadedCampaign(Struct):
    """A campaign that was read."""

    #: The file's name for messages.
    file: str
    #: The good tasks, dependencies first.
    specs: list[TaskSpec]
    #: The line of each.
    lines: array[int]
    #: In the order of lines.
    rejected: list[RejectedRow]
    #: Of all tasks whose line is good, including cycles and tasks behind rejected rows.
    summary: GraphSummary
    #: The format, and the skipped lines.
    choice: FormatChoice
    skipped: SkippedLines


class _CampaignReader(Struct):
    """The state of a reading."""

    file: str
    campaign: str = ""
    #: Keys of tasks that do not set them.
    defaults: dict[str, object] = {}
    specs: list[TaskSpec] = field(default_factory=list)
    lines: array[int] = field(default_factory=lambda: array("Q"))
    #: Index in `specs` of each name.
    numbers: dict[str, int] = field(default_factory=dict)
    rejected: list[RejectedRow] = field(default_factory=list)
    #: The line of each name that was rejected.
    rejected_names: dict[str, int] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)
    report: FileReport = field(default_factory=FileReport)

    def add_row(self, line: int, raw: object) -> None:
        if isinstance(raw, InvalidRow):
            self.reject(line, raw.reason, raw.raw, raw.name)
            return
        if self.defaults and isinstance(raw, dict):
            raw = _with_defaults(raw, self.defaults)
        try:
            specs = expand_row(raw, self.campaign)
        except InvalidTask as rejected:
            name = raw.get("name") if isinstance(raw, dict) else None
            self.reject(line, str(rejected), raw, name if isinstance(name, str) else "")
            return
        for spec in specs:  # a bundle is rejected as a whole
            if spec.name in self.numbers:
                self._reject_duplicate(line, spec, self.lines[self.numbers[spec.name]])
                return
        for spec in specs:
            self._add(line, spec)

    def _add(self, line: int, spec: TaskSpec) -> None:
        self.numbers[spec.name] = len(self.specs)
        if spec.after:
            # Share the string objects of names: halves the memory of a graph.
            specs, numbers = self.specs, self.numbers
            spec.after = tuple(
                [specs[numbers[name]].name if name in numbers else name for name in spec.after]
            )
        self.specs.append(spec)
        self.lines.append(line)

    def _reject_duplicate(self, line: int, spec: TaskSpec, line_first: int) -> None:
        self.duplicates.append(Duplicate(spec.name, line_first, line))
        self.reject(line, duplicate_text(spec.name, line_first), spec)

    def reject(self, line: int, reason: str, raw: object, name: str = "") -> None:
        raw = to_row(raw) if isinstance(raw, TaskSpec) else raw
        self.rejected.append(RejectedRow(self.file, line, reason, raw))
        if name:
            self.rejected_names.setdefault(name, line)
        if len(self.rejected) > REJECTED_MAX:
            raise too_many_error(self.rejected[0])


def _with_defaults(raw: dict[str, object], defaults: dict[str, object]) -> dict[str, object]:
    """Return a row with defaults. Some are for commands and calls only."""
    is_plain = raw.get("payload") is not None
    more = {key: value for key, value in defaults.items() if not (is_plain and key in _OF_COMMANDS)}
    return more | {key: value for key, value in raw.items() if value is not None}


def default_campaign_name(file: str) -> str:
    """Return the name of a file's campaign if none is given: the file's, without suffixes."""
    if file == STDIN:
        return "stdin"
    path = Path(file)
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).stem


def read_campaign(path: str | Path, options: FileOptions | None = None) -> LoadedCampaign:
    """Read the campaign in a file, "-" for stdin. Raises `InvalidCampaign` if it can't be read."""
    name = str(path)
    options = options or FileOptions()
    reading = _CampaignReader(file_label(name), options.campaign, options.defaults)
    for line, raw in rows(name, options, reading.report):
        reading.add_row(line, raw)
    return _check_graph(reading)


def _check_graph(reading: _CampaignReader) -> LoadedCampaign:
    """Reject tasks that are in a cycle or depend on a rejected task, and sort what is left."""
    specs, lines = reading.specs, reading.lines
    graph = graph_of(specs, reading.numbers)
    levels = levels_of(graph)
    cycles = cycles_of(graph, levels)
    rejected: dict[int, str] = {}
    for group, cycle in cycles:
        around = cycle_text([specs[number].name for number in cycle], len(group))
        rejected |= dict.fromkeys(group, around)
    for name, line in reading.rejected_names.items():
        for number in graph.unknown.pop(name, ()):
            rejected.setdefault(number, rejected_dependency_text(name, line))
    _reject_dependents(reading, graph, rejected)
    summary = summarize_graph(specs, lines, graph, levels)
    summary.duplicates = reading.duplicates
    summary.cycles = [[specs[number].name for number in cycle] for _, cycle in cycles]
    for number, reason in rejected.items():
        if _is_first_of_bundle(specs[number]):
            reading.reject(lines[number], reason, specs[number])
    reading.rejected.sort(key=lambda rejected: rejected.line)
    if rejected or not graph.is_topological:
        good = [number for number in levels.order if number not in rejected]
        specs, lines = [specs[n] for n in good], array("Q", [lines[n] for n in good])
    return LoadedCampaign(
        file=reading.file,
        specs=specs,
        lines=lines,
        rejected=reading.rejected,
        summary=summary,
        choice=reading.report.choice,
        skipped=reading.report.skipped,
    )


def _is_first_of_bundle(spec: TaskSpec) -> bool:
    """Return whether a task is the task that is reported when its bundle is rejected."""
    return spec.bundle_ref is None or not spec.bundle_ref.offset


def _reject_dependents(reading: _CampaignReader, graph: Graph, rejected: dict[int, str]) -> None:
    """Reject all tasks that depend on a rejected one, directly or not."""
    queue = list(rejected)
    for number in queue:  # grows during the walk
        for dependent in graph.dependents_of(number):
            if dependent not in rejected:
                name, at_line = reading.specs[number].name, reading.lines[number]
                rejected[dependent] = rejected_dependency_text(name, at_line)
                queue.append(dependent)


def reject_unknown_dependencies(loaded: LoadedCampaign, names: Iterable[str]) -> LoadedCampaign:
    """Return the campaign without the tasks that depend, directly or not, on these unknown names.

    They are added to the rejected rows.
    """
    reasons = {name: unknown_dependency_text(name) for name in names}
    good: list[int] = []
    rejected = list(loaded.rejected)
    for number, spec in enumerate(loaded.specs):
        cause = next((name for name in spec.after if name in reasons), None)
        if cause is None:
            good.append(number)
            continue
        line = loaded.lines[number]
        reasons[spec.name] = rejected_dependency_text(spec.name, line)
        if _is_first_of_bundle(spec):
            rejected.append(RejectedRow(loaded.file, line, reasons[cause], to_row(spec)))
    return structs.replace(
        loaded,
        specs=[loaded.specs[number] for number in good],
        lines=array("Q", [loaded.lines[number] for number in good]),
        rejected=sorted(rejected, key=lambda one: one.line),
    )
