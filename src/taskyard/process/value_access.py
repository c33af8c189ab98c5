"""Access to a broker's blobs, for clients and for the processes that run calls.

On the broker's machine, and where its directory is mounted, the files are used directly. Elsewhere
blobs go through the broker in parts, over a connection of their own, and are kept in a cache that
all processes of a user share. A transfer goes on after a reconnect or a restart of the broker.
Blocks, so it is for callers' threads. Knows no pickles and no futures.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.core.limits import PART_BYTES_MAX, SECOND_NS
from taskyard.errors import BytesMissing, BytesNotStored, UserError
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.journal.blobs import length_of, name_of, short_name
from taskyard.journal.files import make_private_directory
from taskyard.net import endpoints
from taskyard.net.channel import BlockingChannel
from taskyard.settings.values import read_size
from taskyard.wire.native import peer, reads, value_messages
from taskyard.wire.value_names import Holder, StoreDocument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.keys import PeerKey

#: The variable with the size of the cache: the setting `blobs.cache`.
CACHE_VARIABLE: Final = "TASKYARD_BLOBS_CACHE"
CACHE_BYTES: Final = 10 << 30

#: A blob in the cache is kept at least this long after its last use: it is about to be mapped.
_CACHE_NS_MIN: Final = 60 * SECOND_NS


class ValueAccess:
    """The blobs of one broker. Several threads may use it."""

    def __init__(
        self,
        endpoint: str,
        key: PeerKey | None = None,
        timeout: float | None = None,
        worker: bytes = b"",
    ) -> None:
        """Connect at the first use. `timeout` limits the time without an answer.

        `worker` is the name of the worker whose results are stored.
        """
        self._endpoint = endpoint
        connect = partial(BlockingChannel, endpoint, key, timeout)
        self._connections = partial(_Connections, connect)
        self._worker = worker
        self._document: StoreDocument | None = None
        self._has_asked = False
        self._direct: BlobFiles | None = None

    def has_store(self) -> bool:
        """Return whether the broker keeps blobs."""
        with self._connections() as connections:
            return self._described(connections) is not None

    def put(self, content: memoryview) -> str:
        """Store a blob unless it is there, and return its name. Raises `BytesNotStored`."""
        with self._connections() as connections:
            self._described(connections)
            if self._direct is not None:
                return self._direct.put(content, has_quota=not self._worker)
            name = name_of(content)
            _upload(connections.get(), name, content.cast("B"), self._worker)
            return name

    def renew(self, name: str) -> bool:
        """Keep a blob for the time that it may wait for its task. Return whether it is there."""
        with self._connections() as connections:
            self._described(connections)
            if self._direct is not None:
                return self._direct.touch(name)
            build = partial(value_messages.put_value, value=name.encode())
            reply = connections.get().ask(build)
            return reply.kind != peer.ERROR and reply.received == length_of(name)

    def load(self, names: Sequence[str], task: str) -> list[memoryview]:
        """Map blobs into memory that a task needs, or that its result names.

        `task` is its full name. A worker has to hold it. Raises `BytesMissing` or `BytesDamaged`.
        """
        with self._connections() as connections:
            document = self._described(connections)
            if document is None:
                raise BytesMissing("blobs: the broker keeps none")
            if self._direct is not None:
                return [*map(self._direct.load, names)]
            cache = _cache(document)
            return [self._cached(cache, name, connections, task) for name in names]

    def _described(self, connections: _Connections) -> StoreDocument | None:
        """Return how the broker keeps blobs. Asks once."""
        if not self._has_asked:
            reply = connections.get().ask(value_messages.store)
            with contextlib.suppress(
                msgspec.DecodeError
            ):  # a broker without a disk has no document
                self._document = msgspec.convert(reply.document(), StoreDocument)
                self._direct = self._usable_directory(self._document)
            self._has_asked = True
        return self._document

    def _usable_directory(self, document: StoreDocument) -> BlobFiles | None:
        """Return the directory if this process may use it directly."""
        if not document.directory:  # all blobs go through the broker
            return None
        if not document.shared and not endpoints.is_local(self._endpoint):
            return None
        files = BlobFiles(Path(document.directory))
        terms = files.terms()
        if terms is None or terms.identity != document.identity:
            return None
        is_own = files.directory.stat().st_uid == os.geteuid()
        return files if is_own and os.access(files.directory, os.W_OK) else None

    def _cached(
        self, cache: BlobFiles, name: str, connections: _Connections, task: str
    ) -> memoryview:
        """Map a blob of the cache. One that is missing is fetched first."""
        if not cache.touch(name):
            _make_room(cache, length_of(name))
            holder = Holder(self._worker, task.encode()) if self._worker else None
            build = partial(reads.blob_part, name=task.encode(), value=name.encode(), holder=holder)
            _download(connections.get(), cache, name, build)
        return cache.load(name)


class _Connections(contextlib.ExitStack):
    """Opens a connection when it is needed, and closes it at the end."""

    def __init__(self, connect: Callable[[], BlockingChannel]) -> None:
        super().__init__()
        self._connect = connect
        self._connection: BlockingChannel | None = None

    def get(self) -> BlockingChannel:
        if self._connection is None:
            self._connection = self.enter_context(self._connect())
        return self._connection


def _upload(connection: BlockingChannel, name: str, content: memoryview, worker: bytes) -> None:
    """Send a blob from where the broker's part of it ends. With the last reply it is synced."""
    value, offset, data = name.encode(), 0, b""
    while True:
        place, part = offset, data
        reply = connection.ask(
            lambda number: value_messages.put_value(number, value, place, part, worker)  # noqa: B023  # called at once
        )
        if reply.kind == peer.ERROR:
            raise BytesNotStored(reply.reason or "blobs: the broker keeps none")
        offset = reply.received
        if offset >= len(content):
            return
        data = bytes(content[offset : offset + PART_BYTES_MAX])


