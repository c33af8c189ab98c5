"""The checker of blobs: what durable records name is kept, whole, and what nothing names goes.

Reads the records, and the contents of the store by a way of its own. Shares no code with the
broker's retention: neither the rules, nor the parser of payloads.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

from simulator.models import DONE, ENDED, LEASED, Violation
from simulator.outputs import (
    PRINTED,
    heading,
    name_of,
    named_by,
    printed_by,
    result_of,
    stored_as,
)
from simulator.plan import SECOND_NS
from taskyard.core import identity
from taskyard.core import records as r
from taskyard.core.blobs import Blob, Content, length_of, text_of
from taskyard.core.model import Stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from simulator.clock import Timeline
    from simulator.outputs import BlobPlan
    from simulator.plan import Plan
    from simulator.reference_model import ReferenceModel

#: A name and an attempt, and a stream of that.
Attempt = tuple[bytes, int]
StreamId = tuple[bytes, int, int]

#: Arguments can be stored, and their call submitted, within this.
CALM_GRACE_NS: Final = 3 * SECOND_NS

#: Names in error messages.
_SHOWN: Final = 16


class BlobContents(Protocol):
    """The store, as the checker reads it."""

    def content(self, name: str) -> bytes | None:
        """Return the bytes of a blob. None: it is not there."""
        ...

    def names(self) -> list[str]:
        """Return the names of all blobs."""
        ...


class BlobChecker:
    """Knows which blobs must be there, and compares the output in records with what was printed."""

    def __init__(self, plan: Plan, model: ReferenceModel, timeline: Timeline) -> None:
        self._seed = plan.seed
        self._model = model
        self._timeline = timeline
        #: The store, and how blobs are kept. None: the schedule has none.
        self.store: BlobContents | None = None
        self.plan: BlobPlan | None = None
        #: The wall clock jumps, so that a blob may seem to be old.
        self._jumps = plan.faults.clock_jump > 0
        #: Blobs that arguments of tasks name, and the tasks whose results these need.
        self._arguments: dict[bytes, tuple[list[str], list[bytes]]] = {}
        #: Payloads that are blobs.
        self._payloads: dict[bytes, list[str]] = {}
        #: Blobs of results, and of the output of attempts.
        self._results: dict[bytes, list[str]] = {}
        self._outputs: dict[Attempt, list[str]] = {}
        #: Blobs of results of tasks that were submitted again after their end.
        self._former: dict[bytes, list[str]] = {}
        #: Attempts of which a record has no stdout, although they printed some.
        self._silent: dict[Attempt, None] = {}
        #: When a durable record last named a blob.
        self._named_ns: dict[str, int] = {}
        #: Blobs that were removed while nothing needed them, or are lost with unsynced bytes.
        self.gone: dict[str, None] = {}
        #: Streams that lost bytes in a power cut. Their workers can't send them again.
        self.torn: dict[StreamId, None] = {}
        #: Attempts whose results never arrived at the broker.
        self.unstored: dict[Attempt, None] = {}
        #: Whether the disk was ever full: then programs may be stopped, and submissions refused.
        self.was_full = False

    def may_lack_result(self, key: Attempt) -> bool:
        """Return whether the broker may lack the result of an attempt that is done."""
        return key in self.unstored or name_of(result_of(key[0])) in self.gone

    # Records.

    def on_durable(self, record: r.AnyRecord) -> None:
        """Note what a record names. All of it must be there."""
        if isinstance(record, r.Submitted):
            self._submitted(record)
        elif isinstance(record, r.Finished):
            for index, key in enumerate(zip(record.names, record.attempts, strict=True)):
                self._finished(key, b"" if record.results is None else record.results[index])
        elif isinstance(record, r.Failed | r.Postponed):
            for key in zip(record.names, record.attempts, strict=True):
                if key in self._silent:
                    raise Violation("output", f"{key} failed, and what it printed is lost")
        elif isinstance(record, r.Progressed) and record.stderrs is not None:
            columns = (record.names, record.attempts, record.texts, record.stderrs)
            for name, attempt, stdout, stderr in zip(*columns, strict=True):
                self._printed((name, attempt), (stdout, stderr))

    def _finished(self, key: Attempt, content: Content) -> None:
        name, attempt = key
        self._former.setdefault(name, []).extend(self._results.get(name, ()))
        self._results[name] = found = named_by(content)
        self._check_named(found, f"result of {name!r}", (name, attempt, Stream.STDOUT))
        if text_of(content).startswith(PRINTED):
            self._check_printed(name, attempt, Stream.STDOUT, content)
        self._silent.pop(key, None)

    def _printed(self, key: Attempt, streams: tuple[Content, Content]) -> None:
        if not streams[0] and printed_by(self._seed, *key, Stream.STDOUT):
            self._silent[key] = None  # it is the result of a task that is done
        for stream, content in zip(Stream, streams, strict=True):
            if content or stream is Stream.STDERR:
                self._check_printed(*key, stream, content)
            self._check_named(named_by(content), f"output of {key}", (*key, stream))
        self._outputs[key] = [name for one in streams for name in named_by(one)]

    def _submitted(self, record: r.Submitted) -> None:
        submission = record.submission
        for index, name in enumerate(submission.names):
            payload = submission.payload_of(index)
            first = heading(text_of(payload))
            campaign = submission.terms_of(index).campaign
            needed = [self._meant(campaign, one.encode()) for one in first.get("results", ())]
            values = first.get("values", [])
            self._arguments[name] = values, needed
            self._payloads[name] = own = stored_as(payload)
            self._check_named([*own, *values], f"argument of {name!r}", None)

    def _meant(self, campaign: bytes, name: bytes) -> bytes:
        """Return the task that a call needs: in its own campaign, if there is one."""
        own = identity.spelling(campaign, name)
        return own if own in self._arguments else name

    def _check_named(self, names: Iterable[str], about: str, stream: StreamId | None) -> None:
        """Require that the blobs of a new record are there. An argument is never excused."""
        if self.store is None:
            return
        for name in names:
            self._named_ns[name] = self._timeline.now_ns
            content = self.store.content(name)
            if content is None and (name in self.gone or stream in self.torn) and stream:
                self.gone[name] = None
                continue
            self._check(name, content, about)
            self.gone.pop(name, None)

    def _check(self, name: str, content: bytes | None, about: str) -> None:
        if content is None:
            raise Violation("blobs", f"{about}: {name[:_SHOWN]} is not there")
        if f"{sha256(content).hexdigest()}-{len(content)}" != name:
            raise Violation("blobs", f"{about}: {name[:_SHOWN]} has {len(content)} other bytes")

    def _check_printed(self, name: bytes, attempt: int, stream: Stream, content: Content) -> None:
        """Require that the output of an attempt is what it printed."""
        printed = printed_by(self._seed, name, attempt, stream)
        whole, kept = length_of(content), text_of(content)
        is_whole = isinstance(content, Blob) and content.digest == sha256(printed).digest()
        is_cut = isinstance(content, Blob) and not content.digest
        is_stopped = self.was_full and whole < len(printed)
        may_be_cut = is_cut and (is_stopped or self._is_torn_attempt((name, attempt)))
        if not is_whole and kept != printed and not may_be_cut:
            text = f"{name!r}, attempt {attempt}: printed {len(printed)} bytes to {stream.name}"
            raise Violation("output", f"{text}, and {len(kept)} of {whole} are kept")

    def _is_torn_attempt(self, key: Attempt) -> bool:
        """Return whether an attempt printed what a power cut took."""
        return any(one[:2] == key for one in self.torn)

    def whole_result(self, name: bytes, attempt: int, content: Content) -> bytes:
        """Return all of a result that is a blob, as its client gets it."""
        printed = printed_by(self._seed, name, attempt, Stream.STDOUT)
        if isinstance(content, Blob) and content.digest == sha256(printed).digest():
            return printed
        for blob in stored_as(content):
            found = None if self.store is None else self.store.content(blob)
            if found is not None and name_of(found) == blob:
                return found
        return text_of(content)

    def has_printed(self, name: bytes, attempt: int, begin: bytes) -> bool:
        """Return whether an attempt's stdout begins so. A power cut may leave zeros at its end."""
        if (name, attempt, Stream.STDOUT) in self.torn:
            begin = begin.rstrip(b"\0")
        return printed_by(self._seed, name, attempt, Stream.STDOUT).startswith(begin)

    # What must be there.

    def _needed(self) -> Iterator[tuple[str, str]]:
        """Yield the blobs of tasks that may still run, each with its use."""
        for name, (values, others) in self._arguments.items():
            if self._model.tasks[name].state in ENDED:
                continue
            yield from ((value, f"payload of {name!r}") for value in self._payloads[name])
            yield from ((value, f"argument of {name!r}") for value in values)
            for other in others:
                task_model = self._model.tasks.get(other)
                if task_model is not None and task_model.state is DONE:
                    for value in self._results.get(other, ()):
                        yield value, f"result of {other!r}, which {name!r} needs"

    def _kept(self) -> Iterator[tuple[str, str]]:
        """Yield the blobs of results and outputs, which an age may remove."""
        for name, values in self._results.items():
            if self._model.tasks[name].state is DONE:
                yield from ((value, f"result of {name!r}") for value in values)
        for key, values in self._outputs.items():
            yield from ((value, f"output of {key}") for value in values)

    def _required(self) -> Iterator[tuple[str, str]]:
        yield from self._needed()
        yield from self._kept()

    def check_all(self, when: str) -> None:
        """Require that everything that must be there is there, with the right bytes."""
        if self.store is None:
            return
        for name, about in dict(self._required()).items():
            if name not in self.gone:
                self._check(name, self.store.content(name), f"{when}: {about}")

    def on_removed(self, name: str, unused_ns: int) -> None:
        """Require that a removed blob was not needed, and not used for some time."""
        if self.plan is None:
            return
        needed, kept = dict(self._needed()), dict(self._kept())
        if name in needed and name not in self.gone:
            raise Violation("blobs", f"{needed[name]}: {name[:_SHOWN]} was removed")
        if name in kept and name not in self.gone:
            age_ns = self._timeline.now_ns - self._named_ns[name]
            if self.plan.keep_ns is None or age_ns < self.plan.keep_ns:
                raise Violation("blobs", f"{kept[name]}: {name[:_SHOWN]} was removed")
        if unused_ns < self.plan.grace_ns and not self._jumps:
            raise Violation("grace", f"{name[:_SHOWN]} was used {unused_ns} ns ago and removed")
        self.gone[name] = None

    def check_unused(self, in_rows: Sequence[r.AnyRecord]) -> None:
        """Require that everything else is gone. Records of rows that are kept may name more."""
        if self.store is None or self.plan is None:
            return
        known = {name for name, _ in self._required()}
        for name, values in self._results.items():
            known.update(self._former.get(name, ()))  # the index may have its former end
            if self._model.tasks[name].state not in ENDED:
                known.update(values)
        for record in in_rows:
            known.update(self._names_in(record))
        unused = [name for name in self.store.names() if name not in known]
        if unused:
            raise Violation("unused", f"{unused[0]} is kept, and nothing names it")

    def _names_in(self, record: r.AnyRecord) -> Iterator[str]:
        if isinstance(record, r.Submitted):
            for index in range(len(record.submission.names)):
                yield from named_by(record.submission.payload_of(index))
        elif isinstance(record, r.Finished):
            for content in record.results or ():
                yield from named_by(content)
        elif isinstance(record, r.Progressed):
            for content in (*record.texts, *(record.stderrs or ())):
                yield from named_by(content)

    # Peers.

    def values_of(self, name: bytes) -> list[str]:
        """Return the blobs that a worker of a task reads: its arguments, and results it needs."""
        values, others = self._arguments[name]
        return [*values, *(one for other in others for one in self._results.get(other, ()))]

    def on_refused(self, worker: bytes, key: Attempt, name: str, why: str) -> None:
        """Require that a worker which holds a task can read what the task needs.

        Unless what it needs runs again by now.
        """
        task_model = self._model.tasks[key[0]]
        if any(self._model.tasks[one].state is not DONE for one in self._arguments[key[0]][1]):
            return
        holds = (task_model.state, task_model.attempt, task_model.worker) == (
            LEASED,
            key[1],
            worker,
        )
        if holds and name not in self.gone:
            raise Violation(
                "blobs", f"{worker!r} holds {key} and can't read {name[:_SHOWN]}: {why}"
            )

    def on_refused_arguments(self, name: bytes) -> None:
        """Require that arguments are not swept soon after they were stored."""
        if self.plan is not None and self.plan.grace_ns >= CALM_GRACE_NS and not self._jumps:
            raise Violation("blobs", f"the arguments of {name!r} were swept before it was there")

    def on_lost_result(self, name: bytes, why: str) -> None:
        """Require that a client can fetch a long result, unless the task runs again by now."""
        is_done = self._model.tasks[name].state is DONE
        if is_done and not any(value in self.gone for value in self._results.get(name, ())):
            raise Violation("blobs", f"the result of {name!r} can't be fetched: {why}")

    def is_torn(self, name: bytes) -> bool:
        """Return whether a stream of a task lost bytes in a power cut."""
        return any(key[0] == name for key in self.torn)
