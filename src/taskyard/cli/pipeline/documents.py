"""The documents that `demo` and `pipeline` print with --json. See `cli/documents.py`."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from taskyard.cli.documents import JsonDocument
from taskyard.wire.views import Document


class PipelineLoadDocument(JsonDocument, tag="pipeline load"):
    """`pipeline load`."""

    campaign: str
    new: int
    existing: int
    #: Rows that were left out.
    rejected: int


class BadRow(Document):
    """A row of a file that can't be used."""

    file: str
    line: int
    reason: str


class PipelineLoadDryRunDocument(JsonDocument, tag="pipeline load"):
    """`pipeline load --dry-run`."""

    tasks: int
    edges: int
    roots: int
    depth: int
    width: int
    widest: int
    services: dict[str, int]
    #: Names that no file has, with how many wait for each; the first thousand of them.
    unknown: dict[str, int]
    duplicates: int
    cycles: list[list[str]]
    #: The chain that takes longest, or has the most tasks; its first thousand.
    critical_path: list[str]
    #: null where the files do not say how long tasks take.
    critical_path_seconds: float | None
    rejected_rows: int
    #: The first thousand of them.
    rejected: list[BadRow]


class PipelineFleetDocument(JsonDocument, tag="pipeline fleet"):
    """`pipeline fleet`."""

    #: That went home.
    workers: int


class GuaranteeCounts(Document):
    """Counts of a whole history; what must be 0 is 0 if it is sound."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    blocked_behind_failure: int
    unfinished: int
    lost: int
    completed_twice: int
    dependencies_broken: int
    unknown: int
    stale_refused: int


class PipelineHistoryDocument(JsonDocument, tag="pipeline history"):
    """`pipeline history`."""

    state: str
    out: str
    #: The journal's row up to which the tables go.
    row_last: int
    #: Pairs of history files that were new, and campaigns whose tables were made anew.
    parts: int
    campaigns: int
    #: False: a broker runs, and what it has not exported yet is not in the tables.
    complete: bool


class PipelineReportDocument(JsonDocument, tag="pipeline report"):
    """`pipeline report`."""

    page: str
    tables: str
    #: Null: all campaigns together.
    campaign: str | None
    summary: list[str]
    makespan_ns: int
    guarantees: GuaranteeCounts
    sound: bool


class DemoCounts(Document):
    """What the journal of a demo says; what must be 0 is 0 if all holds."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    blocked_behind_failure: int
    lost: int
    completed_twice: int
    dependencies_broken: int
    stale_refused: int
    #: Tasks done, by the language in which they were handed out.
    done_by: dict[str, int]


class DemoLine(Document):
    """A line of the closing table."""

    check: str
    figures: str
    passed: bool


class DemoDocument(JsonDocument, tag="demo"):
    """`demo`."""

    directory: str
    report: str
    tables: str
    seconds: float
    counts: DemoCounts
    lines: list[DemoLine]
    sound: bool


class SweepPoint(Document):
    """What came out of one combination."""

    workers: int
    slots: int
    policy: str
    makespan_ns: int
    busy_ns: int
    utilisation: float
    wait_ns_mean: int
    wait_ns_p50: int
    wait_ns_p95: int
    wait_ns_max: int
    done: int
    failed: int
    unfinished: int
    cpu_ns: int
    slot_hours: float
    cost: float | UnsetType = UNSET


class PipelineSweepDocument(JsonDocument, tag="pipeline sweep"):
    """`pipeline sweep`."""

    tasks: int
    points: list[SweepPoint]
    sentences: list[str]
    critical_path_ns: int
    work_ns: int
    #: How long the campaign took, and takes in a simulation of the workers that it had, with how
    #: far that is off; null: it was not measured.
    measured_ns: int | None
    replayed_ns: int | None
    error: float | None
    page: str | None
