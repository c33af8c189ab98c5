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

from taskyard.client.campaign.survey import Duplicate, Stranger
from taskyard.journal.checkup import Findings
from taskyard.journal.compaction import Outcome
from taskyard.wire import record_documents
from taskyard.wire.documents import (
    Counts,
    Document,
    Explanation,
    Pause,
    Service,
    Stats,
    Task,
    Worker,
)
from taskyard.wire.record_documents import RecordDocument


class Printed(Document):
    """Base of all documents."""

    version: Literal[1]
    document: str


class StatusDocument(Stats):
    """`status`."""

    version: Literal[1]
    document: str


class CampaignStatusDocument(Printed):
    """`status --campaign`."""

    campaign: str
    counts: Counts


class ListDocument(Printed):
    """`list`."""

    tasks: list[Task]
    #: There are more than were asked for.
    more: bool


class ShowDocument(Printed):
    """`show`."""

    task: Task
    why: str


class ResultDocument(Printed):
    """`result`: bytes that are no text are null, and in base64."""

    name: str
    result: str | None
    result_base64: str | UnsetType = UNSET


class LogDocument(Printed):
    """`log`."""

    name: str
    output: str | None
    output_base64: str | UnsetType = UNSET


class WhyDocument(Printed):
    """`why`."""

    tasks: list[Explanation]


class WorkersDocument(Printed):
    """`workers`."""

    workers: list[Worker]


class ServiceRow(Service):
    """A service, with what its workers and pauses make of it."""

    #: Of all workers that offer it, shared with whatever else they offer.
    slots: int
    slots_used: int
    paused: bool
    lanes_paused: list[str]


class ServicesDocument(Printed):
    """`services`."""

    services: list[ServiceRow]
    #: Everything is.
    paused: bool


class SubmitDocument(Printed):
    """`submit`."""

    name: str
    campaign: str
    #: False: it was known already.
    new: bool


class SubmitWaitDocument(Printed):
    """`submit --wait`: a result, or a reason why there is none."""

    name: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class MapTask(Document):
    """A task of `map`: a result, or a reason why there is none."""

    name: str
    state: str
    result: str | UnsetType | None = UNSET
    result_base64: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class MapDocument(Printed):
    """`map`."""

    campaign: str
    tasks: list[MapTask]
    #: Only of states that there are tasks in.
    counts: dict[str, int]


class MapSubmitDocument(Printed):
    """`map --no-wait`."""

    campaign: str
    submitted: int


class LoadDocument(Printed):
    """`load`."""

    campaign: str
    new: int
    known: int


class LoadWaitDocument(Printed):
    """`load --wait`."""

    campaign: str
    new: int
    known: int
    settled: bool
    counts: Counts
    behind_failure: int


class BadLine(Document):
    """A line that can't be used."""

    line: int
    reason: str


class LoadLookDocument(Printed):
    """`load --dry-run`."""

    file: str
    tasks: int
    edges: int
    roots: int
    depth: int
    width: int
    widest: int
    services: dict[str, int]
    unknown: list[Stranger]
    duplicates: list[Duplicate]
    cycles: list[list[str]]
    bad_lines: int
    #: The first thousand of them.
    bad: list[BadLine]


class WaitDocument(Printed):
    """`wait`."""

    settled: bool
    counts: Counts
    behind_failure: int


class RetryDocument(Printed):
    """`retry`."""

    retried: int


class CancelDocument(Printed):
    """`cancel`."""

    cancelled: int


class DrainDocument(Printed):
    """`drain`."""

    drained: int


class PauseDocument(Printed):
    """`pause` and `resume`: what is paused now."""

    paused: bool
    pauses: list[Pause]


class GapDocument(Printed):
    """A line of `watch`: records up to this one are no longer in the journal."""

    kind: Literal["gap"]
    record: int
    reason: str


class JournalCheckDocument(Findings, kw_only=True, forbid_unknown_fields=True):
    """`journal check`."""

    version: Literal[1]
    document: str
    state: str
    sound: bool


class JournalWorkDocument(Outcome, kw_only=True, forbid_unknown_fields=True):
    """`journal export` and `journal compact`."""

    version: Literal[1]
    document: str
    state: str


class RunFailure(Document):
    """A task that failed."""

    name: str
    reason: str
    attempt: int
    dependents: int


class RunDocument(Printed):
    """`run`."""

    campaign: str
    state: str
    seconds: float
    counts: Counts
    failures: list[RunFailure]


class ConfigSetting(Document):
    """A setting, and where its value came from."""

    key: str
    value: Any
    source: str
    place: str | None
    environment: str
    help: str


class ConfigDocument(Printed):
    """`config`."""

    file: str | None
    settings: list[ConfigSetting]


class ConfigCheckDocument(Printed):
    """`config check`."""

    file: str | None
    good: bool
    problems: list[str]


class Key(Document):
    """A guest's key; never its secret."""

    name: str
    role: str
    fingerprint: str
    public: str
    made: float
    revoked: float | None


class KeysNewDocument(Printed):
    """`keys new`."""

    file: str
    key: Key


class KeysListDocument(Printed):
    """`keys list`."""

    keys: list[Key]


class KeysRevokeDocument(Printed):
    """`keys revoke`."""

    key: Key


#: What each document is made of, by its name; some verbs have several, by their options.
DOCUMENTS: Final[dict[str, tuple[type[msgspec.Struct], ...]]] = {
    "status": (StatusDocument, CampaignStatusDocument),
    "list": (ListDocument,),
    "show": (ShowDocument,),
    "result": (ResultDocument,),
    "log": (LogDocument,),
    "why": (WhyDocument,),
    "workers": (WorkersDocument,),
    "services": (ServicesDocument,),
    "submit": (SubmitDocument, SubmitWaitDocument),
    "map": (MapDocument, MapSubmitDocument),
    "load": (LoadDocument, LoadWaitDocument, LoadLookDocument),
    "wait": (WaitDocument,),
    "retry": (RetryDocument,),
    "cancel": (CancelDocument,),
    "drain": (DrainDocument,),
    "pause": (PauseDocument,),
    "resume": (PauseDocument,),
    "watch": (GapDocument,),
    "journal check": (JournalCheckDocument,),
    "journal export": (JournalWorkDocument,),
    "journal compact": (JournalWorkDocument,),
    "run": (RunDocument,),
    "config": (ConfigDocument,),
    "config check": (ConfigCheckDocument,),
    "keys new": (KeysNewDocument,),
    "keys list": (KeysListDocument,),
    "keys revoke": (KeysRevokeDocument,),
}

#: The lines of `watch` are records beside that.
_RECORDS: Final = msgspec.json.Decoder(record_documents.AnyRecordDocument)


def check(encoded: bytes | str) -> None:
    """Raise `msgspec.ValidationError` if this is not the document that it says it is."""
    raw = msgspec.json.decode(encoded)
    name = raw.get("document")
    wrong = [f"{name!r} is no document"]
    if name == "watch" and raw.get("kind") != "gap":
        opening = {key: raw.pop(key) for key in ("version", "document")}
        msgspec.convert(opening, Printed)
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
