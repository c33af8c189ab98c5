"""Values at the broker: parts for those that can't use the directory, and removal of unused ones.

Reads and writes parts in turns, each bounded. A thread checks and syncs a value that has arrived,
which takes longer. Its sender asks until that is done. Clients and workers of the same machine use
the directory themselves. Knows no messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct, structs

from taskyard.broker.value_references import LOG_FILE, ReferenceFile, ValueReferences
from taskyard.core.effects import Refused
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.core.task_inputs import needed
from taskyard.core.values import StoreReply, ValuePart, ValueReceived
from taskyard.errors import JournalFailed, TaskyardError, UserError, ValueNotStored
from taskyard.journal.files import open_regular
from taskyard.journal.value_files import (
    BYTES_MIN,
    StoreTerms,
    ValueFiles,
    digest_of,
    is_name,
    length_of,
    short_name,
)
from taskyard.wire.value_names import StoreDocument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from taskyard.broker.value_references import ReferenceLog
    from taskyard.core.effects import Effect
    from taskyard.core.ledger import Ledger
    from taskyard.core.records import AnyRecord
    from taskyard.net.protocols import Clock

logger = logging.getLogger("taskyard.broker")

#: Files looked at in one step: a millisecond or two.
FILES_PER_STEP: Final = 100

#: How often values are counted and unused ones are removed.
SCAN_NS: Final = 10 * SECOND_NS

#: How long a value may wait for the task that names it. A client stores it before it submits the
#: task, and may wait for a broker in between.
GRACE_NS: Final = 3600 * SECOND_NS

_NONE_TEXT: Final = "values: this broker keeps none"


class ValueLimits(Struct, frozen=True):
    """Which buffers become values, and how much is kept, and how long."""

    bytes_min: int = BYTES_MIN
    #: 0: no limit.
    quota_bytes: int = 0
    #: How long values of results are kept. None: for ever.
    keep_ns: int | None = None
    #: How long a value is kept that no task names.
    grace_ns: int = GRACE_NS


class ValuePlace(NamedTuple):
    """Values and references that are elsewhere than in a directory."""

    files: ValueFiles
    log: ReferenceLog


class BrokerValues:
    """The values of one broker."""

    def __init__(
        self,
        place: Path | ValuePlace,
        identity: str,
        limits: Callable[[], ValueLimits],
        *,
        durable: bool = True,
        shared: bool = False,
    ) -> None:
        """Use a directory, which is created with the first request, or another place.

        `limits` may change.
        """
        #: Peers of this machine may use the directory themselves.
        self._is_direct = not isinstance(place, ValuePlace)
        if not isinstance(place, ValuePlace):
            place = ValuePlace(ValueFiles(place), ReferenceFile(place / LOG_FILE))
        self.files, self._log = place
        self._terms = StoreTerms(identity, durable=durable)
        self._limits = limits
        self._shared = shared
        self._check_owner()
        #: None: the directory is not there yet, so nothing can name a value.
        self.references: ValueReferences | None = None
        #: Bytes of all values, as of the last count.
        self.bytes_used = 0
        #: Bytes that arrived since the start.
        self.bytes_written = 0
        #: Values that a thread checks and syncs, and why others were refused.
        self._finishing: set[str] = set()
        self._refused: dict[str, str] = {}
        if not self._is_direct or self.files.directory.exists():
            self._open()

    def _check_owner(self) -> None:
        found = self.files.terms()
        if found is not None and found.identity != self._terms.identity:
            raise UserError(
                f"{self.files.directory}: has the values of another broker (give each broker its "
                "own values.directory)"
            )

    def _open(self) -> None:
        """Create the directory if need be, and know its references from now on."""
        if self.references is None:
            self.update_terms()
            self.references = ValueReferences(self._log)

    def update_terms(self) -> None:
        """Write the terms if they have changed, by the limits and the bytes used."""
        limits = self._limits()
        terms = structs.replace(
            self._terms,
            bytes_min=limits.bytes_min,
            problem=_quota_problem(self.bytes_used, limits),
            bytes_left=limits.quota_bytes - self.bytes_used if limits.quota_bytes else None,
        )
        if terms != self._terms or self.references is None:
            self.files.create(terms)
            self._terms = terms

    # In turns.

    def note(self, records: Sequence[AnyRecord], ledger: Ledger) -> None:
        """Make the references in records durable, before their commit. Raises `JournalFailed`."""
        if self.references is None:
            return
        try:
            for name in self.references.note(records, ledger):
                self.files.touch(name)  # seen by `taskyard clean`
        except OSError as error:
            raise JournalFailed(f"references to values: {error.strerror}") from error

    def fill(self, effect: StoreReply | ValuePart | ValueReceived) -> Effect:
        """Complete a reply about values. Return it, or a refusal."""
        if isinstance(effect, StoreReply):
            return self._described(effect)
        if isinstance(effect, ValuePart):
            self._read(effect)
            return effect
        self.bytes_written += len(effect.data)
        return self._received(effect)

    def _described(self, effect: StoreReply) -> Effect:
        try:
            self._open()
        except OSError as error:
            text = f"{self.files.directory}: {error.strerror}"
            return Refused(effect.client, effect.request, Refusal.FULL, text)
        is_named = self._is_direct and (self._shared or not effect.with_key)
        document = StoreDocument(
            str(self.files.directory.resolve()) if is_named else "",
            self._terms.identity,
            self._terms.bytes_min,
            shared=self._shared,
        )
        effect.document = msgspec.json.encode(document)
        return effect

    def _read(self, effect: ValuePart) -> None:
        name = effect.value.decode(errors="replace")
        if not is_name(name):
            effect.problem = "value: not the name of a value"
        elif not self._may_read(effect.header, name):
            effect.problem = f"value {short_name(name)}: not one of this task"
        else:
            try:
                data = self.files.read(name, effect.offset, effect.count)
            except (OSError, UserError) as error:  # a bad disk, a link
                text = getattr(error, "strerror", None) or error
                effect.problem = f"value {short_name(name)}: {text}"
                return
            if data is None:
                hint = "`taskyard clean` and values.keep remove values"
                effect.problem = f"value {short_name(name)}: not at the broker ({hint})"
            else:
                effect.data = data

    def _may_read(self, header: bytes | None, name: str) -> bool:
        if header is None or name.encode() in header:
            return True
        references = self.references
        return references is not None and references.is_result_of(name, needed(header))

    def _received(self, effect: ValueReceived) -> Effect:
        name = effect.value.decode(errors="replace")
        if not is_name(name):
            text = "value: not the name of a value"
            return Refused(effect.client, effect.request, Refusal.MALFORMED, text)
        try:
            self._open()
            self._append(effect, name)
        except (ValueNotStored, OSError, UserError) as error:
            text = f"value {short_name(name)}: {getattr(error, 'strerror', None) or error}"
            return Refused(effect.client, effect.request, Refusal.FULL, text)
        problem = self._refused.pop(name, "")
        if problem:
            return Refused(effect.client, effect.request, Refusal.CONFLICT, problem)
        effect.data = b""
        return effect

    def _append(self, effect: ValueReceived, name: str) -> None:
        """Write a part of a value, unless all of it is there."""
        bytes_total = length_of(name)
        effect.syncing = name in self._finishing
        if effect.syncing or self.files.touch(name):
            effect.received = bytes_total
            return
        path = self.files.unfinished_path(f"{name}.part")
        size = path.stat().st_size if path.exists() else 0
        data = memoryview(effect.data)[: bytes_total - size]
        if data and effect.offset == size:
            self.files.check_room(bytes_total - size, self._terms)
            size = _append_to(path, data, size)
        effect.received = size
        if size == bytes_total:
            effect.syncing = True
            self._finishing.add(name)
            threading.Thread(
                target=self._finish, args=(path, name), name="taskyard-value", daemon=True
            ).start()

    def _finish(self, path: Path, name: str) -> None:
        """Check and sync a value that has arrived, in a thread."""
        try:
            descriptor = open_regular(path, os.O_RDWR)
            try:
                is_right = name.startswith(digest_of(descriptor))
                if is_right and self._terms.durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_right:
                self.files.finish(path, name)
            else:
                path.unlink()
                self._refused[name] = f"value {short_name(name)}: its content is another one"
        except (OSError, TaskyardError) as error:
            text = getattr(error, "strerror", None) or error
            self._refused[name] = f"value {short_name(name)}: {text}"
            with contextlib.suppress(OSError):
                path.unlink()
        finally:
            self._finishing.discard(name)


def _append_to(path: Path, data: memoryview, size: int) -> int:
    """Append bytes to a file of this size, all or none. Return the new size."""
    end, descriptor = size, open_regular(path, os.O_WRONLY | os.O_CREAT)
    try:
        while data:
            count = os.pwrite(descriptor, data, end)
            data, end = data[count:], end + count
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)
    return end


class ValueRetention:
    """Counts values and removes those that nothing names, one step after each turn."""

    def __init__(
        self,
        values: BrokerValues,
        ledger: Ledger,
        clock: Clock,
        limits: Callable[[], ValueLimits],
        is_archived: Callable[[bytes], bool] = lambda _name: False,
    ) -> None:
        """`is_archived` returns whether a task that is not in memory is done."""
        self._values = values
        self._ledger = ledger
        self._clock = clock
        self._limits = limits
        self._is_archived = is_archived
        self._started_ns = clock.monotonic_ns()
        self._scan: Iterator[None] | None = None
        self._scan_ended_ns: int | None = None

    def run_step(self) -> int | None:
        """Run one step. Return the time until the next one, or None."""
        if self._values.references is None:
            return None
        if self._scan is None:
            now_ns = self._clock.monotonic_ns()
            interval_ns = min(SCAN_NS, max(self._limits().grace_ns, SECOND_NS // 10))
            if self._scan_ended_ns is not None and self._scan_ended_ns + interval_ns > now_ns:
                return self._scan_ended_ns + interval_ns - now_ns
            self._scan = self._scanned(self._values.references)
        try:
            has_ended = next(self._scan, self) is self
        except OSError as error:  # a full disk: the next scan tries again
            logger.warning("%s: %s", self._values.files.directory, error.strerror)
            has_ended = True
        if has_ended:
            self._scan, self._scan_ended_ns = None, self._clock.monotonic_ns()
        return 0

    def _scanned(self, references: ValueReferences) -> Iterator[None]:
        """Count all values and remove unused ones, in steps."""
        limits, values = self._limits(), self._values
        bytes_used = removed = bytes_removed = 0
        missing = set(references.known())
        for count, file in enumerate(values.files.walk()):
            if self._is_unused(file.name, file.used_ns, references, limits):
                since_ns = self._clock.wall_ns() - limits.grace_ns
                if self._remove(file.name, since_ns):
                    removed += 1
                    bytes_removed += file.bytes_total
                    continue
            missing.discard(file.name)
            bytes_used += file.bytes_total
            if count % FILES_PER_STEP == FILES_PER_STEP - 1:
                yield
        bytes_used += self._remove_unfinished(limits)
        references.forget_missing(name for name in missing if not values.files.has(name))
        if removed:
            logger.info("removed %d unused values of %d bytes", removed, bytes_removed)
        values.bytes_used = bytes_used
        values.update_terms()

    def _is_unused(
        self, name: str, used_ns: int, references: ValueReferences, limits: ValueLimits
    ) -> bool:
        """Return whether a value may be removed."""
        # After a start, clients may still have tasks that name it.
        is_new = self._clock.monotonic_ns() - self._started_ns < limits.grace_ns
        age_ns = self._clock.wall_ns() - used_ns
        if is_new or references.is_damaged or age_ns < limits.grace_ns:
            return False
        if references.may_run(name, self._ledger):
            return False
        if limits.keep_ns is not None and age_ns > limits.keep_ns:
            return True
        return not references.has_result(name, self._ledger, self._is_archived)

    def _remove(self, name: str, since_ns: int) -> bool:
        try:
            return self._values.files.remove(name, since_ns)
        except OSError as error:
            logger.warning("value %s: not removed: %s", short_name(name), error.strerror)
            return False

    def _remove_unfinished(self, limits: ValueLimits) -> int:
        """Remove files that a process left behind. Return the bytes of the others."""
        bytes_left = 0
        for file in self._values.files.unfinished():
            if self._clock.wall_ns() - file.used_ns < limits.grace_ns:
                bytes_left += file.bytes_total
                continue
            with contextlib.suppress(OSError):
                file.path.unlink()
        return bytes_left


def _quota_problem(bytes_used: int, limits: ValueLimits) -> str:
    if not limits.quota_bytes or bytes_used < limits.quota_bytes:
        return ""
    return (
        f"values: {bytes_used:,} bytes reach the quota of {limits.quota_bytes:,} "
        "(remove some with `taskyard clean`, or raise values.quota)"
    )
