"""Campaigns' files as tasks that are ready to be submitted: any format, in parallel.

The driver finds the files and cuts them into splits (row groups of Parquet, whole lines of JSONL
and comma lines, else the whole file); the executors read them with the functions of
`campaign`, so that a file means here what it means to `taskyard load`. The files have to be
where every executor finds them. What is wrong with a row becomes a row of its own, with the reason;
nothing here raises because of what stands in a file.

Tasks travel through Spark in chunks, some thousand in one value (Arrow's own bytes): a JVM that
looks at each of them would take ten times as long as all that is done with them.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Struct, structs

from taskyard.campaign import formats, parquet, wfcommons
from taskyard.campaign.formats import FileOptions, Format
from taskyard.campaign.lines import STDIN, InvalidCampaign, numbered_lines, open_input
from taskyard.campaign.reader import REJECTED_SUFFIX
from taskyard.errors import UserError
from taskyard.pipeline.arrow_rows import RowCollector, pack, prepare
from taskyard.pipeline.validate import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Bytes of text, and rows of Parquet, that one split has: some seconds of work.
SPLIT_BYTES: Final = 32 * 1024 * 1024
SPLIT_ROWS: Final = 200_000

#: A row group that has more than this is read by several, each of which has to pass over the rows
#: of those before it: not too many.
SLICE_ROWS: Final = 500_000

#: Spark's tasks at most, however many small files there are.
PARTITIONS_MAX: Final = 256

#: A place is the number of a split and a line in it; a split has fewer lines than this.
LINES_PER_SPLIT: Final = 1 << 40

#: A chunk: what the graph is made of, and what is submitted.
CHUNKS: Final = "graph binary, tasks binary"

#: The columns of `PREPARED_SCHEMA` that are submitted, with the place by which they are found.
TASKS: Final = ("place", "name", "payload", "lane", "after", "terms")

#: What has parts that can be read by themselves: one line is one task.
_BY_LINE: Final = (Format.JSONL, Format.DWORK)

_GZIP: Final = b"\x1f\x8b"
_PEEK_BYTES: Final = 1024 * 1024


class FileSplit(Struct, frozen=True):
    """A part of a file, read by one task of Spark."""

    path: str
    form: Format
    #: The bytes or row groups from here to before there; the whole file where both are 0.
    first: int = 0
    last: int = 0
    #: Lines that stand before it; None: they have to be counted.
    lines_before: int | None = 0
    #: Of the row groups, without so many rows and then so many of them; 0: all.
    rows_skipped: int = 0
    rows: int = 0


class CampaignFiles(Struct):
    """What there is to read."""

    splits: list[FileSplit]
    options: FileOptions

    def where(self, place: int) -> tuple[str, int]:
        """The file and the line of a place."""
        split = self.splits[place // LINES_PER_SPLIT]
        before = split.lines_before
        if before is None:
            before = _count_lines(split.path, split.first)
        return split.path, before + place % LINES_PER_SPLIT

    def places_in_order(self) -> list[int]:
        """The first place of each split."""
        return [number * LINES_PER_SPLIT for number in range(len(self.splits))]


def find(names: Sequence[str]) -> list[str]:
    """The files that are meant: by name, by pattern, or all in a directory. Raises UserError."""
    found: dict[str, None] = {}
    for name in names:
        some = _expand_pattern(name)
        if not some:
            raise UserError(f"{name}: there is no such file; give one, a directory or a pattern")
        found |= dict.fromkeys(some)
    return list(found)


def _expand_pattern(name: str) -> list[str]:
    if name == STDIN:
        raise UserError("Spark reads files, not stdin; use `taskyard load -`, or write a file")
    path = Path(name.removeprefix("file://"))
    if path.is_dir():
        return sorted(str(one) for one in path.rglob("*") if _is_data(one, path))
    if path.exists():
        return [str(path)]
    if "://" in name:
        raise UserError(
            f"{name}: campaigns are read from files that every executor can open; mount it, or "
            "read it with Spark and write it with df.write.format('taskyard')"
        )
    return sorted(one for one in glob.glob(name, recursive=True) if Path(one).is_file())  # noqa: PTH207  # it may be absolute


def _is_data(path: Path, directory: Path) -> bool:
    """Neither what other programs leave beside their tables nor what an earlier load rejected."""
    parts = path.relative_to(directory).parts
    hidden = any(part.startswith((".", "_")) for part in parts)
    return path.is_file() and not hidden and not path.name.endswith(REJECTED_SUFFIX)


def plan(files: Sequence[str], options: FileOptions) -> CampaignFiles:
    """The splits of these files. Raises `InvalidCampaign` for a file that can't be read at all."""
    splits: list[FileSplit] = []
    for path in files:
        with open_input(path) as stream:
            form = options.format or formats.format_of(path, stream)
        formats.check_options(options, form)
        splits += _splits(path, form)
    return CampaignFiles(splits, options)


