"""The documents that verbs print with --json: their fields, which scripts rely on.

A field may be added; none is renamed, removed, or given another meaning without a new version. The
schemas in `docs/schemas` are made from this file, and a test compares them, so that a document
changes on purpose or not at all: `./yard docs` makes them.

Verbs build their documents as they go, some piece by piece; here is what comes out of it.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from taskyard.campaign.graph import Duplicate, UnknownDependency
from taskyard.journal.compaction import CompactionResult
from taskyard.journal.state_check import StateReport
from taskyard.wire import record_views
from taskyard.wire.record_views import RecordDocument
from taskyard.wire.views import (
    Counts,
    Document,
    Explanation,
    Lane,
    Pause,
    Service,
    ShownTask,
    Stats,
    Task,
    Worker,
)


class JsonDocument(Document):
    """Base of all documents."""

    version: Literal[2]
    document: str


class StatusDocument(Stats):
    """`status`."""

    version: Literal[2]
    document: str


class CampaignStatusDocument(JsonDocument):
    """`status --campaign`."""

    campaign: str
    counts: Counts


class ListDocument(JsonDocument):
    """`list`."""

    tasks: list[Task]
    #: There are more than were asked for.
    more: bool


class ShowDocument(JsonDocument):
    """`show`."""

    task: ShownTask
    why: str


class ResultDocument(JsonDocument):
    """`result`: bytes that are no text are null, and in base64."""

    name: str
    campaign: str
    result: str | None
    #: Only the end of it is kept.
    truncated: bool
    result_base64: str | UnsetType = UNSET


class LogDocument(JsonDocument):
    """`log`."""

    name: str
    campaign: str
    output: str | None
    #: Only the end of it is kept.
    truncated: bool
    output_base64: str | UnsetType = UNSET


class WhyDocument(JsonDocument):
    """`why`."""

    tasks: list[Explanation]
    #: What they wait for is their `why`.
    lanes: list[Lane]


class WorkersDocument(JsonDocument):
    """`workers`."""

    workers: list[Worker]


class ServiceRule(Document):
    """A section of the settings that lanes of a service are run by."""

    #: Empty: the defaults.
    name: str
    #: Lanes served at once, over all services that are run by it; 0: no limit.
    limit: int


class ServiceRow(Service):
    """A service, with what its workers and pauses make of it."""

    #: Of all workers that offer it, shared with whatever else they offer.
    slots: int
    slots_used: int
    paused: bool
    lanes_paused: list[str]
    #: That have tasks.
    lanes: int
    #: The rules that apply to its lanes.
    rules: list[ServiceRule]
    oldest: float | None
    next_due: float | None
    #: How many lanes are where they are for which reason.
    reasons: dict[str, int]
    why: str


class ServicesDocument(JsonDocument):
    """`services`."""

    services: list[ServiceRow]
    #: Everything is.
    paused: bool


class LanesDocument(JsonDocument):
    """`lanes`: what waits first."""

    lanes: list[Lane]
    #: How many are left out.
    more: int


class SubmitDocument(JsonDocument):
    """`submit`."""

    name: str
    campaign: str
    #: False: it was known already.
    new: bool


class SubmitWaitDocument(JsonDocument):
    """`submit --wait`: a result, or a reason why there is none."""

    name: str
    campaign: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: str | UnsetType = UNSET
    #: Only the end of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class BundleDocument(JsonDocument):
    """`bundle`."""

    name: str
    campaign: str
    tasks: int
    #: How many of them were not known already.
    new: int


class BundleWaitDocument(JsonDocument):
    """`bundle --wait`."""

    name: str
    campaign: str
    tasks: int
    new: int
    settled: bool
    counts: Counts
    behind_failure: int


class MapTask(Document):
    """A task of `map`: a result, or a reason why there is none."""

    name: str
    campaign: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: str | UnsetType = UNSET
    #: Only the end of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class MapDocument(JsonDocument):
    """`map`."""

    campaign: str
    tasks: list[MapTask]
    #: Only of states that there are tasks in.
    counts: dict[str, int]
    #: Tasks that are done, but whose result is truncated.
    truncated: int


class MapSubmitDocument(JsonDocument):
    """`map --no-wait`."""

    campaign: str
    submitted: int


class LoadDocument(JsonDocument):
    """`load`."""

    campaign: str
    new: int
    existing: int


class LoadWaitDocument(JsonDocument):
    """`load --wait`."""

    campaign: str
    new: int
    existing: int
    settled: bool
    counts: Counts
    behind_failure: int


class BadLine(Document):
    """A line that can't be used."""

    line: int
    reason: str


class LoadDryRunDocument(JsonDocument):
    """`load --dry-run`."""

    file: str
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
    #: The first thousand of them.
    rejected: list[BadLine]


class PipelineLoadDocument(JsonDocument):
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


class PipelineLoadDryRunDocument(JsonDocument):
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


class PipelineFleetDocument(JsonDocument):
    """`pipeline fleet`."""

    #: That went home.
    workers: int


class WaitDocument(JsonDocument):
    """`wait`."""

    settled: bool
    counts: Counts
    behind_failure: int


class RetryDocument(JsonDocument):
    """`retry`."""

    retried: int


class CancelDocument(JsonDocument):
    """`cancel`."""

    cancelled: int


class MoveDocument(JsonDocument):
    """`move`."""

    moved: int


class ExpireDocument(JsonDocument):
    """`expire`."""

    expired: int


class DrainDocument(JsonDocument):
    """`drain`."""

    drained: int


class PauseDocument(JsonDocument):
    """`pause` and `resume`: what is paused now."""

    paused: bool
    pauses: list[Pause]


