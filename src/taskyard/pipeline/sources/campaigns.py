"""Campaign files of any format, read in parallel into prepared tasks.

The driver finds the files, checks their beginnings, and divides them into splits: row groups of
Parquet, whole lines of JSONL and dwork, otherwise whole files. It needs no Spark for that. The
executors read them with the functions of `campaign`, so a file means the same as to `taskyard
load`. Every executor must be able to open the files. An invalid row becomes a reject with a reason.
No content of a file raises an error there.

Tasks travel through Spark in chunks, some thousand to a value, as Arrow bytes. A JVM that handled
each task would take ten times as long as all other work.
"""

from __future__ import annotations

import glob
import io
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import compress
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct, structs

from taskyard.campaign import formats, other_systems, tables
from taskyard.campaign.formats import FileOptions, Format, choose_by_suffix
from taskyard.campaign.lines import STDIN, InvalidCampaign, numbered_lines, open_input
from taskyard.campaign.reader import REJECTED_SUFFIX
from taskyard.errors import TaskyardError, UnusableFile
from taskyard.pipeline.arrow_rows import (
    RowCollector,
    TemplateLookup,
    assign_lanes,
    pack,
    prepare,
    unpack,
)
from taskyard.pipeline.submit import BrokerTemplates, Target
from taskyard.pipeline.validate import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The size of a split in bytes of text and in rows of Parquet: some seconds of work.
SPLIT_BYTES: Final = 32 * 1024 * 1024
SPLIT_ROWS: Final = 200_000

#: A larger row group is read in slices. Each slice skips the rows before it, so there must not be
#: too many.
SLICE_ROWS: Final = 500_000

#: Rows of Parquet in a chunk. They fill five messages to the broker.
CHUNK_ROWS: Final = 50_000

#: The most Spark tasks, for any number of small files.
PARTITIONS_MAX: Final = 256

#: A place is the number of a split plus a line in it. A split has fewer lines than this.
LINES_PER_SPLIT: Final = 1 << 40

#: A chunk: the place of its first row, the columns of the graph, and the other columns.
CHUNKS: Final = "place long, graph binary, work binary"

#: The columns of `PREPARED_SCHEMA` that only a submission needs.
WORK: Final = ("payload", "lane")

#: Suffixes whose content decides, in a directory too: WfCommons has one.
_OTHER_SUFFIXES: Final = (".json",)

#: Names of skipped files in a message.
_NAMES_SHOWN: Final = 5

#: Formats with one task to a line, which can be split.
_BY_LINE: Final = (Format.JSONL, Format.DWORK)

_GZIP: Final = b"\x1f\x8b"
_PEEK_BYTES: Final = 1024 * 1024


class FileSplit(Struct, frozen=True):
    """A part of a file, read by one Spark task."""

    #: Absolute, because executors have other working directories.
    path: str
    #: The file as the user named it, for messages.
    label: str
    form: Format
    #: A range of bytes or row groups, without its end. Both 0: the whole file.
    first: int = 0
    last: int = 0
    #: Lines before it. None if they must be counted.
    lines_before: int | None = 0
    #: Rows of the row groups to skip, and rows to read after them. 0: all.
    rows_skipped: int = 0
    rows: int = 0


