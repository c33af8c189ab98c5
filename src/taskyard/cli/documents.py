"""The documents that commands print with --json, one struct each. Scripts rely on their fields.

A field may be added. Renaming or removing one, or changing its meaning, needs a new version. The
schemas in `docs/schemas` are generated from these structs, and a test compares the two.
The documents of `journal` are in `journal.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import UNSET, UnsetType

from taskyard.campaign.graph import Duplicate, UnknownDependency
from taskyard.wire.documents import Document
from taskyard.wire.views import Service

if TYPE_CHECKING:
    # The broker builds these views, and commands print them as they arrived, with fields that a
    # newer broker may have added. To the type checker they are dicts, to the schemas structs.
    Counts = dict[str, int]
    Explanation = dict[str, Any]
    Lane = dict[str, Any]
    Pause = dict[str, Any]
    ShownTask = dict[str, Any]
    MeasuredTask = dict[str, Any]
    Worker = dict[str, Any]
else:
    from taskyard.wire.views import (
        Counts,
        Explanation,
        Lane,
        MeasuredTask,
        Pause,
        ShownTask,
        Worker,
    )

#: The version of every document. Adding a field does not change it.
DOCUMENT_VERSION: Final = 1


class JsonDocument(Document, kw_only=True, tag_field="document"):
    """A document that a command prints. The tag is the command."""

    version: Literal[1] = 1


class ErrorDetails(Document):
    """An error. Scripts branch on its code: the text may change."""

    #: See `docs/errors.md`.
    code: str
    #: The tasks, campaigns or other things at fault. Empty if the error has none.
    names: list[str]
    text: str
    exit_code: int


class ErrorDocument(JsonDocument, tag="error"):
    """The last line on stderr of a command that fails with --json."""

    error: ErrorDetails


class CampaignStatusDocument(JsonDocument, tag="status"):
    """`status --campaign`."""

    campaign: str
    counts: Counts


class ListDocument(JsonDocument, tag="list"):
    """`list`."""

    tasks: list[MeasuredTask]
    #: Whether more tasks match than are listed.
    more: bool


class ShowDocument(JsonDocument, tag="show"):
    """`show`."""

    task: ShownTask
    why: str


class ResultsDocument(JsonDocument, tag="results"):
    """A line of `results`: a result, or the reason that there is none."""

    name: str
    campaign: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: bytes | UnsetType = UNSET
    #: Whether only a part of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    #: Of the last attempt of a failed command that printed something.
    stdout: str | UnsetType | None = UNSET
    stdout_base64: bytes | UnsetType = UNSET


class LogDocument(JsonDocument, tag="log"):
    """`log`. Bytes that are not UTF-8 are in `stdout_base64`, and `stdout` is null."""

    name: str
    campaign: str
    attempt: int
    #: With --stderr it is left out, and `stderr` with --stdout.
    stdout: str | UnsetType | None = UNSET
    stdout_base64: bytes | UnsetType = UNSET
    stderr: str | UnsetType | None = UNSET
    stderr_base64: bytes | UnsetType = UNSET


class CleanDocument(JsonDocument, tag="clean"):
    """`clean`."""

    files: int
    tasks: int
    bytes: int
    #: Files that stay because they were used in the last minute.
    recent_files: int
    #: Tasks that may still run, whose output stays.
    active_tasks: int
    dry_run: bool


class SlowTask(Document):
    """A task that took long."""

    name: str
    campaign: str
    #: The run time of its latest attempt.
    seconds: float


class WhyDocument(JsonDocument, tag="why"):
    """`why`. With --campaign, its failed tasks, the first 20."""

    tasks: list[Explanation]
    #: The reason of each lane is its `why`.
    lanes: list[Lane]
    #: The slowest ended tasks of the campaign, at most 3.
    slowest: list[SlowTask] | UnsetType = UNSET


class WorkersDocument(JsonDocument, tag="workers"):
    """`workers`."""

    workers: list[Worker]


class ServiceRule(Document):
    """A rule that applies to lanes of a service."""

    #: The section in the settings. Empty: the defaults.
    name: str
    #: Lanes of the rule that may be served at once, over all its services. 0: no limit.
    limit: int


class ServiceRow(Service):
    """A service with its slots, its pauses and the sums over its lanes."""

    #: Of all workers that offer the service. They share the slots with their other services.
    slots: int
    slots_used: int
    paused: bool
    lanes_paused: list[str]
    #: Lanes with tasks.
    lanes: int
    #: The rules that apply to its lanes.
    rules: list[ServiceRule]
    oldest: float | None
    next_due: float | None
    #: The number of lanes by reason.
    reasons: dict[str, int]
    why: str


class ServicesDocument(JsonDocument, tag="services"):
    """`services`."""

    services: list[ServiceRow]
    #: Whether all services are paused.
    paused: bool


class LanesDocument(JsonDocument, tag="lanes"):
    """`lanes`, waiting lanes first."""

    lanes: list[Lane]


class SubmitDocument(JsonDocument, tag="submit"):
    """`submit`."""

    name: str
    campaign: str
    #: False if the task existed already.
    new: bool


class SubmitWaitDocument(JsonDocument, tag="submit"):
    """`submit --wait`: a result, or the reason that there is none."""

    name: str
    campaign: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: bytes | UnsetType = UNSET
    #: Whether only the end of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class BundleDocument(JsonDocument, tag="submit"):
    """`submit --to`."""

    name: str
    campaign: str
    tasks: int
    #: The number of tasks that did not exist before.
    new: int


class BundleWaitDocument(JsonDocument, tag="submit"):
    """`submit --to --wait`."""

    name: str
    campaign: str
    tasks: int
    new: int
    settled: bool
    counts: Counts
    behind_failure: int


class MapTask(Document):
    """A task of `map`: a result, or the reason that there is none."""

    name: str
    campaign: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: bytes | UnsetType = UNSET
    #: Whether only the end of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    #: Of the last attempt of a failed command that printed something.
    stdout: str | UnsetType | None = UNSET
    stdout_base64: bytes | UnsetType = UNSET


class MapDocument(JsonDocument, tag="map"):
    """`map`."""

    campaign: str
    tasks: list[MapTask]
    #: States without tasks are omitted.
    counts: dict[str, int]
    #: Done tasks whose result is truncated.
    truncated: int
    #: Why the command stopped early. Empty: it did not.
    stopped: str


class MapSubmitDocument(JsonDocument, tag="map"):
    """`map --no-wait`."""

    campaign: str
    submitted: int


class MapPlannedTask(Document):
    """A task that `map` would submit: a command, a call or a payload."""

    #: Null without --campaign: names are generated.
    name: str | None
    #: Empty without --lane.
    lane: str
    argv: list[str] | UnsetType = UNSET
    #: The file that is fed to stdin.
    stdin_file: str | UnsetType = UNSET
    #: The size of the block that is fed to stdin.
    stdin_bytes: int | UnsetType = UNSET
    call: str | UnsetType = UNSET
    args: list[Any] | UnsetType = UNSET
    payload: str | UnsetType | None = UNSET
    payload_base64: bytes | UnsetType = UNSET


class MapDryRunDocument(JsonDocument, tag="map"):
    """`map --dry-run`."""

    campaign: str | None
    tasks: list[MapPlannedTask]
    planned: int


class LoadDocument(JsonDocument, tag="load"):
    """`load`."""

    campaign: str
    new: int
    existing: int


class LoadWaitDocument(JsonDocument, tag="load"):
    """`load --wait`."""

    campaign: str
    new: int
    existing: int
    settled: bool
    counts: Counts
    behind_failure: int


class BadLine(Document):
    """A rejected line."""

    line: int
    reason: str


class LoadDryRunDocument(JsonDocument, tag="load"):
    """`load --dry-run`."""

    file: str
    format: str
    #: Blank lines and comments of shell commands.
    skipped_blank: int
    skipped_comments: int
    tasks: int
    edges: int
    roots: int
    depth: int
    width: int
    widest: int
    services: dict[str, int]
    unknown: list[UnknownDependency]
    duplicates: list[Duplicate]
    cycles: list[list[str]]
    rejected_lines: int
    #: The first 1,000.
    rejected: list[BadLine]


class WaitDocument(JsonDocument, tag="wait"):
    """`wait`."""

    settled: bool
    counts: Counts
    behind_failure: int


class WaitAnyDocument(JsonDocument, tag="wait"):
    """`wait --any`: the first task that has settled."""

    name: str
    campaign: str
    #: "done", "failed", "cancelled", or "blocked" behind a failure.
    state: str


class RetryDocument(JsonDocument, tag="retry"):
    """`retry`."""

    retried: int


class CancelDocument(JsonDocument, tag="cancel"):
    """`cancel`."""

    cancelled: int


class MoveDocument(JsonDocument, tag="move"):
    """`move`."""

    moved: int


class EditDocument(JsonDocument, tag="edit"):
    """`edit`."""

    edited: int
    #: Tasks that were not changed: a worker has them, or they are named and have ended.
    leased: int
    ended: int


class ExpireDocument(JsonDocument, tag="expire"):
    """`expire`."""

    expired: int


class DrainDocument(JsonDocument, tag="drain"):
    """`drain`."""

    drained: int


class FailoverDocument(JsonDocument, tag="failover"):
    """`failover`."""

    #: Of the broker that hands over.
    epoch: int


class PauseDocument(JsonDocument, tag="pause"):
    """`pause`: all pauses."""

    paused: bool
    pauses: list[Pause]


class ResumeDocument(PauseDocument, tag="resume"):
    """`resume`: the pauses that remain."""


class GapDocument(JsonDocument, tag="watch"):
    """A line of `watch`: the journal no longer has the records up to this number."""

    kind: Literal["gap"]
    record: int
    reason: str


class RunFailure(Document):
    """A failed task."""

    name: str
    campaign: str
    reason: str
    attempt: int
    dependents: int


class RunDocument(JsonDocument, tag="run"):
    """`run`."""

    campaign: str
    state: str
    seconds: float
    counts: Counts
    #: Done tasks whose result is truncated.
    truncated: int
    failures: list[RunFailure]
    #: The slowest tasks, at most 3 that took a second or more. Empty for more than 10,000 tasks.
    slowest: list[SlowTask]
    #: Other tasks of the campaign by state, which the file does not have.
    others: Counts
    #: Why the run was stopped early. Empty: it was not.
    stopped: str = ""


class RunsDocument(JsonDocument, tag="run"):
    """`run` with several files."""

    runs: list[RunDocument]


class ConfigSetting(Document):
    """A setting with the origin of its value."""

    key: str
    value: Any
    source: str
    place: str | None
    environment: str
    help: str


class ConfigDocument(JsonDocument, tag="config"):
    """`config`."""

    file: str | None
    settings: list[ConfigSetting]


class ConfigService(Document):
    """A service in the settings."""

    name: str
    #: The pattern of its lanes, as `service/lane`.
    match: str
    #: Keys that it sets. Other keys have their defaults.
    sets: list[str]


class ConfigCheckDocument(JsonDocument, tag="config"):
    """`config --check`."""

    file: str | None
    valid: bool
    problems: list[str]
    #: In matching order.
    services: list[ConfigService]


class KeyRecord(Document):
    """An access key, without its secret."""

    name: str
    #: The roles, joined by commas.
    role: str
    roles: list[str]
    fingerprint: str
    public: str
    created: float
    revoked: float | None


class KeysNewDocument(JsonDocument, tag="keys new"):
    """`keys new`."""

    file: str
    key: KeyRecord


class KeysInviteDocument(JsonDocument, tag="keys invite"):
    """`keys invite`."""

    #: The invitation file, or the invitation itself, which contains the secret.
    file: str | None
    line: str | None
    dialect: str
    endpoints: list[str]
    key: KeyRecord


class KeysListDocument(JsonDocument, tag="keys list"):
    """`keys list`."""

    keys: list[KeyRecord]


class OutboxTask(Document):
    """A task in the outbox."""

    #: The number of its row, for --retry and --drop.
    id: int
    name: str
    campaign: str
    #: The role in PostgreSQL.
    submitted_by: str
    submitted: float
    #: `new` or `refused`.
    state: str
    #: Why it was refused. null: it is new.
    code: str | None
    reason: str | None


class StoreOutboxDocument(JsonDocument, tag="store init"):
    """`store init --outbox`. With --retry or --drop, the numbers of the rows that were changed."""

    tasks: list[OutboxTask]
    retried: list[int]
    dropped: list[int]


class KeysRevokeDocument(JsonDocument, tag="keys revoke"):
    """`keys revoke`."""

    key: KeyRecord


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
    #: The longest chain by run time, or by tasks if run times are unknown. The first 1,000.
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
    """Counts over a whole history. If it is sound, lost, twice, broken and unknown are 0."""

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


class StateHistory(Document):
    """The tables of a state."""

    state: str
    out: str
    #: The last row of the journal that the tables cover.
    row_last: int
    #: New pairs of history files, and recomputed campaigns.
    parts: int
    campaigns: int
    #: False if a running broker has rows that it has not exported yet.
    complete: bool


class PipelineHistoryDocument(JsonDocument, tag="pipeline history"):
    """`pipeline history`."""

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
    """A figure of the report's campaign and of an earlier campaign. Null if it is unknown."""

    name: str
    value: float | None
    earlier: float | None
    difference: float | None
    #: Null if the earlier value is 0.
    ratio: float | None


class ReportComparison(Document):
    """The comparison with an earlier campaign."""

    #: Null: all campaigns.
    campaign: str | None
    #: The directory of the earlier campaign. Empty: the same history.
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
    """Counts from the journal of a demo. If it is sound, lost, twice and broken are 0."""

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