def _splits(path: str, form: Format) -> list[FileSplit]:
    if form is Format.PARQUET:
        return _parquet_splits(path)
    if form in _BY_LINE and Path(path).stat().st_size > SPLIT_BYTES and not _is_compressed(path):
        return _line_splits(path, form)
    return [FileSplit(path, form)]


def _is_compressed(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(len(_GZIP)) == _GZIP


def _parquet_splits(path: str) -> list[FileSplit]:
    """Row groups that belong together until there are enough rows."""
    try:
        with pq.ParquetFile(path) as file:
            parquet.check_columns(file.schema_arrow.names, path)
            sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as wrong:
        raise parquet.read_error(path, 1, wrong) from None
    splits: list[FileSplit] = []
    first, before, rows = 0, 0, 0
    for group, size in enumerate(sizes):
        rows += size
        if rows >= SPLIT_ROWS or group == len(sizes) - 1:
            splits += _slices(FileSplit(path, Format.PARQUET, first, group + 1, before), rows)
            first, before, rows = group + 1, before + rows, 0
    return splits


def _slices(whole: FileSplit, rows: int) -> list[FileSplit]:
    """A split as it is, or, where it has too many rows, parts of it."""
    if rows <= SLICE_ROWS:
        return [whole]
    before = whole.lines_before or 0
    return [
        structs.replace(
            whole,
            lines_before=before + first,
            rows_skipped=first,
            rows=min(SLICE_ROWS, rows - first),
        )
        for first in range(0, rows, SLICE_ROWS)
    ]


def _line_splits(path: str, form: Format) -> list[FileSplit]:
    """Splits that begin where a line does."""
    size = Path(path).stat().st_size
    begins = [0]
    with Path(path).open("rb") as file:
        while (rest := size - begins[-1]) > SPLIT_BYTES:
            begin = _next_line(file, size - rest + SPLIT_BYTES)
            if begin >= size:
                break
            begins.append(begin)
    ends = [*begins[1:], size]
    return [
        FileSplit(path, form, first, last, None if first else 0)
        for first, last in zip(begins, ends, strict=True)
    ]


def _next_line(file: io.BufferedReader, after: int) -> int:
    """Where the first line begins at or after this byte."""
    file.seek(after - 1)
    while chunk := file.read(_PEEK_BYTES):
        end = chunk.find(b"\n")
        if end >= 0:
            return file.tell() - len(chunk) + end + 1
    return file.tell()


def _count_lines(path: str, length: int) -> int:
    """The lines in the first bytes of a file. Asked for where something is to be told about one."""
    lines = 0
    with Path(path).open("rb") as file:
        while length and (chunk := file.read(min(_PEEK_BYTES, length))):
            lines += chunk.count(b"\n")
            length -= len(chunk)
    return lines


def read(spark: SparkSession, campaign: CampaignFiles) -> DataFrame:
    """The rows of all files in chunks, in the order of files and lines."""
    count = len(campaign.splits)
    numbers = spark.range(0, count, 1, max(1, min(count, PARTITIONS_MAX)))
    return numbers.mapInArrow(_reader(campaign), CHUNKS)


def _reader(
    campaign: CampaignFiles,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What Spark calls in a partition, with numbers of splits."""

    def read_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for flush in batches:
            for number in flush.column("id").to_pylist():
                for prepared in _read_split(campaign, number):
                    yield _chunk(prepared)

    return read_partition


def _chunk(prepared: pa.RecordBatch) -> pa.RecordBatch:
    good = prepared.filter(pc.is_null(prepared["reason"]))
    chunk = {"graph": [pack(prepared.select(COLUMNS))], "tasks": [pack(good.select(TASKS))]}
    return pa.RecordBatch.from_pydict(chunk, pa.schema([(name, pa.binary()) for name in chunk]))


def _read_split(campaign: CampaignFiles, number: int) -> Iterator[pa.RecordBatch]:
    split, options = campaign.splits[number], campaign.options
    base = number * LINES_PER_SPLIT
    try:
        if split.form is Format.PARQUET:
            yield from _read_parquet(split, base, options.campaign)
        else:
            yield from _read_text(split, base, options)
    except UserError as wrong:  # the file can't be read to its end
        gathering = RowCollector(options.campaign)
        gathering.reject_file(base, str(wrong))
        yield gathering.flush()


def _read_parquet(split: FileSplit, base: int, campaign: str) -> Iterator[pa.RecordBatch]:
    row = 0
    try:
        with pq.ParquetFile(split.path) as file:
            groups = range(split.first, split.last)
            batches = file.iter_batches(batch_size=SPLIT_ROWS // 8, row_groups=groups)
            for flush in _sliced(batches, split):
                places = base + np.arange(row + 1, row + flush.num_rows + 1)
                row += flush.num_rows
                yield from prepare(flush, places, campaign)
    except (pa.ArrowException, OSError) as wrong:
        raise parquet.read_error(split.path, row + 1, wrong) from None


def _sliced(batches: Iterable[pa.RecordBatch], split: FileSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a split out of those of its row groups."""
    skip, left = split.rows_skipped, split.rows or LINES_PER_SPLIT
    for flush in batches:
        some = flush.slice(min(skip, flush.num_rows), left)
        skip = max(0, skip - flush.num_rows)
        left -= some.num_rows
        if some.num_rows:
            yield some
        if not left:
            return


def _read_text(split: FileSplit, base: int, options: FileOptions) -> Iterator[pa.RecordBatch]:
    gathering = RowCollector(options.campaign)
    seconds = _seconds(split, options)
    for line, raw in _rows(split, options):
        name = raw.get("name", "") if isinstance(raw, dict) else ""
        gathering.add_row(base + line, raw, seconds.get(name) if seconds else None)
        if gathering.is_full:
            yield gathering.flush()
    if len(gathering):
        yield gathering.flush()


def _seconds(split: FileSplit, options: FileOptions) -> dict[str, float]:
    """How long tasks took when they were run before, where the format tells."""
    if split.form is not Format.WFCOMMONS:
        return {}
    with open_input(split.path) as stream:
        took = wfcommons.run_seconds(stream, split.path)
    return {name: one / options.speedup for name, one in took.items()}


def _rows(split: FileSplit, options: FileOptions) -> Iterator[tuple[int, object]]:
    if not split.last:
        own = FileOptions(split.form, options.replay, options.speedup, options.campaign)
        yield from formats.rows(split.path, own)
        return
    rows = formats.jsonl_rows if split.form is Format.JSONL else formats.dwork_rows
    with closing(_FileSlice(split)) as part:
        yield from rows(numbered_lines(part, split.path))


class _FileSlice:
    """Some bytes of a file, as `lines.Stream`."""

    def __init__(self, split: FileSplit) -> None:
        try:
            self._file = Path(split.path).open("rb")  # noqa: SIM115  # `close` is below
        except OSError as wrong:
            raise InvalidCampaign(
                f"{split.path}: can't be read: {wrong.strerror}; see that it is there and yours"
            ) from None
        self._file.seek(split.first)
        self._left = split.last - split.first

    def peek(self, size: int, /) -> bytes:
        return self._file.peek(size)[: self._left]

    def read1(self, size: int, /) -> bytes:
        chunk = self._file.read1(min(size, self._left))
        self._left -= len(chunk)
        return chunk

    def close(self) -> None:
        self._file.close()
