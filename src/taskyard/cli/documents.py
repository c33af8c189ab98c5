"""The documents that commands print with --json, one struct each. Scripts rely on their fields.

A field may be added. Renaming or removing one, or changing its meaning, needs a new version. The
schemas in `docs/schemas` are generated from these structs, and a test compares the two.
The documents of `journal` are in `journal.py`, those of `pipeline` and `demo` in
`pipeline/documents.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import UNSET, UnsetType

from taskyard.campaign.graph import Duplicate, UnknownDependency
from taskyard.wire.views import Document, Service

if TYPE_CHECKING:
    # The broker builds these views, and commands print them as they arrived, with fields that a
    # newer broker may have added. To the type checker they are dicts, to the schemas structs.
    Counts = dict[str, int]
    Explanation = dict[str, Any]
    Lane = dict[str, Any]
    Pause = dict[str, Any]
    ShownTask = dict[str, Any]
    Task = dict[str, Any]
    Worker = dict[str, Any]
else:
    from taskyard.wire.views import Counts, Explanation, Lane, Pause, ShownTask, Task, Worker

#: The version of every document. Adding a field does not change it.
DOCUMENT_VERSION: Final = 2


class JsonDocument(Document, kw_only=True, tag_field="document"):
    """A document that a command prints. Its tag is the command."""

    version: Literal[2] = 2


class CampaignStatusDocument(JsonDocument, tag="status"):
    """`status --campaign`."""

    campaign: str
    counts: Counts


class ListDocument(JsonDocument, tag="list"):
    """`list`."""

    tasks: list[Task]
    #: There are more than were asked for.
    more: bool


class ShowDocument(JsonDocument, tag="show"):
    """`show`."""

    task: ShownTask
    why: str


class ResultDocument(JsonDocument, tag="result"):
    """`result`: bytes that are no text are null, and in base64."""

    name: str
    campaign: str
    result: str | None
    #: Only the end of it is kept.
    truncated: bool
    result_base64: bytes | UnsetType = UNSET


class LogDocument(JsonDocument, tag="log"):
    """`log`."""

    name: str
    campaign: str
    output: str | None
    #: Only the end of it is kept.
    truncated: bool
    output_base64: bytes | UnsetType = UNSET


class WhyDocument(JsonDocument, tag="why"):
    """`why`."""

    tasks: list[Explanation]
    #: What they wait for is their `why`.
    lanes: list[Lane]


class WorkersDocument(JsonDocument, tag="workers"):
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


class ServicesDocument(JsonDocument, tag="services"):
    """`services`."""

    services: list[ServiceRow]
    #: Everything is.
    paused: bool


class LanesDocument(JsonDocument, tag="lanes"):
    """`lanes`: what waits first."""

    lanes: list[Lane]
    #: How many are left out.
    more: int


class SubmitDocument(JsonDocument, tag="submit"):
    """`submit`."""

    name: str
    campaign: str
    #: False: it was known already.
    new: bool


class SubmitWaitDocument(JsonDocument, tag="submit"):
    """`submit --wait`: a result, or a reason why there is none."""

    name: str
    campaign: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: bytes | UnsetType = UNSET
    #: Only the end of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class BundleDocument(JsonDocument, tag="bundle"):
    """`bundle`."""

    name: str
    campaign: str
    tasks: int
    #: How many of them were not known already.
    new: int


class BundleWaitDocument(JsonDocument, tag="bundle"):
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
    result_base64: bytes | UnsetType = UNSET
    #: Only the end of the result is kept.
    truncated: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class MapDocument(JsonDocument, tag="map"):
    """`map`."""

    campaign: str
    tasks: list[MapTask]
    #: Only of states that there are tasks in.
    counts: dict[str, int]
    #: Tasks that are done, but whose result is truncated.
    truncated: int


class MapSubmitDocument(JsonDocument, tag="map"):
    """`map --no-wait`."""

    campaign: str
    submitted: int


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
    """A line that can't be used."""

    line: int
    reason: str


class LoadDryRunDocument(JsonDocument, tag="load"):
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


class WaitDocument(JsonDocument, tag="wait"):
    """`wait`."""

    settled: bool
    counts: Counts
    behind_failure: int


class RetryDocument(JsonDocument, tag="retry"):
    """`retry`."""

    retried: int


class CancelDocument(JsonDocument, tag="cancel"):
    """`cancel`."""

    cancelled: int


class MoveDocument(JsonDocument, tag="move"):
    """`move`."""

    moved: int


class ExpireDocument(JsonDocument, tag="expire"):
    """`expire`."""

    expired: int


class DrainDocument(JsonDocument, tag="drain"):
    """`drain`."""

    drained: int


class PauseDocument(JsonDocument, tag="pause"):
    """`pause` and `resume`: what is paused now."""

    paused: bool
    pauses: list[Pause]


class ResumeDocument(PauseDocument, tag="resume"):
    """`resume`: the pauses that remain."""


class GapDocument(JsonDocument, tag="watch"):
    """A line of `watch`: records up to this one are no longer in the journal."""

    kind: Literal["gap"]
    record: int
    reason: str


class RunFailure(Document):
    """A task that failed."""

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


class ConfigDocument(JsonDocument, tag="config"):
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


class ConfigCheckDocument(JsonDocument, tag="config check"):
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


class KeysNewDocument(JsonDocument, tag="keys new"):
    """`keys new`."""

    file: str
    key: KeyRecord


class KeysListDocument(JsonDocument, tag="keys list"):
    """`keys list`."""

    keys: list[KeyRecord]


class KeysRevokeDocument(JsonDocument, tag="keys revoke"):
    """`keys revoke`."""

    key: KeyRecord