class GapDocument(JsonDocument):
    """A line of `watch`: records up to this one are no longer in the journal."""

    kind: Literal["gap"]
    record: int
    reason: str


class JournalCheckDocument(StateReport, kw_only=True, forbid_unknown_fields=True):
    """`journal check`."""

    version: Literal[2]
    document: str
    state: str
    sound: bool


class JournalCompactDocument(CompactionResult, kw_only=True, forbid_unknown_fields=True):
    """`journal export` and `journal compact`."""

    version: Literal[2]
    document: str
    state: str


class RunFailure(Document):
    """A task that failed."""

    name: str
    campaign: str
    reason: str
    attempt: int
    dependents: int


class RunDocument(JsonDocument):
    """`run`."""

    campaign: str
    state: str
    seconds: float
    counts: Counts
    #: Tasks that are done, but whose result is truncated.
    truncated: int
    failures: list[RunFailure]


class ConfigSetting(Document):
    """A setting, and where its value came from."""

    key: str
    value: Any
    source: str
    place: str | None
    environment: str
    help: str


class ConfigDocument(JsonDocument):
    """`config`."""

    file: str | None
    settings: list[ConfigSetting]


class ConfigService(Document):
    """A service of the settings."""

    name: str
    #: The lanes that it is for, as `service/lane`.
    match: str
    #: What it sets beside that; the rest is as the defaults say.
    sets: list[str]


class ConfigCheckDocument(JsonDocument):
    """`config check`."""

    file: str | None
    valid: bool
    problems: list[str]
    #: In the order in which they are tried.
    services: list[ConfigService]


class KeyRecord(Document):
    """A guest's key; never its secret."""

    name: str
    role: str
    fingerprint: str
    public: str
    created: float
    revoked: float | None


class KeysNewDocument(JsonDocument):
    """`keys new`."""

    file: str
    key: KeyRecord


class KeysListDocument(JsonDocument):
    """`keys list`."""

    keys: list[KeyRecord]


class KeysRevokeDocument(JsonDocument):
    """`keys revoke`."""

    key: KeyRecord


#: What each document is made of, by its name; some verbs have several, by their options.
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


class PipelineHistoryDocument(JsonDocument):
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


class PipelineReportDocument(JsonDocument):
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


class DemoDocument(JsonDocument):
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


class PipelineSweepDocument(JsonDocument):
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


DOCUMENTS: Final[dict[str, tuple[type[msgspec.Struct], ...]]] = {
    "status": (StatusDocument, CampaignStatusDocument),
    "list": (ListDocument,),
    "show": (ShowDocument,),
    "result": (ResultDocument,),
    "log": (LogDocument,),
    "why": (WhyDocument,),
    "workers": (WorkersDocument,),
    "services": (ServicesDocument,),
    "lanes": (LanesDocument,),
    "submit": (SubmitDocument, SubmitWaitDocument),
    "map": (MapDocument, MapSubmitDocument),
    "bundle": (BundleDocument, BundleWaitDocument),
    "load": (LoadDocument, LoadWaitDocument, LoadDryRunDocument),
    "wait": (WaitDocument,),
    "retry": (RetryDocument,),
    "cancel": (CancelDocument,),
    "move": (MoveDocument,),
    "expire": (ExpireDocument,),
    "drain": (DrainDocument,),
    "pause": (PauseDocument,),
    "resume": (PauseDocument,),
    "watch": (GapDocument,),
    "journal check": (JournalCheckDocument,),
    "journal export": (JournalCompactDocument,),
    "journal compact": (JournalCompactDocument,),
    "run": (RunDocument,),
    "pipeline load": (PipelineLoadDocument, PipelineLoadDryRunDocument),
    "pipeline fleet": (PipelineFleetDocument,),
    "config": (ConfigDocument,),
    "config check": (ConfigCheckDocument,),
    "keys new": (KeysNewDocument,),
    "keys list": (KeysListDocument,),
    "keys revoke": (KeysRevokeDocument,),
    "pipeline history": (PipelineHistoryDocument,),
    "pipeline report": (PipelineReportDocument,),
    "demo": (DemoDocument,),
    "pipeline sweep": (PipelineSweepDocument,),
}

#: The lines of `watch` are records beside that.
_RECORDS: Final = msgspec.json.Decoder(record_views.AnyRecordDocument)


def check(encoded: bytes | str) -> None:
    """Raise `msgspec.ValidationError` if this is not the document that it says it is."""
    raw = msgspec.json.decode(encoded)
    name = raw.get("document")
    wrong = [f"{name!r} is no document"]
    if name == "watch" and raw.get("kind") != "gap":
        opening = {key: raw.pop(key) for key in ("version", "document")}
        msgspec.convert(opening, JsonDocument)
        _RECORDS.decode(msgspec.json.encode(raw))
        return
    for kind in DOCUMENTS.get(name, ()):
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            wrong.append(f"{kind.__name__}: {error}")
        else:
            return
    raise msgspec.ValidationError("; ".join(wrong))


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a document."""
    kinds: list[Any] = [*DOCUMENTS[name]]
    if name == "watch":
        kinds += [*RecordDocument.__subclasses__()]
    made, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    title = f"What `taskyard {name} --json` prints{', a line' if name == 'watch' else ''}"
    return {"title": title, "anyOf": [*made], "$defs": parts}


def file_name(name: str) -> str:
    return f"{name.replace(' ', '-')}.json"


def schemas() -> dict[str, str]:
    """The text of every schema, by the name of its file."""
    return {
        file_name(name): json.dumps(schema(name), indent=2, sort_keys=True, ensure_ascii=False)
        + "\n"
        for name in DOCUMENTS
    }