def _download(
    connection: BlockingChannel, cache: BlobFiles, name: str, build: Callable[..., bytes]
) -> None:
    """Fetch a blob into the cache. Its content is checked when it is mapped.

    `build` makes the request for the part from an offset on.
    """
    with cache.unfinished(name) as (path, descriptor):
        offset = 0
        while offset < length_of(name):
            reply = connection.ask(partial(build, offset=offset))
            if reply.kind != peer.READ:
                raise BytesMissing(reply.reason or f"{short_name(name)}: its task is gone")
            if not reply.part.data:
                raise BytesMissing(f"{short_name(name)}: cut at the broker")
            offset += os.write(descriptor, reply.part.data)
        cache.publish(path, name)


# The cache.


def _cache(document: StoreDocument) -> BlobFiles:
    """Return the cache of a broker's blobs, which the processes of this user share."""
    root = Path(tempfile.gettempdir()) / f"taskyard-blobs-{os.geteuid()}"
    make_private_directory(root)
    found = root.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{root}: not a directory of this user (remove it, or set TMPDIR)")
    cache = BlobFiles(root / document.identity, durable=False)
    if cache.terms() is None:
        cache.create(StoreTerms(document.identity, durable=False))
    return cache


def _make_room(cache: BlobFiles, bytes_more: int) -> None:
    """Remove blobs that were not used for the longest time, so that a new one fits."""
    given, now_ns = os.environ.get(CACHE_VARIABLE, ""), time.time_ns()
    limit = read_size(given) if given else CACHE_BYTES
    files = sorted(cache.walk(), key=lambda file: file.used_ns)
    used = bytes_more + sum(file.bytes_total for file in files)
    for file in files:
        if used <= limit:
            break
        # Others that have mapped it keep it.
        if cache.remove(file.id, now_ns - _CACHE_NS_MIN):
            used -= file.bytes_total
    cache.remove_unfinished(now_ns - 3600 * SECOND_NS)  # of processes that were killed
