"""The place of `--files` outside of the database: a thread moves files there from the tables.

Everything is in the tables first, so nothing that was acknowledged waits for the place, and all of
it is kept while the place is down or full. History is moved at once, and read back first. Output
and values are moved only to S3, when they no longer grow and were not used for some time. An object
has the name of its upload, which is never used again. So a broker that lost its term writes the
same object again, or removes one that no row names. S3 needs the extra `history`, for pyarrow.
"""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, Self

from taskyard.errors import LeaderLost, NotInstalled, TaskyardError, UnusableStore
from taskyard.journal.postgres.blobs import DIRECTORY, PART_BYTES, Blobs

if TYPE_CHECKING:
    from pyarrow import fs

#: How long a blob stays in the tables after its last use: workers read most values soon.
COLD_NS: Final = 600 * 1_000_000_000

#: The pause between two rounds, and after a failure.
PAUSE_SECONDS: Final = 5.0
FAILURE_SECONDS: Final = 30.0

#: S3 copies an object of at most 5 GiB in one request.
_COPY_BYTES_MAX: Final = 5 * 1024**3

logger = logging.getLogger("taskyard.journal")


class ObjectStore(Protocol):
    """Files by their URL, which is a place and the name of an upload. All methods raise `OSError`.

    Missing files raise `FileNotFoundError`.
    """

    def put(self, url: str, contents: Iterable[bytes], bytes_total: int) -> None:
        """Write a file. It is there as a whole, or not at all."""

    def read(self, url: str, offset: int, count: int) -> bytes:
        """Return some bytes of a file."""

    def remove(self, url: str) -> None:
        """Remove a file, if it is there."""


class Objects:
    """Objects in S3 by their URL. Implements `ObjectStore`.

    The variables of AWS name the server and the credentials.
    """

    def __init__(self) -> None:
        self._systems: dict[str, tuple[fs.FileSystem, str]] = {}

    def put(self, url: str, contents: Iterable[bytes], bytes_total: int) -> None:
        """Write an object. Raises `OSError` unless all of it is there.

        pyarrow completes an upload also after an error. So it has a name of its own first. One that
        is too long to be copied is written in place.
        """
        system, path = self._open(url)
        can_copy = bytes_total <= _COPY_BYTES_MAX
        unfinished = f"{path}.{secrets.token_hex(4)}.new" if can_copy else path
        try:
            with system.open_output_stream(unfinished) as file:
                for content in contents:
                    file.write(content)
            found = system.get_file_info(unfinished).size
            check_size(url, found, bytes_total)
            if can_copy:
                system.copy_file(unfinished, path)
        finally:
            if can_copy:
                with suppress(OSError):
                    system.delete_file(unfinished)

    def read(self, url: str, offset: int, count: int) -> bytes:
        """Return some bytes of an object. Raises `OSError`."""
        system, path = self._open(url)
        with system.open_input_file(path) as file:
            return bytes(file.read_at(count, offset))

    def remove(self, url: str) -> None:
        """Remove an object, if it is there. Raises `OSError`."""
        system, path = self._open(url)
        try:
            system.delete_file(path)
        except FileNotFoundError:
            return

    def check(self, place: str) -> None:
        """Raise `UnusableStore` if the bucket of a place can't be found."""
        try:
            system, path = self._open(f"{place}/x")
            # A bucket is a directory. Anything else is not found.
            is_there = system.get_file_info(path.partition("/")[0]).type.name == "Directory"
        except (OSError, ValueError) as error:
            raise UnusableStore(f"{place}: {_text_of(error)}") from error
        if not is_there:
            raise UnusableStore(f"{place}: no such bucket, or no right to see it")

    def _open(self, url: str) -> "tuple[fs.FileSystem, str]":
        place, _, name = url.rpartition("/")
        if place not in self._systems:
            try:
                from pyarrow import fs  # noqa: PLC0415  # an extra
            except ImportError as error:
                raise NotInstalled(
                    f"{place}: needs {error.name} (`pip install 'taskyard[history]'`)"
                ) from error
            self._systems[place] = fs.FileSystem.from_uri(place)
        system, path = self._systems[place]
        return system, f"{path}/{name}"


class Mover:
    """The thread that moves files to a place, until it is closed or the term ends."""

    def __init__(self, tables: Blobs, place: str, objects: ObjectStore) -> None:
        self._tables = tables
        self._place = place
        self._objects = objects
        self._stopping = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="taskyard-objects", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._tables.interrupt()
        self._thread.join(PAUSE_SECONDS)
        self._tables.close()

    def run_round(self, cold_ns: int = COLD_NS) -> int:
        """Move what is due, and remove objects of removed blobs. Return the number of both."""
        count = self._move_history()
        return count if self._place == DIRECTORY else count + self._move_blobs(cold_ns)

    def _move_history(self) -> int:
        """Move history files, which are removed here after their digest was read back."""
        tables, objects, count = self._tables, self._objects, 0
        for upload, bytes_total, expected in tables.history():
            if self._stopping.is_set():
                break
            url, digest = f"{self._place}/{upload}", hashlib.sha256()
            objects.put(url, tables.history_contents(upload), bytes_total)
            for offset in range(0, bytes_total, PART_BYTES):
                digest.update(objects.read(url, offset, min(PART_BYTES, bytes_total - offset)))
            if digest.digest() != expected:
                raise OSError(f"{url}: does not match its digest")
            tables.relocate_history(upload, self._place)
            count += 1
        return count

    def _move_blobs(self, cold_ns: int) -> int:
        tables, objects, count = self._tables, self._objects, 0
        for kind, name, upload, bytes_total in tables.cold(time.time_ns() - cold_ns):
            url = f"{self._place}/{upload}"
            objects.put(url, tables.contents(kind, name), bytes_total)
            if not tables.relocate(upload, self._place):  # removed meanwhile
                objects.remove(url)
            count += 1
            if self._stopping.is_set():
                return count
        for url in tables.removals():
            objects.remove(url)
            tables.forget_removal(url)
            count += 1
        return count

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                pause = 0.0 if self.run_round() else PAUSE_SECONDS
                self._problem = ""
            except LeaderLost:
                return
            except (OSError, TaskyardError) as error:
                self._note(_text_of(error))
                pause = FAILURE_SECONDS

    def _note(self, problem: str) -> None:
        if problem != self._problem and not self._stopping.is_set():
            text = "%s: files stay in the database for now: %s"
            logger.warning(text, "--files" if self._place == DIRECTORY else self._place, problem)
        self._problem = problem


def check_size(name: str, found: int, bytes_total: int) -> None:
    """Raise `OSError` if a file is too short: another broker may have removed the parts of it."""
    if found != bytes_total:
        raise OSError(f"{name}: {found} of {bytes_total} bytes were written")


def _text_of(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
