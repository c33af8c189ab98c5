"""The documents that `demo` and `pipeline` print with --json. See `cli/documents.py`."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from taskyard.cli.documents import JsonDocument
from taskyard.wire.documents import Document


class PipelineLoadDocument(JsonDocument, tag="load"):
    """`load --spark`."""

    campaign: str
    new: int
    existing: int
    #: Skipped rows.
    rejected: int


class BadRow(Document):
    """A rejected row."""

    file: str
    line: int
    reason: str


class PipelineLoadDryRunDocument(JsonDocument, tag="load"):
    """`load --spark --dry-run`."""

    tasks: int
    edges: int
    roots: int
    depth: int
    width: int
    widest: int
    services: dict[str, int]
    #: Dependencies that no file defines, with the number of their dependents. The first 1,000.
    unknown: dict[str, int]
    duplicates: int
    cycles: list[list[str]]
    #: The longest chain by run time, or by tasks if run times are unknown. Its first 1,000.
    critical_path: list[str]
    #: Null if run times are unknown.
    critical_path_seconds: float | None
    rejected_rows: int
    #: The first 1,000.
    rejected: list[BadRow]


class PipelineFleetDocument(JsonDocument, tag="pipeline fleet"):
    """`pipeline fleet`."""

    #: Workers that have exited.
    workers: int


class GuaranteeCounts(Document):
    """Counts over a whole history. In a sound one, lost, twice, broken and unknown are 0."""

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
    """`pipeline history` of one state."""

    state: str
    out: str
    #: The last row of the journal that the tables cover.
    row_last: int
    #: New pairs of history files, and recomputed campaigns.
    parts: int
    campaigns: int
    #: False if a running broker has rows that it has not exported yet.
    complete: bool


class StateHistory(Document):
    """The tables of one of several states. The fields are those of one state alone."""

    state: str
    out: str
    row_last: int
    parts: int
    campaigns: int
    complete: bool


class PipelineHistoriesDocument(JsonDocument, tag="pipeline history"):
    """`pipeline history` of several states."""

    states: list[StateHistory]


class ReportBroker(Document):
    """A broker whose history is in a report."""

    #: The column `broker` of the tables.
    broker: str
    #: The directory of its history.
    history: str
    #: Empty for tasks outside any.
    campaigns: list[str]
    guarantees: GuaranteeCounts


class ComparedFigure(Document):
    """A figure of the report's campaign and of an earlier one. Null if it is unknown."""

    name: str
    value: float | None
    earlier: float | None
    difference: float | None
    #: Null if the earlier one is 0.
    ratio: float | None


class ReportComparison(Document):
    """The comparison with an earlier campaign."""

    #: Null: all campaigns.
    campaign: str | None
    #: The directory of the earlier one. Empty: the same history.
    source: str
    sentence: str
    figures: list[ComparedFigure]


class PipelineReportDocument(JsonDocument, tag="report"):
    """`report`."""

    page: str
    tables: str
    #: Null: all campaigns.
    campaign: str | None
    summary: list[str]
    makespan_ns: int
    #: Over all brokers.
    guarantees: GuaranteeCounts
    sound: bool
    brokers: list[ReportBroker]
    #: Null without `--compare`.
    comparison: ReportComparison | None


class DemoCounts(Document):
    """Counts from the journal of a demo. In a sound one, lost, twice and broken are 0."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    blocked_behind_failure: int
    lost: int
    completed_twice: int
    dependencies_broken: int
    stale_refused: int
    #: Done tasks by dialect.
    done_by: dict[str, int]


class DemoLine(Document):
    """A check of the demo."""

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
    """The simulated result of one combination."""

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
    #: The measured and the simulated time of the original run, and the relative error. Null if not
    #: measured.
    measured_ns: int | None
    replayed_ns: int | None
    error: float | None
    page: str | None
