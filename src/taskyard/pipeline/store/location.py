"""A directory of tables on a local disk or in S3, by its path or URI."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from taskyard.errors import UnusableFile


class Location(msgspec.Struct, frozen=True):
    """A directory. Small enough to send to every executor, which opens it by itself."""

    uri: str

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> "Location":
        """Return the location of a path or URI. A relative path becomes absolute."""
        name = os.fspath(text)
        parts = urlsplit(name)
        if parts.scheme == "file":
            return cls(parts.path)
        if "://" not in name:
            return cls(str(Path(name).absolute()))
        if parts.scheme != "s3":
            raise UnusableFile(f"{name}: unknown scheme {parts.scheme} (use a path or s3://…)")
        return cls(name.rstrip("/"))

    def __str__(self) -> str:
        return self.uri

    @property
    def is_local(self) -> bool:
        return "://" not in self.uri

    def child(self, name: str) -> "Location":
        return Location(f"{self.uri}/{name}")

    def open(self) -> tuple[fs.FileSystem, str]:
        """Return the file system and the path in it. Raises UnusableFile."""
        if self.is_local:
            return fs.LocalFileSystem(), self.uri
        try:
            system, path = fs.FileSystem.from_uri(self.uri)
        except (OSError, ValueError) as error:
            raise UnusableFile(f"{self}: {_first_line(error)}") from error
        return system, path

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none."""
        system, path = self.open()
        try:
            with system.open_input_file(f"{path}/{name}") as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnusableFile(f"{self}/{name}: {_first_line(error)}") from error

    def open_parquet(self, name: str, coded: Iterable[str] = ()) -> pq.ParquetFile:
        """Open a Parquet file. Some columns of strings may be read as codes."""
        system, path = self.open()
        try:
            source = system.open_input_file(f"{path}/{name}")
            return pq.ParquetFile(source, read_dictionary=[*coded])
        except (OSError, pa.ArrowInvalid) as error:
            raise UnusableFile(f"{self}/{name}: {_first_line(error)}") from error

    def remove(self) -> None:
        """Remove the directory with everything in it."""
        system, path = self.open()
        with contextlib.suppress(FileNotFoundError):
            system.delete_dir(path)

    def replace(self, name: str, content: bytes) -> None:
        """Write a file at once: a reader gets the old content or the new."""
        system, path = self.open()
        try:
            if self.is_local:
                _replace_local(Path(path), name, content)
                return
            with system.open_output_stream(f"{path}/{name}") as file:
                file.write(content)
        except OSError as error:
            raise UnusableFile(f"{self}/{name}: {_first_line(error)}") from error

    def names(self) -> list[str]:
        """List the files and directories in it. A missing directory is empty."""
        return [entry.base_name for entry in self.entries()]

    def entries(self) -> list[fs.FileInfo]:
        system, path = self.open()
        try:
            found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        except OSError as error:
            raise UnusableFile(f"{self}: {_first_line(error)}") from error
        return sorted(found, key=lambda entry: entry.base_name)

    def storage_options(self) -> dict[str, str]:
        """Return what the Delta library needs besides the usual variables of AWS."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        if self.is_local or not endpoint.startswith("http://"):
            return {}
        return {"AWS_ALLOW_HTTP": "true"}


def _replace_local(directory: Path, name: str, content: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