class CampaignFiles(Struct):
    """The files of a campaign, divided into splits."""

    files: list[str]
    splits: list[FileSplit]
    options: FileOptions

    def where(self, place: int) -> tuple[str, int]:
        """Return the file and the line of a place."""
        split = self.splits[place // LINES_PER_SPLIT]
        before = split.lines_before
        if before is None:
            before = _count_lines(split.path, split.first)
        return split.label, before + place % LINES_PER_SPLIT

    def shell_files(self) -> list[str]:
        """Return the files of shell commands. They are not split, because names count lines."""
        return [split.label for split in self.splits if split.form is Format.SHELL]


class FoundFiles(Struct):
    """The files that names, patterns and directories stand for."""

    files: list[str] = []
    #: Files in directories that are not campaign files by their names.
    skipped: list[str] = []

    def skipped_text(self) -> str:
        """Return a count of the skipped files with some of their names, or ""."""
        if not self.skipped:
            return ""
        names = [Path(one).name for one in self.skipped[:_NAMES_SHOWN]]
        more = ", …" if len(self.skipped) > len(names) else ""
        count = "1 file" if len(self.skipped) == 1 else f"{len(self.skipped):,} files"
        return f"{count} without a suffix of campaign files: {', '.join(names)}{more}"


def find(names: Sequence[str], form: Format | None = None) -> FoundFiles:
    """Find files by name, by pattern, or in a directory. Raises UserError if there are none.

    A directory stands for its files with a suffix of a format, or for all if `form` is given.
    Hidden files, marker files of other programs and old rejects are left out.
    """
    files: dict[str, None] = {}
    skipped: dict[str, None] = {}
    for name in names:
        path = Path(name.removeprefix("file://"))
        if path.is_dir() and name != STDIN:
            visible = sorted(str(one) for one in path.rglob("*") if _is_visible(one, path))
            is_wanted = [form is not None or _is_campaign_name(one) for one in visible]
            some = [*compress(visible, is_wanted)]
            skipped |= dict.fromkeys(compress(visible, map(not_, is_wanted)))
            problem = "no campaign files in this directory"
        else:
            some, problem = _expand_pattern(name, path), "no such file"
        if not some:
            raise UnusableFile(f"{name}: {problem}{_skipped_hint(FoundFiles([], [*skipped]))}")
        files |= dict.fromkeys(some)
    return FoundFiles([*files], [one for one in skipped if one not in files])


def _skipped_hint(found: FoundFiles) -> str:
    text = found.skipped_text()
    return f" ({text}; name a file, or give --format)" if text else ""


def _expand_pattern(name: str, path: Path) -> list[str]:
    if name == STDIN:
        raise UnusableFile("-: Spark can't read stdin (use `taskyard load -`)")
    if path.exists():
        return [str(path)]
    if "://" in name:
        raise UnusableFile(
            f"{name}: not a path that executors can open (mount it, or read it with Spark and "
            "write it with df.write.format('taskyard'))"
        )
    return sorted(one for one in glob.glob(name, recursive=True) if Path(one).is_file())  # noqa: PTH207  # it may be absolute


def _is_visible(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts
    hidden = any(part.startswith((".", "_")) for part in parts)
    return path.is_file() and not hidden and not path.name.endswith(REJECTED_SUFFIX)


def _is_campaign_name(path: str) -> bool:
    plain = path.lower().removesuffix(".gz")
    return choose_by_suffix(path) is not None or plain.endswith(_OTHER_SUFFIXES)


def plan(files: Sequence[str], options: FileOptions) -> CampaignFiles:
    """Divide files into splits. Raises `UserError` for a file that is unreadable at its beginning.

    That is: missing, of no known format, in another encoding, or with an unknown column.
    """
    splits: list[FileSplit] = []
    for path in files:
        with open_input(path) as stream:
            choice, _ = formats.choose_format(path, stream, options.format)
        formats.check_options(options, choice.format)
        if choice.format not in (Format.PARQUET, Format.WFCOMMONS):
            next(formats.rows(path, _options_of(choice.format, options)), None)
        splits += _splits(FileSplit(str(Path(path).absolute()), path, choice.format))
    return CampaignFiles([*files], splits, options)


def _options_of(form: Format, options: FileOptions) -> FileOptions:
    return structs.replace(options, format=form)


def _splits(whole: FileSplit) -> list[FileSplit]:
    if whole.form is Format.PARQUET:
        return _parquet_splits(whole)
    is_large = Path(whole.path).stat().st_size > SPLIT_BYTES
    if is_large and whole.form in _BY_LINE and not _is_compressed(whole.path):
        return _line_splits(whole)
    return [whole]


def _is_compressed(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(len(_GZIP)) == _GZIP


def _parquet_splits(whole: FileSplit) -> list[FileSplit]:
    """Group row groups until a split has enough rows."""
    try:
        with pq.ParquetFile(whole.path) as file:
            tables.check_columns(file.schema_arrow.names, whole.label)
            sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise tables.read_error(whole.label, 1, error) from None
    splits: list[FileSplit] = []
    first, before, rows = 0, 0, 0
    for group, size in enumerate(sizes):
        rows += size
        if rows >= SPLIT_ROWS or group == len(sizes) - 1:
            split = structs.replace(whole, first=first, last=group + 1, lines_before=before)
            splits += _slices(split, rows)
            first, before, rows = group + 1, before + rows, 0
    return splits


def _slices(whole: FileSplit, rows: int) -> list[FileSplit]:
    """Divide a split that has too many rows."""
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


def _line_splits(whole: FileSplit) -> list[FileSplit]:
    """Divide a file into splits that begin at a line."""
    size = Path(whole.path).stat().st_size
    begins = [0]
    with Path(whole.path).open("rb") as file:
        while (rest := size - begins[-1]) > SPLIT_BYTES:
            begin = _next_line(file, size - rest + SPLIT_BYTES)
            if begin >= size:
                break
            begins.append(begin)
    ends = [*begins[1:], size]
    return [
        structs.replace(whole, first=first, last=last, lines_before=None if first else 0)
        for first, last in zip(begins, ends, strict=True)
    ]


def _next_line(file: io.BufferedReader, after: int) -> int:
    """Return where the first line begins at or after this byte."""
    file.seek(after - 1)
    while chunk := file.read(_PEEK_BYTES):
        end = chunk.find(b"\n")
        if end >= 0:
            return file.tell() - len(chunk) + end + 1
    return file.tell()


def _count_lines(path: str, length: int) -> int:
    """Count the lines in the first bytes of a file. Only called to report an error."""
    lines = 0
    with Path(path).open("rb") as file:
        while length and (chunk := file.read(min(_PEEK_BYTES, length))):
            lines += chunk.count(b"\n")
            length -= len(chunk)
    return lines


def read(spark: SparkSession, campaign: CampaignFiles, target: Target | None = None) -> DataFrame:
    """Read all files in chunks.

    The lanes of tasks that give none are set by the templates of the target's broker.
    """
    count = len(campaign.splits)
    numbers = spark.range(0, count, 1, max(1, min(count, PARTITIONS_MAX)))
    return numbers.mapInArrow(_reader(campaign, target), CHUNKS)


def _reader(
    campaign: CampaignFiles, target: Target | None
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that reads splits, by number, in a partition."""

    def read_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with closing(BrokerTemplates(target)) as templates:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    for prepared in read_split(campaign, number, templates.get):
                        yield _chunk(prepared)

    return read_partition


def _chunk(prepared: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "place": pa.array([prepared["place"][0].as_py()], pa.int64()),
            "graph": pa.array([pack(prepared.select(COLUMNS))], pa.binary()),
            "work": pa.array([pack(prepared.select(WORK))], pa.binary()),
        }
    )


def tasks_of(chunk: pa.Table | pa.RecordBatch, number: int) -> pa.Table:
    """Return the rows of a chunk with all columns, by its number among `chunk`."""
    graph, work = (unpack([chunk[name][number]]) for name in ("graph", "work"))
    for name in WORK:
        graph = graph.append_column(name, work[name])
    return graph


def read_split(
    campaign: CampaignFiles, number: int, template_of: TemplateLookup
) -> Iterator[pa.RecordBatch]:
    """Yield the prepared rows of a split, or one row that rejects its file."""
    split, options = campaign.splits[number], campaign.options
    base = number * LINES_PER_SPLIT
    try:
        _check_shared(split)
        if split.form is Format.PARQUET:
            found = _read_parquet(split, base, options.campaign, template_of)
        else:
            found = _read_text(split, base, options, template_of)
        for prepared in found:
            yield assign_lanes(prepared, options.campaign, template_of)
    except TaskyardError as error:  # the file can't be read to its end, or the broker is gone
        collector = RowCollector(options.campaign)
        text = str(error)
        is_named = text.startswith(split.path)
        collector.reject_file(base, split.label + text[len(split.path) :] if is_named else text)
        yield collector.flush()


def _check_shared(split: FileSplit) -> None:
    """Raise UserError if this machine does not have a file that the driver has."""
    if not Path(split.path).exists():
        raise UnusableFile(
            f"{split.path}: not found on {socket.gethostname()}, which runs a Spark executor "
            "(give a path that all machines of the cluster share)"
        )


def _read_parquet(
    split: FileSplit, base: int, campaign: str, template_of: TemplateLookup
) -> Iterator[pa.RecordBatch]:
    row = 0
    try:
        with pq.ParquetFile(split.path) as file:
            groups = range(split.first, split.last)
            batches = file.iter_batches(batch_size=CHUNK_ROWS, row_groups=groups)
            for batch in _sliced(batches, split):
                places = base + np.arange(row + 1, row + batch.num_rows + 1)
                row += batch.num_rows
                yield from prepare(batch, places, campaign, template_of)
    except (pa.ArrowException, OSError) as error:
        raise tables.read_error(split.path, row + 1, error) from None


def _sliced(batches: Iterable[pa.RecordBatch], split: FileSplit) -> Iterator[pa.RecordBatch]:
    """Return the rows of a split from its row groups."""
    skip, left = split.rows_skipped, split.rows or LINES_PER_SPLIT
    for batch in batches:
        some = batch.slice(min(skip, batch.num_rows), left)
        skip = max(0, skip - batch.num_rows)
        left -= some.num_rows
        if some.num_rows:
            yield some
        if not left:
            return


def _read_text(
    split: FileSplit, base: int, options: FileOptions, template_of: TemplateLookup
) -> Iterator[pa.RecordBatch]:
    collector = RowCollector(options.campaign, template_of)
    seconds = _seconds(split, options)
    for line, raw in _rows(split, options):
        name = raw.get("name", "") if isinstance(raw, dict) else ""
        collector.add_row(base + line, raw, seconds.get(name) if seconds else None)
        if collector.is_full:
            yield collector.flush()
    if len(collector):
        yield collector.flush()


def _seconds(split: FileSplit, options: FileOptions) -> dict[str, float]:
    """Return the recorded run times of tasks, if the format has them."""
    if split.form is not Format.WFCOMMONS:
        return {}
    with open_input(split.path) as stream:
        took = other_systems.run_seconds(stream, split.path)
    return {name: one / options.speedup for name, one in took.items()}


def _rows(split: FileSplit, options: FileOptions) -> Iterator[tuple[int, object]]:
    if not split.last:
        yield from formats.rows(split.path, _options_of(split.form, options))
        return
    rows = formats.jsonl_rows if split.form is Format.JSONL else formats.dwork_rows
    with closing(_FileSlice(split)) as part:
        yield from rows(numbered_lines(part, split.path))


class _FileSlice:
    """A range of bytes of a file, as a `lines.Stream`."""

    def __init__(self, split: FileSplit) -> None:
        try:
            self._file = Path(split.path).open("rb")  # noqa: SIM115  # `close` is below
        except OSError as error:
            raise InvalidCampaign(f"{split.path}: can't be read: {error.strerror}") from None
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
