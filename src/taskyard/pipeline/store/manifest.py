"""The manifest: the version of every table after one run, and the journal rows it includes."""

import datetime as dt
from typing import Final

import msgspec

from taskyard.errors import UnknownFormat, UnusableFile
from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location

FILE_NAME: Final = "manifest.json"
_EARLIER: Final = "_manifests"
_SUFFIX: Final = ".json"

#: Raised whenever the content or format of the tables changes. Other versions are refused.
VERSION: Final = 1

#: The formats of tables, by their names as options.
DELTA: Final = "delta"
PARQUET: Final = "parquet"
FORMATS: Final = (DELTA, PARQUET)


class BrokerMark(msgspec.Struct, frozen=True):
    """The rows of one broker's journal that the tables include."""

    journal: str
    #: The last row, by its sequence.
    last: int
    #: The last record of a task, and the time of the last event.
    record: int = 0
    time_ns: int = 0


class TableVersion(msgspec.Struct, frozen=True):
    """One version of a table: by its number in Delta, by its files in plain Parquet."""

    version: int
    files: list[DataFile] = []


class Manifest(msgspec.Struct, frozen=True):
    """All tables after one run. The first run is number 1."""

    format: str
    version: int
    run: int = 0
    brokers: dict[str, BrokerMark] = {}
    tables: dict[str, TableVersion] = {}


def read_manifest(out: Location, run: int | None = None) -> Manifest | None:
    """Read the current manifest, or the one of an earlier run. None if there are no tables."""
    name = FILE_NAME if run is None else _earlier(run)
    content = out.read(name)
    if content is None:
        return None
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise UnusableFile(f"{out}/{name}: not a manifest of tables: {error}") from error
    if manifest.version != VERSION:
        raise UnknownFormat(
            f"{out}: tables of version {manifest.version}, but this Taskyard reads version "
            f"{VERSION} (remove the directory and run again)"
        )
    return manifest


def write_manifest(out: Location, manifest: Manifest) -> None:
    """Keep the manifest under the number of its run, then make it the current one."""
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    out.replace(_earlier(manifest.run), content)
    out.replace(FILE_NAME, content)


def earlier_runs(out: Location, retention: dt.timedelta) -> tuple[list[int], list[int]]:
    """List the runs that were current within the retention time, and those before."""
    oldest = dt.datetime.now(dt.UTC) - retention
    runs = sorted(
        (int(entry.base_name.removesuffix(_SUFFIX)), entry.mtime)
        for entry in out.child(_EARLIER).entries()
        if entry.base_name.endswith(_SUFFIX)
    )
    # A run was current until the next one.
    ends = [*(written for _, written in runs[1:]), dt.datetime.max.replace(tzinfo=dt.UTC)]
    kept = [run for (run, _), end in zip(runs, ends, strict=True) if end is None or end >= oldest]
    return kept, [run for run, _ in runs if run not in kept]


def remove_manifest(out: Location, run: int) -> None:
    system, path = out.open()
    system.delete_file(f"{path}/{_earlier(run)}")


def _earlier(run: int) -> str:
    return f"{_EARLIER}/{run:06}{_SUFFIX}"
