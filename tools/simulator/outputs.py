"""The output of simulated programs, and the large arguments and results of simulated calls.

All of it follows from the names of tasks, so that checkers need no memory of it. Schedules without
blobs draw no random numbers for them. In half of the other schedules, bytes become blobs much
sooner than in the product, so that short streams are blobs of many parts.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import msgspec
from msgspec import Struct

from simulator.mutations.registry import patched
from simulator.plan import NAMED_BY_BROKER, SECOND_NS, chance
from taskyard.broker import blob_retention, contents
from taskyard.core import blobs as core_blobs
from taskyard.core.blobs import Blob, text_of
from taskyard.core.limits import PART_BYTES_MAX
from taskyard.core.model import Stream
from taskyard.journal import blob_files, blobs
from taskyard.postgresql import blobs as postgres_blobs
from taskyard.wire.native import requests, task_contents
from taskyard.worker import held_tasks, output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from simulator.plan import Plan
    from taskyard.core.blobs import Content

#: Of so many schedules one has programs that print, and blobs.
_SCHEDULES: Final = 5
_WITH_BLOBS: Final = 3

#: Compaction lags in one schedule of so many, the one with this remainder.
_LAG_SCHEDULES: Final = 25
_LAGGING: Final = 11

#: Bytes that programs print: nothing, a short or a long stream.
_SIZES: Final = (0, 100, 70_000, 100_000)
_SIZES_SMALL: Final = (0, 100, 3_000, 15_000)

#: Of so many schedules with blobs one has the limits of the product.
_LIMITS: Final = 2

#: Everything that is printed begins so.
PRINTED: Final = b"attempt "

#: The service of calls. Only workers that can read blobs have it.
CALLS: Final = b"calls"

#: The second line of a payload begins so, before the name of its task.
CALL: Final = b"call "

#: Bytes of the second line of a payload or of a result before that: a record has the first two
#: where limits are small, and never the last.
_PADDINGS: Final = (0, 5_000, 70_000)

#: Arguments that many tasks share.
_SHARED: Final = 3

_SEED_OFFSET: Final = 1 << 44
_STRESS_SEED_OFFSET: Final = 1 << 47

#: Limits in schedules where they are small: modules of the product, and the values.
_SMALL: Final[Sequence[tuple[Any, str, int]]] = (
    (core_blobs, "BLOB_BYTES_MIN", 4_000),
    (contents, "BLOB_BYTES_MIN", 4_000),
    (core_blobs, "STREAM_END_BYTES", 500),
    (held_tasks, "BLOB_BYTES_MIN", 4_000),
    (output, "BLOB_BYTES_MIN", 4_000),
    (output, "STREAM_END_BYTES", 500),
    (output, "APPEND_BYTES_MAX", 2_500),
    (output, "SPOOL_BYTES_DUE", 2_000),
    (task_contents, "PART_BYTES_MAX", 2_500),
    (requests, "PART_BYTES_MAX", 2_500),
    (blob_files, "SYNC_BYTES", 6_000),
    (blob_files, "OPEN_STREAMS_MAX", 2),
    (blobs, "HASHED_BYTES", 1_000),
    (blobs, "HASHES_MAX", 2),
    (postgres_blobs, "PART_BYTES", 1_000),
    (postgres_blobs, "PAGE_ROWS", 3),
    (blob_retention, "FILES_PER_STEP", 2),
    (blob_retention, "TASKS_PER_STEP", 2),
)


class BlobPlan(Struct):
    """How blobs are kept in a schedule."""

    #: How long a blob is kept that nothing names, and a blob that only ended tasks name.
    grace_ns: int
    keep_ns: int | None
    #: Bytes of a part of an upload or a download.
    part_bytes: int
    #: Calls of the client that has large arguments.
    calls: int
    workers: int


def has_blobs(seed: int) -> bool:
    """Return whether programs of a schedule print, and calls have large arguments."""
    return seed % _SCHEDULES == _WITH_BLOBS


def lags(seed: int) -> bool:
    """Return whether compaction lags at times, so that submissions wait."""
    return seed % _LAG_SCHEDULES == _LAGGING


def has_small_limits(seed: int) -> bool:
    """Return whether bytes become blobs sooner than in the product."""
    return has_blobs(seed) and seed % _LIMITS == 1


def draw_blobs(seed: int, *, jumps: bool) -> BlobPlan:
    """Draw how blobs are kept. While the wall clock jumps, they have no age."""
    rng = Random(seed + _SEED_OFFSET)
    keep_ns = rng.choice((None, None, 3 * SECOND_NS, 10 * SECOND_NS))
    return BlobPlan(
        grace_ns=rng.choice((1, 3, 10)) * SECOND_NS,
        keep_ns=None if jumps else keep_ns,
        part_bytes=2_500 if has_small_limits(seed) else PART_BYTES_MAX,
        calls=rng.choice((2, 5, 9)),
        workers=rng.choice((1, 2)),
    )


def stress(plan: Plan) -> None:
    """Let the faults that blobs survive happen in more schedules."""
    rng, faults = Random(plan.seed + _STRESS_SEED_OFFSET), plan.faults
    if chance(rng, 0.7):
        faults.snapshot, faults.trim = max(faults.snapshot, 0.1), max(faults.trim, 0.5)
        faults.archive = max(faults.archive, 0.5)
    if chance(rng, 0.5):
        faults.crash_broker = max(faults.crash_broker, rng.choice((0.3, 0.6)))
        faults.power_cut = max(faults.power_cut, 0.7)
        faults.restart_ns_max = min(faults.restart_ns_max, SECOND_NS)


@contextmanager
def limits_of(seed: int) -> Iterator[None]:
    """Give the product the limits of a schedule."""
    with ExitStack() as stack:
        for module, name, value in _SMALL if has_small_limits(seed) else ():
            stack.enter_context(patched(module, name, value))
        yield


# Programs.


def has_stdout(name: bytes) -> bool:
    """Return whether the result of a task is what its program prints."""
    is_call = name.rpartition(b"/")[2].startswith(CALLS)
    return bool(crc32(name) % 4) and not is_call and not name.startswith(NAMED_BY_BROKER)


def printed_by(seed: int, name: bytes, attempt: int, stream: int) -> bytes:
    """Return what an attempt prints to a stream."""
    if stream == Stream.STDOUT and not has_stdout(name):
        return b""
    line = PRINTED + b"%d of %s to %d\n" % (attempt, name, stream)
    sizes = _SIZES_SMALL if has_small_limits(seed) else _SIZES
    size = sizes[crc32(line) % len(sizes)]
    return (line * (size // len(line) + 1))[:size]


# Calls.


def name_of(content: bytes) -> str:
    """Return the name of a content."""
    return f"{sha256(content).hexdigest()}-{len(content)}"


def arguments_of(name: bytes) -> list[bytes]:
    """Return the large arguments of a call. Calls share some of them."""
    number = crc32(b"arguments of " + name)
    contents = [b"shared %d, " % (number % _SHARED) * (100 + 200 * (number % _SHARED))]
    if number & 1:
        contents.append(b"own of %s, " % name * (number % 600 + 1))
    return contents


def body_of(name: bytes) -> bytes:
    """Return the second line of a call's payload."""
    return _padding(b"payload of " + name) + CALL + name


