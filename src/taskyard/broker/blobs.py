"""Blobs at the broker: what arrives in parts, what is read in parts, and how much there may be.

Clients and workers of the same machine use the directory themselves, if there is one. Others send
and read parts, each bounded, so a turn is short. Knows no messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct, structs

from taskyard.core.effects import Refused
from taskyard.core.limits import REFUSED_TASKS_MAX, SECOND_NS
from taskyard.core.model import Refusal, RefusedTask, shown
from taskyard.core.task_inputs import PICKLE_MARK, blobs_in
from taskyard.core.values import StoreReply, ValuePart, ValueReceived
from taskyard.errors import BytesNotStored, JournalFailed, UserError
from taskyard.journal.blob_files import REMOVED_HINT, BlobFiles, StoreTerms
from taskyard.journal.blob_names import blobs_named, blobs_needed
from taskyard.journal.blobs import BytesDiffer, is_name, length_of, short_name, upload_of
from taskyard.wire.value_names import StoreDocument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.effects import Effect
    from taskyard.core.events import SubmitRequested
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord
    from taskyard.journal.blobs import BlobStore

#: How long a blob may wait for the task that names it. A client stores it before it submits the
#: task, and may wait for a broker in between.
GRACE_NS: Final = 3600 * SECOND_NS


class BlobLimits(Struct, frozen=True):
    """How much is kept, and how long."""

    #: 0: no limit.
    quota_bytes: int = 0
    #: How long blobs of ended tasks are kept. None: for ever.
    keep_ns: int | None = None
    #: How long a blob is kept that no task names.
    grace_ns: int = GRACE_NS


class BrokerBlobs:
    """The blobs of one broker."""

    def __init__(
        self,
        store: BlobStore,
        identity: str,
        limits: Callable[[], BlobLimits],
        *,
        durable: bool = True,
        shared: bool = False,
    ) -> None:
        """`limits` may change. A `shared` directory is meant to be mounted by other machines."""
        self.store = store
        self.limits = limits
        #: The directory that other processes may use themselves.
        self._files = store if isinstance(store, BlobFiles) else None
        self._terms = StoreTerms(identity, durable=durable)
        self._shared = shared
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

    def problem(self) -> str:
        """Return why nothing more is accepted. Empty: it is."""
        quota, used = self.limits().quota_bytes, self.store.bytes_used
        if not quota or used < quota:
            return ""
        return (
            f"blobs: {used:,} bytes reach the quota of {quota:,} "
            "(remove some with `taskyard clean`, or raise blobs.quota)"
        )

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

    # In turns.

    def missing_in(self, event: SubmitRequested) -> Refused | None:
        """Refuse a submission that names blobs which are not here. The others count as used."""
        submission, faults = event.submission, []
        payloads = submission.payloads
        if not any(payload.startswith(PICKLE_MARK) for payload in payloads):
            return None
        lacking = [[*filter(self._lacks, blobs_in(payload))] for payload in payloads]
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

    def _lacks(self, name: str) -> bool:
        return not self.store.touch(name)

    def note(self, records: Sequence[AnyRecord]) -> None:
        """Note before a commit that the blobs in its records are used. Raises `JournalFailed`.

        So no sweep that began before removes them.
        """
        for record in records:
            for name, _ in blobs_named(record):
                try:
                    self.store.touch(name)
                except OSError as error:
                    raise JournalFailed(f"{short_name(name)}: {error.strerror}") from error

    def fill(
        self,
        effect: StoreReply | ValuePart | ValueReceived,
        ledger: Ledger,
        result_of: Callable[[bytes], Content | None],
    ) -> Effect:
        """Complete a reply about blobs. Return it, or a refusal.

        `result_of` returns the result of a task that is done.
        """
        if isinstance(effect, StoreReply):
            return self._described(effect)
        if isinstance(effect, ValuePart):
            self._read(effect, ledger, result_of)
            return effect
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
            if self._shared or not effect.with_key:
                directory = str(self._files.directory.resolve())
        document = StoreDocument(directory, self._terms.identity, shared=self._shared)
        effect.document = msgspec.json.encode(document)
        return effect

    def _read(
        self, effect: ValuePart, ledger: Ledger, result_of: Callable[[bytes], Content | None]
    ) -> None:
        name = effect.value.decode(errors="replace")
        if not is_name(name):
            effect.problem = "not the name of a blob"
        elif effect.held and name not in blobs_needed(ledger.tasks[effect.held], result_of):
            effect.problem = f"{short_name(name)}: not of this task"
        else:
            try:
                found = self.store.read(name, effect.offset, effect.count)
            except (OSError, UserError) as error:  # a bad disk, a link
                text = getattr(error, "strerror", None) or error
                effect.problem = f"{short_name(name)}: {text}"
                return
            if found is None:
                effect.problem = f"{short_name(name)}: not at the broker ({REMOVED_HINT})"
            else:
                effect.data = found[0]

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
        key, bytes_total, store = upload_of(name), length_of(name), self.store
        if store.touch(name):
            effect.received = bytes_total
            return False
        effect.received = store.length(key)
        if effect.data and effect.offset <= effect.received < bytes_total:
            self._check_room(bytes_total - effect.received, has_quota=not effect.of_worker)
            data = effect.data[: bytes_total - effect.offset]
            try:
                effect.received = store.append(key, effect.offset, data)
            except BytesDiffer:
                return True
        return effect.received >= bytes_total and not store.seal(key, name)

    def _check_room(self, bytes_more: int, *, has_quota: bool) -> None:
        if self._files is not None:
            self._files.check_room(bytes_more, self._terms, has_quota=has_quota)
        elif has_quota and (problem := self.problem()):
            raise BytesNotStored(problem)
