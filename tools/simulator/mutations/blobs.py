"""Planted bugs of blobs: how they are stored, named, read and removed.

The checkers must catch each of them, as in `core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.mutations.registry import (
    DECIDERS,
    mutation_for_blobs,
    mutation_for_blobs_of_pair,
    no_op,
    patched,
    patched_item,
)
from taskyard.broker import blob_retention, contents
from taskyard.broker.blob_retention import BlobRetention
from taskyard.broker.blobs import BrokerBlobs
from taskyard.broker.contents import OutputWriter, PayloadReader
from taskyard.core import effects, events, identity, results
from taskyard.core.blobs import Blob, blob_name
from taskyard.core.model import OutputChunk
from taskyard.journal import blobs
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import BlobStore, StreamHashes, StreamKey
from taskyard.postgresql.blobs import BlobRows
from taskyard.worker.output import OutputSpool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.core.blobs import Content
    from taskyard.core.context import Context
    from taskyard.core.entities import Task

# ruff: noqa: ANN401 - a broken function takes whatever the sound one takes, and is inside


# The directory.


@mutation_for_blobs
def blob_sealed_before_sync() -> Iterator[None]:
    """Give a stream the name of its content before its bytes are synced."""
    with patched(BlobFiles, "_sync", no_op):
        yield


@mutation_for_blobs
def blob_name_not_synced() -> Iterator[None]:
    """Do not sync the directory that a blob gets its name in."""

    def sync_folder(self: BlobFiles, folder: Path) -> None:
        self._synced.add(folder.name)

    with patched(BlobFiles, "_sync_folder", sync_folder):
        yield


@mutation_for_blobs
def blob_kept_after_failed_sync() -> Iterator[None]:
    """Sync a stream once more whose sync has failed, and take it for durable then."""

    def sync(_self: BlobFiles, _key: StreamKey, stream: Any) -> None:
        disk = _self.directory.disk  # type: ignore[attr-defined]  # it is simulated
        disk.sync(stream.descriptor)

    with patched(BlobFiles, "_sync", sync):
        yield


@mutation_for_blobs
def blob_digest_unchecked() -> Iterator[None]:
    """Give a stream a name without a look at its bytes."""
    sound = BlobStore.seal

    def seal(self: BlobStore, key: StreamKey, name: str) -> bool:
        with patched(StreamHashes, "digest", lambda *_: bytes.fromhex(name[:64])):
            return sound(self, key, name)

    with patched(BlobStore, "seal", seal):
        yield


@mutation_for_blobs
def output_written_without_offset() -> Iterator[None]:
    """Append a chunk of output to its file, wherever it belongs."""
    sound = BlobStore.append

    def append(self: BlobStore, key: StreamKey, _offset: int, data: bytes) -> int:
        return sound(self, key, self.length(key), data)

    with patched(BlobStore, "append", append):
        yield


# What is kept, and what is removed.


@mutation_for_blobs
def report_committed_without_seal() -> Iterator[None]:
    """Commit a report that names a stream which is not sealed."""
    with patched(OutputWriter, "end", no_op):
        yield


@mutation_for_blobs
def payload_committed_without_seal() -> Iterator[None]:
    """Commit a submission whose payload is not stored."""
    with patched(contents, "_store", no_op):
        yield


@mutation_for_blobs
def payload_of_another_task_sent() -> Iterator[None]:
    """Send a worker the first payload that the turn has read, for every task."""
    sound = PayloadReader.whole

    def whole(self: PayloadReader, payload: Content) -> bytes:
        found = sound(self, payload)
        return next(iter(self.read.values()), found) if isinstance(payload, Blob) else found

    with patched(PayloadReader, "whole", whole):
        yield


@mutation_for_blobs
def sweep_ignores_payloads() -> Iterator[None]:
    """Remove payloads of tasks that may still run."""
    sound = blobs.blobs_needed

    def needed(task: Task, result_of: Any) -> set[str]:
        own = {blob_name(task.payload)} if isinstance(task.payload, Blob) else set()
        return sound(task, result_of) - own

    with patched(blob_retention, "blobs_needed", needed):
        yield


@mutation_for_blobs
def stale_chunk_written() -> Iterator[None]:
    """Write a chunk of a stale attempt into the stream of the running attempt."""
    decide, sound = DECIDERS[events.OutputAppended], effects.OutputWritten

    def appended(context: Context, event: events.OutputAppended) -> None:
        columns: Any = (event.attempts, event.streams, event.offsets, event.data)

        def written(worker: bytes, request: int, chunks: Any, missing: Any) -> Any:
            for name, attempt, *rest in zip(event.names, *columns, strict=True):
                task = context.ledger.tasks.get(name)
                if (name, attempt) in missing and task is not None and task.lease is not None:
                    campaign = task.terms.campaign
                    own = identity.split(name, campaign)
                    chunks.append(OutputChunk(campaign, own, task.attempt, *rest))
            return sound(worker, request, chunks, missing)

        with patched(results, "OutputWritten", written):
            decide(context, event)

    with patched_item(DECIDERS, events.OutputAppended, appended):
        yield


@mutation_for_blobs
def sweep_ignores_index() -> Iterator[None]:
    """Remove blobs that only ended tasks in the index name."""
    with patched(BlobRetention, "_listed", lambda *_: set()):
        yield


@mutation_for_blobs
def sweep_ignores_rows() -> Iterator[None]:
    """Remove blobs that only rows name which the index does not cover."""
    with patched(BlobRetention, "_add_recent", lambda *_: iter(())):
        yield


@mutation_for_blobs
def sweep_ignores_waiting_tasks() -> Iterator[None]:
    """Remove blobs that only tasks name which may still run."""
    with patched(BlobRetention, "_add_needed", lambda *_: iter(())):
        yield


@mutation_for_blobs
def sweep_without_grace() -> Iterator[None]:
    """Remove blobs whose task may be on its way."""
    with patched(BlobRetention, "_is_old", lambda *_: True):
        yield


@mutation_for_blobs
def sweep_never_runs() -> Iterator[None]:
    """Keep blobs for ever that nothing names."""
    with patched(BlobRetention, "_sweep", lambda *_: iter(())):
        yield


@mutation_for_blobs
def refused_output_not_sent_again() -> Iterator[None]:
    """Forget output that the broker had no room for."""
    with patched(OutputSpool, "take_back", lambda *_: []):
        yield


@mutation_for_blobs
def argument_not_checked() -> Iterator[None]:
    """Accept a task that names bytes which are not there."""
    with patched(BrokerBlobs, "missing_in", no_op):
        yield


@mutation_for_blobs
def result_not_checked() -> Iterator[None]:
    """Accept a result that names bytes which are not there."""
    with patched(contents, "return_unstored", no_op):
        yield


# The tables.


@mutation_for_blobs_of_pair
def output_lost_in_takeover() -> Iterator[None]:
    """Acknowledge output that is only in the memory of the broker."""
    with patched(OutputWriter, "flush", no_op):
        yield


@mutation_for_blobs_of_pair
def length_kept_from_former_term() -> Iterator[None]:
    """Take a stream for empty whose first bytes a former broker has written."""

    def length(self: BlobRows, key: StreamKey) -> int:
        return self._lengths.setdefault(key, 0)

    with patched(BlobRows, "length", length):
        yield