def _padding(text: bytes) -> bytes:
    number = crc32(text)
    return b"%d " % number * (_PADDINGS[number % len(_PADDINGS)] // 10)


def result_of(name: bytes) -> bytes:
    """Return the large result of a call, or nothing."""
    number = crc32(b"result of " + name)
    return b"result of %s, " % name * (number % 500 + 1) if number & 1 else b""


def headed(names: Sequence[str], needed: Sequence[str], text: bytes) -> bytes:
    """Return a payload or a result that names blobs, and results of other tasks."""
    first: dict[str, Any] = {"pickle": 1}
    if needed:
        first["results"] = [*needed]
    return msgspec.json.encode({**first, "values": [*names]}) + b"\n" + text


def result_text(name: bytes) -> bytes:
    """Return the result of a call, in one message."""
    content = result_of(name)
    return headed(
        [name_of(content)] if content else [], [], _padding(b"done " + name) + b"done " + name
    )


def heading(text: bytes) -> dict[str, list[str]]:
    """Return what the first line of a payload or a result names."""
    if not text.startswith(b'{"pickle":'):
        return {}
    found: dict[str, list[str]] = msgspec.json.decode(text.partition(b"\n")[0])
    return found


def stored_as(content: Content) -> list[str]:
    """Return the blob that a content is."""
    if isinstance(content, Blob) and content.digest:
        return [f"{content.digest.hex()}-{content.length}"]
    return []


def named_by(content: Content) -> list[str]:
    """Return the blobs that a content names: its own, and the blobs in its first line."""
    return [*stored_as(content), *heading(text_of(content)).get("values", [])]
