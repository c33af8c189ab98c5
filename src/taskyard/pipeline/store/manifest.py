"""The manifest: the version of every table after one run, and the journal rows it includes."""

from typing import Final

import msgspec

from taskyard.errors import UnusableFile
from taskyard.pipeline.store.data_file import DataFile
from taskyard.pipeline.store.location import Location

FILE_NAME: Final = "manifest.json"
_EARLIER: Final = "_manifests"

#: Raised whenever the content or format of the tables changes. Other versions are refused.
LAYOUT: Final = 5

#: The formats of tables, by their names as options.
DELTA: Final = "delta"
PARQUET: Final = "parquet"
FORMATS: Final = (DELTA, PARQUET)


class BrokerMark(msgspec.Struct, frozen=True):
    """The rows of one broker's journal that the tables include."""

    journal: str
    #: The last row, by its sequence.
    last: int


class TableVersion(msgspec.Struct, frozen=True):
    """One version of a table: by its number in Delta, by its files in plain Parquet."""

    version: int
    files: list[DataFile] = []


class Manifest(msgspec.Struct, frozen=True):
    """All tables after one run. The first run is number 1."""

    layout: int
    format: str
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
    if manifest.layout != LAYOUT:
        raise UnusableFile(
            f"{out}: tables of another version of Taskyard (remove the directory and run again)"
        )
    return manifest


def write_manifest(out: Location, manifest: Manifest) -> None:
    """Keep the manifest under the number of its run, then make it the current one."""
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    out.replace(_earlier(manifest.run), content)
    out.replace(FILE_NAME, content)


def _earlier(run: int) -> str:
    return f"{_EARLIER}/{run:06}.json"
