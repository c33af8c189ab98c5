"""Large values of calls: access to a broker's blobs, for clients and for processes that run calls.

On the broker's machine, and where its directory is mounted, the files are used directly. Elsewhere
blobs go through the broker in parts, over a connection of their own, and are kept in a cache that
all processes of a user share. A transfer goes on after a reconnect or a restart of the broker.
Blocks, so it is for callers' threads.

A buffer of an array, or a whole pickle, is a value if the broker's settings have it as large. A
receiver maps it into memory. A payload or result without values is as if there were no blobs. Runs
no code of a user but that of unpickling.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from taskyard.calls import pickled
from taskyard.calls.pickled import CallHeader
from taskyard.core.limits import BLOB_BYTES_MIN, PART_BYTES_MAX, SECOND_NS
from taskyard.errors import BytesMissing, BytesNotStored, UserError
from taskyard.journal.blob_files import BlobFiles, StoreTerms
from taskyard.journal.blobs import length_of, name_of, short_name
from taskyard.journal.files import make_private_directory
from taskyard.net import endpoints
from taskyard.net.channel import BlockingChannel
from taskyard.settings.values import read_size
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native.task_contents import Holder, StoreDocument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.calls.pickled import CallBody, Pickled
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
            build = partial(task_contents.put_blob, value=name.encode())
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
            reply = connections.get().ask(task_contents.store_terms)
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
        """Map a blob of the cache. A missing blob is fetched first."""
        if not cache.touch(name):
            _make_room(cache, length_of(name))
            holder = Holder(self._worker, task.encode()) if self._worker else None
            build = partial(
                task_contents.blob_part, name=task.encode(), value=name.encode(), holder=holder
            )
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
            lambda number: task_contents.put_blob(number, value, place, part, worker)  # noqa: B023  # called at once
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
    """Fetch a blob into the cache. The content is checked when it is mapped.

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
        # Processes that have mapped it keep it.
        if cache.remove(file.id, now_ns - _CACHE_NS_MIN):
            used -= file.bytes_total
    cache.remove_unfinished(now_ns - 3600 * SECOND_NS)  # of processes that were killed


#: Stores the large parts of a call again. It refers to the caller's own objects, and blocks. Raises
#: `BytesMissing` if they have changed, and `BytesNotStored`.
Restore: TypeAlias = "Callable[[], None]"

#: Names of immutable contents that many calls share, such as the function of a `map`, and how long
#: a value is known to be there. The broker keeps it much longer.
_NAMES_KEPT: Final = 8
_BYTES_KEPT_MAX: Final = 16 << 20
_RENEWED_SECONDS: Final = 10.0


class _Known(NamedTuple):
    """A content, its name, and when it was there."""

    content: bytes
    name: str
    at: float


class CallValues:
    """Stores and loads the large parts of calls at one broker."""

    def __init__(self, access: Callable[[], ValueAccess] | None) -> None:
        """`access` may block until there is a broker. It is called for large parts only.

        None: there is no broker, so nothing is large.
        """
        self._find_access = access
        #: By the identity of their contents.
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def is_large(self, size_bytes: int) -> bool:
        """Return whether a buffer or a pickle of this size is a value."""
        if size_bytes < BLOB_BYTES_MIN or self._find_access is None:
            return False
        return self._access().has_store()

    def _access(self) -> ValueAccess:
        if self._find_access is None:
            raise BytesMissing("large values: this process has no broker")
        return self._find_access()

    def encode(self, body: CallBody, header: CallHeader) -> tuple[bytes, Restore | None]:
        """Store the large parts of a call, and return its payload. Raises `BytesNotStored`.

        Also returns what stores them again. None: nothing is large.
        """
        named, pickle = self._stored(body, header)
        names, contents = named.values, body.buffers
        if named.body:
            names, contents = (*names, named.body), (*contents, memoryview(body.pickle))
        restore = partial(self._restore, names, contents) if names else None
        return pickled.encode_pickled_call(pickle, named), restore

    def encode_result(self, value: object) -> bytes:
        """Store the large parts of a result, and return the rest. Raises `BytesNotStored`."""
        body = pickled.pickle_value(value, self.is_large)
        named, pickle = self._stored(body, _RESULT)
        return pickle if named is _RESULT else pickled.encode_pickled_call(pickle, named)

    def _stored(self, body: CallBody, header: CallHeader) -> tuple[CallHeader, bytes]:
        """Store the large parts of a pickle. Return their names, and the rest of the pickle."""
        names = tuple(map(self._put, body.buffers))
        if self.is_large(len(body.pickle)):
            name = self._access().put(memoryview(body.pickle))
            return structs.replace(header, values=names, body=name), b""
        return structs.replace(header, values=names) if names else header, body.pickle

    def _put(self, content: memoryview) -> str:
        """Store a value. An immutable one that was stored before need not be hashed again."""
        owner = content.obj
        is_kept = isinstance(owner, bytes) and content.nbytes <= _BYTES_KEPT_MAX
        if not isinstance(owner, bytes) or not is_kept or len(owner) != content.nbytes:
            return self._access().put(content)
        known, now = self._known.get(id(owner)), time.monotonic()
        if known is not None and now - known.at < _RENEWED_SECONDS:
            return known.name
        if known is None or not self._access().renew(known.name):
            known = _Known(owner, self._access().put(content), now)
        self._known[id(owner)] = known._replace(at=now)
        if len(self._known) > _NAMES_KEPT:
            self._known.popitem(last=False)
        return known.name

    def _restore(self, names: Sequence[str], contents: Sequence[memoryview]) -> None:
        """Store values again that the broker does not have any more."""
        access = self._access()
        for name, content in zip(names, contents, strict=True):
            if not access.renew(name) and access.put(content) != name:
                text = "not at the broker any more, and the argument was changed meanwhile"
                raise BytesMissing(f"{short_name(name)}: {text}")

    def load_call(self, call: Pickled, task: str) -> Any:  # noqa: ANN401  # a function and its arguments
        """Unpickle a call of a task.

        Raises `BytesMissing`, `BytesDamaged`, and what unpickling raises.
        """
        header = call.header
        if not header.values and not header.body:
            return pickled.unpickle(call.call)
        names = [*header.values, *([header.body] if header.body else [])]
        views = self._access().load(names, task)
        return pickled.unpickle(views.pop() if header.body else call.call, views)

    def load_result(self, result: bytes, task: str) -> Any:  # noqa: ANN401  # any value of a user
        """Unpickle a result of a task. Raises what `load_call` raises."""
        if not pickled.is_pickled(result):
            return pickled.unpickle(result)
        return self.load_call(pickled.decode_pickled_call(result), task)


_RESULT: Final = CallHeader()
