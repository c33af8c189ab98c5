"""The machines that run a session's Spark tasks: their cores, their Taskyard and their files.

On a cluster or a Spark Connect server they may lack Taskyard, or not see a path. A job would then
fail with pages of Spark's output. So a probe on them finds that first. On one machine there is
nothing to check. Knows nothing of the jobs.

Two users of Spark need no probe. `map_rows` has no paths, only the broker's endpoint. The data
source is planned by Spark without a session, so an executor itself names a file that it lacks.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from taskyard.errors import NotInstalled, UnusableFile
from taskyard.journal.history import FOLDER
from taskyard.pipeline.session import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Settings of a session whose work is all in Python. Code for the JVM would be generated for
#: nothing, which takes half a second.
PYTHON_ONLY: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}

#: Spark tasks of a probe. It can't choose machines, but that many reach most of them.
_PROBES_MAX: Final = 64

#: More cores than any session has. Each costs a row to count them.
_CORES_MAX: Final = 1 << 14

_FOUND: Final = "host string, python string, version string, missing array<string>"

_MARK: Final = ".taskyard-shared-"

#: A file and its size in bytes, or None for any size.
_FileSize = tuple[str, int | None]

#: A function that Spark runs in a partition.
_PartitionFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def cores_of(spark: SparkSession) -> int:
    """Return how many tasks the session can run at once, by the executors it has so far."""
    spark.range(1).count()  # the number is unknown before the first executor starts
    # Spark splits a range into as many partitions. The last row is in the last of them.
    numbers = spark.range(_CORES_MAX).select("id", F.spark_partition_id().alias("partition"))
    (last,) = numbers.where(F.col("id") == _CORES_MAX - 1).collect()
    return int(last["partition"]) + 1


#: Row files, and those of tables.
_HISTORY_SUFFIXES: Final = (".rows", ".parquet")


class SharedPaths(NamedTuple):
    """Paths that all machines must see."""

    #: Executors read them.
    files: Sequence[Path] = ()
    #: Executors create files in them.
    directories: Sequence[Path] = ()
    #: Executors read the history files in these states, or in directories of them.
    histories: Sequence[Path] = ()


def check(spark: SparkSession, master: str, shared: SharedPaths = SharedPaths()) -> None:  # noqa: B008  # immutable
    """Raise UserError if a machine lacks Taskyard or a path. On one machine, check nothing."""
    if is_local(master):
        return
    with contextlib.ExitStack() as stack:
        read = [*shared.files, *_some_files(shared.histories)]
        files: list[_FileSize] = [(str(one.absolute()), one.stat().st_size) for one in read]
        wanted = files.copy()
        for directory in shared.directories:
            directory.mkdir(parents=True, exist_ok=True)
            # A file of our own: a directory of the same name may be another one elsewhere.
            mark = stack.enter_context(tempfile.NamedTemporaryFile(prefix=_MARK, dir=directory))
            wanted.append((str(Path(mark.name).absolute()), None))
        count = min(cores_of(spark), _PROBES_MAX)
        probed = spark.range(0, count, 1, count).mapInArrow(_probe_function(wanted), _FOUND)
        for row in probed.collect():
            _check_machine(master, row["host"], row["python"], row["version"])
            for path in row["missing"]:
                is_read = any(path == name for name, _ in files)
                raise UnusableFile(_missing_text(path, row["host"], is_read=is_read))


def _some_files(histories: Sequence[Path]) -> list[Path]:
    """Return the first and the last file of each history. They stand for all of them."""
    found: list[Path] = []
    for directory in histories:
        own = directory / FOLDER
        place = own if own.is_dir() else directory
        files = sorted(path for path in place.rglob("*") if path.suffix in _HISTORY_SUFFIXES)
        found += [*files[:1], *files[1:][-1:]]
    return found


def _check_machine(master: str, host: str, python: str, version: str | None) -> None:
    """Raise UserError if a machine has no Taskyard, or one of another version."""
    if version is None:
        raise NotInstalled(
            f"{master}: Python at {host} can't import taskyard: {python} (install it there, or set "
            "PYSPARK_PYTHON to a Python that has it, for a server before it starts)"
        )
    own = importlib.import_module("taskyard").__version__  # the package above this one
    if version != own:
        raise NotInstalled(
            f"{master}: taskyard {version} at {host}, {own} here (install one version)"
        )


def _missing_text(path: str, host: str, *, is_read: bool) -> str:
    if is_read:
        return f"{path}: not the same file at {host} (executors read it: use a shared directory)"
    return f"{Path(path).parent}: not shared with {host} (executors write there)"


def _probe_function(wanted: list[_FileSize]) -> _PartitionFunction:
    """Return a function that needs no Taskyard, so it must not use names of this module."""

    def probe(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import importlib  # noqa: PLC0415  # in the executor
        import os  # noqa: PLC0415
        import socket  # noqa: PLC0415
        import sys  # noqa: PLC0415

        import pyarrow  # noqa: PLC0415, ICN001

        try:
            version = importlib.import_module("taskyard").__version__
        except ImportError:
            version = None
        missing = []
        for path, size in wanted:
            try:
                found = os.stat(path).st_size  # noqa: PTH116
                is_there = size is None or size == found
            except OSError:
                is_there = False
            if not is_there:
                missing.append(path)
        row = {
            "host": socket.gethostname(),
            "python": sys.executable,
            "version": version,
            "missing": missing,
        }
        for batch in batches:
            kinds = [pyarrow.string()] * 3 + [pyarrow.list_(pyarrow.string())]
            columns = [
                pyarrow.array([value] * batch.num_rows, kind)
                for value, kind in zip(row.values(), kinds)  # noqa: B905
            ]
            yield pyarrow.RecordBatch.from_arrays(columns, names=list(row))

    return probe
