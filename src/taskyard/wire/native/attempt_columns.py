"""Results, output and measurements of attempts in native messages, as columns.

Decoders are total: they return a value or raise `Malformed`. Owns the meaning of these fields and
their limits, not the requests around them. On the wire an exit is the status plus one, or minus the
signal, so that 0 means unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.blobs import DIGEST_BYTES, Blob, texts_of
from taskyard.core.limits import NAME_BYTES_MAX, NOTE_BYTES_MAX, NUMBER_MAX
from taskyard.core.model import OutputColumns, Stream
from taskyard.core.runs import RunColumns
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence


if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.blobs import Content

    #: Fields of a Batch.
    Columns = dict[str, Sequence[bytes] | Sequence[int]]

_Q: Final = pb.QueryMsg

BAD_LENGTHS: Final = "columns of a batch: must have one length, or be absent"

#: Stands for bytes among blobs: no length and no digest.
_WHOLE: Final = Blob(b"", 0)


class StreamChunk(Struct, frozen=True):
    """Some bytes of a stream of an attempt, and where they begin."""

    #: The task's full name.
    name: bytes
    attempt: int
    stream: Stream
    offset: int
    data: bytes


# Results and streams: bytes or the ends of a blob, with its length and digest in columns beside.


def encode_contents(field: str, contents: Sequence[Content]) -> Columns:
    """Encode a column of contents as fields of a Batch. Only blobs have a length and a digest."""
    if Blob not in {*map(type, contents)}:  # nearly always
        return {field: contents}  # type: ignore[dict-item]  # all are bytes
    blobs = [one if isinstance(one, Blob) else _WHOLE for one in contents]
    columns: Columns = {
        field: texts_of(contents),
        f"{field}_bytes_total": [one.length for one in blobs],
    }
    if any(one.digest for one in blobs):
        columns[f"{field}_digest"] = [one.digest for one in blobs]
    return columns


def decode_contents(batch: pb.Batch, field: str) -> list[Content]:
    """Decode a column of contents, and the columns beside it unless all are bytes. Raise
    Malformed."""
    texts, bytes_total = getattr(batch, field)[:], getattr(batch, f"{field}_bytes_total")
    if not bytes_total:
        return texts  # type: ignore[no-any-return]  # nearly always
    digests = getattr(batch, f"{field}_digest", None) or [b""] * len(texts)
    if not len(texts) == len(bytes_total) == len(digests):
        raise Malformed(BAD_LENGTHS)
    if max(bytes_total) > NUMBER_MAX:
        raise Malformed(f"a length must be at most {NUMBER_MAX}")
    if any(digest and len(digest) != DIGEST_BYTES for digest in digests):
        raise Malformed(f"a digest must have {DIGEST_BYTES} bytes")
    columns = zip(texts, bytes_total, digests, strict=True)
    return [Blob(digest, total, text) if total else text for text, total, digest in columns]


def decode_streams(batch: pb.Batch, count: int) -> OutputColumns:
    """Decode the streams of `count` attempts in a Complete."""
    stdouts = decode_contents(batch, "stdout") or [b""] * count
    stderrs = decode_contents(batch, "stderr") or [b""] * count
    if not len(stdouts) == len(stderrs) == count:
        raise Malformed(BAD_LENGTHS)
    return OutputColumns(stdouts, stderrs)


# Append.


def decode_chunks(
    batch: pb.Batch,
) -> tuple[list[bytes], list[int], list[Stream], list[int], list[bytes]]:
    """Decode the chunks of an Append: names, attempts, streams, offsets and bytes."""
    names, attempts, offsets, chunks = (
        batch.name[:],
        batch.attempt[:],
        batch.offset[:],
        batch.output[:],
    )
    columns = (attempts, batch.stream, offsets, chunks)
    if not names or any(len(column) != len(names) for column in columns):
        raise Malformed("an Append needs name, attempt, stream, offset and output of each chunk")
    if max(*attempts, *offsets) > NUMBER_MAX - max(map(len, chunks)):
        raise Malformed(f"an attempt or offset must be at most {NUMBER_MAX}")
    return names, attempts, [*map(decode_stream, batch.stream)], offsets, chunks


def decode_stream(number: int) -> Stream:
    """Decode the number of a stream."""
    try:
        return Stream(number)
    except ValueError:
        raise Malformed("a stream must be 1 for stdout or 2 for stderr") from None


def append(
    request: int, location: bytes, chunks: Sequence[StreamChunk], incarnation: int | None = None
) -> bytes:
    """Encode an Append: chunks of the output of running attempts."""
    columns: dict[str, Sequence[bytes] | Sequence[int]] = {
        "name": [one.name for one in chunks],
        "attempt": [one.attempt for one in chunks],
        "stream": [one.stream for one in chunks],
        "offset": [one.offset for one in chunks],
        "output": [one.data for one in chunks],
    }
    query = _Q(type=_Q.Append, request=request, location=location, batch=columns)
    if incarnation is not None:
        query.incarnation = incarnation
    return query.SerializeToString()


#: The largest exit status and signal of any system.
STATUS_MAX: Final = 255

_MICROSECONDS_MAX: Final = NUMBER_MAX // 1000


def encode_runs(runs: RunColumns) -> dict[str, Sequence[int] | Sequence[bytes]]:
    """Encode measurements as fields of a Batch."""
    columns: dict[str, Sequence[int] | Sequence[bytes]] = {
        "started_ns": runs.started_ns,
        "run_ns": runs.run_ns,
    }
    if runs.statuses is not None:
        columns["exit"] = [*map(_exit, runs.statuses)]
    if runs.cpu_ns is not None:
        columns["cpu_ns"] = runs.cpu_ns
    if runs.memory_max_bytes is not None:
        columns["memory_max_bytes"] = runs.memory_max_bytes
    if runs.notes is not None:
        columns["note"] = runs.notes
    return columns


def _exit(status: int | None) -> int:
    if status is None or abs(status) > STATUS_MAX:
        return 0
    return status + 1 if status >= 0 else status


def decode_runs(batch: pb.Batch, host: bytes) -> RunColumns | None:
    """Return the measurements of a Batch, or None if it has none. Raise Malformed."""
    if not batch.started_ns:
        if batch.run_ns or batch.exit or batch.cpu_ns or batch.memory_max_bytes or batch.note:
            raise Malformed("measurements without `started_ns`")
        return None
    runs = _runs(
        host,
        len(batch.name),
        batch.started_ns[:],
        batch.run_ns[:],
        batch.exit[:],
        batch.cpu_ns[:],
        batch.memory_max_bytes[:],
    )
    runs.notes = _notes(batch.note[:], len(batch.name))
    return runs


def _notes(notes: list[bytes], count: int) -> list[bytes] | None:
    if not any(notes):
        return None
    if len(notes) != count:
        raise Malformed("columns of a batch: must have one length, or be absent")
    if max(map(len, notes)) > NOTE_BYTES_MAX:
        raise Malformed(f"a note must have at most {NOTE_BYTES_MAX} bytes")
    return notes


def decode_task_runs(tasks: Sequence[pb.TaskMsg], host: bytes) -> RunColumns | None:
    """Return the measurements of TaskMsgs, or None. Their logs were checked before.

    The log of a plain worker may contain when it started and finished a task.
    """
    times = [
        _logged_times(task) if task.log and not task.started_ns else (task.started_ns, task.run_ns)
        for task in tasks
    ]
    if not any(started_ns for started_ns, _ in times):
        return None
    return _runs(
        host,
        len(tasks),
        [started_ns for started_ns, _ in times],
        [run_ns for _, run_ns in times],
        [task.exit for task in tasks],
        [task.cpu_ns for task in tasks],
        [task.memory_max_bytes for task in tasks],
    )


def _logged_times(task: pb.TaskMsg) -> tuple[int, int]:
    """Return when a task started and how long it ran by its log, or zeros."""
    logs = [pb.TaskMsg.LogMsg.FromString(raw) for raw in task.log]
    times = {log.state: min(max(log.time, 0), _MICROSECONDS_MAX) * 1000 for log in logs}
    started_ns, done_ns = (times.get(one, 0) for one in (pb.TaskMsg.Started, pb.TaskMsg.Done))
    return (started_ns, done_ns - started_ns) if 0 < started_ns <= done_ns else (0, 0)


def _runs(
    host: bytes, count: int, started_ns: list[int], run_ns: list[int], *more: list[int]
) -> RunColumns:
    exits, cpu_ns, memory_max_bytes = more
    present = [started_ns, run_ns, *(column for column in more if column)]
    if any(len(column) != count for column in present):
        raise Malformed("columns of a batch: must have one length, or be absent")
    if any(column and min(column) < 0 for column in (started_ns, run_ns, cpu_ns, memory_max_bytes)):
        raise Malformed("times and sizes of attempts: must not be negative")
    if exits and not -STATUS_MAX <= min(exits) <= max(exits) <= STATUS_MAX + 1:
        raise Malformed(f"exit status or signal: must be at most {STATUS_MAX}")
    if len(host) > NAME_BYTES_MAX:
        raise Malformed(f"host: must have at most {NAME_BYTES_MAX} bytes")
    return RunColumns(
        host,
        started_ns,
        run_ns,
        [*map(_status, exits)] if any(exits) else None,
        cpu_ns if any(cpu_ns) else None,
        memory_max_bytes if any(memory_max_bytes) else None,
    )


def _status(exit_number: int) -> int | None:
    if not exit_number:
        return None
    return exit_number - 1 if exit_number > 0 else exit_number
