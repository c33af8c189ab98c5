"""Blobs at the broker: what arrives in parts, what is read in parts, and how much there may be.

Clients and workers of the same machine use the directory themselves, if there is one. All other
peers send and read parts, each bounded, so a turn is short. Knows no messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct, structs

from taskyard.core.blobs import blobs_in, texts_of
from taskyard.core.effects import Refused, StoreReply, ValueReceived
from taskyard.core.identity import split
from taskyard.core.limits import REFUSED_TASKS_MAX, SECOND_NS
from taskyard.core.model import Refusal, RefusedTask, Stream, shown
from taskyard.core.records import Finished, Progressed, Submitted
from taskyard.errors import BytesNotStored, JournalFailed, UserError
from taskyard.journal.blob_files import TERMS_FILE, BlobFiles, StoreTerms
from taskyard.journal.blobs import (
    NAMING,
    BytesDiffer,
    StreamKey,
    blobs_named,
    is_name,
    length_of,
    short_name,
    tasks_by_blob,
    upload_of,
)
from taskyard.journal.recovery import records_of
from taskyard.wire.native.task_contents import StoreDocument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from taskyard.core.effects import Effect
    from taskyard.core.events import SubmitRequested
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord
    from taskyard.journal.archive import Archive
    from taskyard.journal.blobs import BlobStore
    from taskyard.journal.store import StoreReader

# A submission may name only what its key has sent, or what a task names. The digest of a blob alone
# is no right to read it. So a client with a key must prove that it has the bytes: it sends them,
# even if they are here already. After a restart it sends them once more.

#: Blobs that are remembered, each with a key that sent it, or as named by a task.
KNOWN_MAX: Final = 100_000

#: Stands for a key: a task names the blob.
_NAMED: Final = b""


class BlobSenders:
    """The blobs that each key has sent, and that tasks name."""

    def __init__(self, index: Archive | None = None) -> None:
        """`index` has the blobs that ended tasks name."""
        self._index = index
        #: Keys and blobs, the last noted last.
        self._known: dict[tuple[bytes, str], None] = {}

    def note_sent(self, key: bytes, name: str) -> None:
        """Note that a key has sent all of a blob."""
        self._known.pop((key, name), None)
        self._known[key, name] = None
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def note_named(self, name: str) -> None:
        """Note a blob that the record of a task names."""
        self.note_sent(_NAMED, name)

    def may_name(self, key: bytes, name: str) -> bool:
        """Return whether a submission of this key may name a blob."""
        if (key, name) in self._known or (_NAMED, name) in self._known:
            return True
        return self._index is not None and name in self._index.blobs_named([name])


#: How long a blob may wait for the task that names it. A client stores it before it submits the
#: task, and may wait for a broker in between.
GRACE_NS: Final = 3600 * SECOND_NS


class BlobLimits(Struct, frozen=True):
    """How much is kept, and how long."""

    #: 0 is no limit.
    quota_bytes: int = 0
    #: How long blobs of ended tasks are kept. None is for ever.
    keep_ns: int | None = None
    #: How long a blob is kept that no task names.
    grace_ns: int = GRACE_NS


def check_mounted(directory: Path, rows: StoreReader, index: Archive) -> None:
    """Refuse a shared directory without blobs if tasks name some: it is not mounted."""
    if not (directory / TERMS_FILE).exists() and tasks_by_blob(rows, index):
        raise UserError(
            f"{directory}: has no {TERMS_FILE}, but tasks name blobs "
            "(mount it, or create this file to begin without them)"
        )


class BrokerBlobs:
    """The blobs of a broker."""

    def __init__(  # noqa: PLR0913  # each a fact about the broker
        self,
        store: BlobStore,
        identity: str,
        limits: Callable[[], BlobLimits],
        *,
        durable: bool = True,
        shared: bool = False,
        index: Archive | None = None,
    ) -> None:
        """`limits` may change. A `shared` directory is meant to be mounted by other machines.

        `index` has ended tasks.
        """
        self.store = store
        self.limits = limits
        #: The directory that other processes may use themselves.
        self._files = store if isinstance(store, BlobFiles) else None
        self._terms = StoreTerms(identity, durable=durable)
        self._shared = shared
        #: For clients with keys. A shared directory can be read by all that mount it.
        self._senders = None if shared else BlobSenders(index)
        #: Bytes that arrived since the start.
        self.bytes_written = 0
        found = None if self._files is None else self._files.terms()
        if found is not None and found.identity != identity:
            raise UserError(
                f"{self._files.directory}: has the blobs of another broker (give each broker its "  # type: ignore[union-attr]
                "own blobs.directory)"
            )
        if self._files is not None:
            self._files.create(self._terms)
            self._files.show_hidden()

    def problem(self) -> str:
        """Return why nothing more is accepted, or an empty text."""
        quota, used = self.limits().quota_bytes, self.store.bytes_used
        if not quota or used < quota:
            return ""
        return (
            f"blobs: {used:,} bytes reach the quota of {quota:,} "
            "(remove some with `taskyard clean`, or raise blobs.quota)"
        )

    def disk_free_bytes(self) -> int | None:
        """Return the free bytes of the disk with the directory, if there is one."""
        return None if self._files is None else self._files.disk_free_bytes()

    def update_terms(self) -> None:
        """Write the terms for other processes if they have changed."""
        if self._files is None:
            return
        quota = self.limits().quota_bytes
        left = quota - self.store.bytes_used if quota else None
        terms = structs.replace(self._terms, problem=self.problem(), bytes_left=left)
        if terms != self._terms:
            self._files.create(terms)
            self._terms = terms

    def drop_ended(self, rows: StoreReader, ledger: Ledger) -> None:
        """Drop streams of attempts that the last row ended. A broker killed after it has not."""
        row = rows.row_of(rows.head.record)
        for record in () if row is None else records_of(row, row.record_first - 1):
            if not isinstance(record, Finished | Progressed):
                continue
            if isinstance(record, Progressed) and record.stderrs is None:
                continue  # it goes on
            for name, attempt in zip(record.names, record.attempts, strict=True):
                task = ledger.tasks.get(name)
                if task is not None:
                    campaign = task.terms.campaign
                    for stream in Stream:
                        key = StreamKey(campaign, split(name, campaign), attempt, stream)
                        self.store.drop(key)
        self.store.flush()

    # In turns.

    def missing_in(self, event: SubmitRequested) -> Refused | None:
        """Refuse a submission that names blobs which are not here. The blobs here count as used."""
        submission, faults = event.submission, []
        lacking = [self.missing(payload, event.by) for payload in texts_of(submission.payloads)]
        if not any(lacking):
            return None
        for index, name in enumerate(submission.names):
            if missing := lacking[0 if len(lacking) == 1 else index]:
                names = ", ".join(map(short_name, missing))
                text = f"names bytes that are not at the broker: {names}"
                faults.append(RefusedTask(index, name, Refusal.BYTES_UNKNOWN, text))
        text = f"task {shown(faults[0].name)}: {faults[0].text} (send them again)"
        some = faults[:REFUSED_TASKS_MAX]
        return Refused(event.client, event.request, Refusal.BYTES_UNKNOWN, text, some)

    def missing(self, text: bytes, key: bytes = b"") -> list[str]:
        """Return the blobs that a text names, but that are not here, or not known to a key."""
        return [name for name in blobs_in(text) if not self._may_name(name, key)]

    def _may_name(self, name: str, key: bytes) -> bool:
        """Return whether a blob is here, and may be named by a key."""
        if key and self._senders is not None and not self._senders.may_name(key, name):
            return False
        return self.store.touch(name)

    def note(
        self, records: Sequence[AnyRecord], needed_by: Callable[[bytes], Iterable[str]]
    ) -> None:
        """Note before a commit that the blobs in its records are used. Raises `JournalFailed`.

        So no sweep that began before removes them. Nor results, which may be old, that a new task
        needs. `needed_by` returns the blobs that a task needs.
        """
        for record in records:
            if type(record) not in NAMING:
                continue
            for name, _ in blobs_named(record):
                if self._senders is not None:
                    self._senders.note_named(name)
                self._use(name)
            if type(record) is Submitted and self.limits().keep_ns is not None:
                for task in record.submission.names:
                    for name in needed_by(task):
                        self._use(name)

    def _use(self, name: str) -> None:
        try:
            self.store.touch(name)
        except OSError as error:
            raise JournalFailed(f"{short_name(name)}: {error.strerror}") from error

    def fill(self, effect: StoreReply | ValueReceived) -> Effect:
        """Complete a reply about blobs. Return it, or a refusal."""
        if isinstance(effect, StoreReply):
            return self._described(effect)
        self.bytes_written += len(effect.data)
        return self._received(effect)

    def _described(self, effect: StoreReply) -> Effect:
        directory = ""
        if self._files is not None:
            try:
                self.update_terms()
            except OSError as error:
                text = f"{self._files.directory}: {error.strerror}"
                return Refused(effect.client, effect.request, Refusal.FULL, text)
            if self._shared or not effect.is_keyed:
                directory = str(self._files.directory.resolve())
        document = StoreDocument(directory, self._terms.identity, shared=self._shared)
        effect.document = msgspec.json.encode(document)
        return effect

    def _received(self, effect: ValueReceived) -> Effect:
        name = effect.value.decode(errors="replace")
        if not is_name(name):
            text = "not the name of a blob"
            return Refused(effect.client, effect.request, Refusal.MALFORMED, text)
        try:
            self.update_terms()
            is_other = self._append(effect, name)
        except (BytesNotStored, OSError, UserError) as error:
            text = f"{short_name(name)}: {getattr(error, 'strerror', None) or error}"
            return Refused(effect.client, effect.request, Refusal.FULL, text)
        if is_other:
            text = f"{short_name(name)}: its content is another one"
            return Refused(effect.client, effect.request, Refusal.CONFLICT, text)
        effect.data = b""
        return effect

    def _append(self, effect: ValueReceived, name: str) -> bool:
        """Write a part of a blob, unless all of it is there. Return whether it is another one."""
        sender = b"" if effect.of_worker else effect.by
        key, bytes_total, store = upload_of(name, sender), length_of(name), self.store
        if self._may_name(name, sender):
            effect.received = bytes_total
            return False
        effect.received = store.length(key)
        if effect.data and effect.offset <= effect.received < bytes_total:
            self.check_room(bytes_total - effect.received, has_quota=not effect.of_worker)
            data = effect.data[: bytes_total - effect.offset]
            try:
                effect.received = store.append(key, effect.offset, data)
            except BytesDiffer:
                return True
        if effect.received < bytes_total:
            return False
        is_sealed = store.seal(key, name)
        if is_sealed and sender and self._senders is not None:
            self._senders.note_sent(sender, name)
        return not is_sealed

    def check_room(self, bytes_more: int, *, has_quota: bool) -> None:
        """Raise BytesNotStored if there is no room for so many bytes."""
        if self._files is not None:
            self._files.check_room(bytes_more, self._terms, has_quota=has_quota)
        elif has_quota and (problem := self.problem()):
            raise BytesNotStored(problem)
