"""Access to a broker's values, for clients and for the processes that run calls.

On the broker's machine, and where its directory is mounted, the files are used directly. Elsewhere
values go through the broker in parts, over a connection of their own, and are kept in a cache that
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
from typing import TYPE_CHECKING, Final, Self

import msgspec

from taskyard.core.limits import SECOND_NS, VALUE_PART_BYTES_MAX
from taskyard.errors import UserError, ValueMissing, ValueNotStored
from taskyard.journal.files import make_private_directory, open_regular
from taskyard.journal.value_files import StoreTerms, ValueFiles, length_of, name_of, short_name
from taskyard.net import endpoints
from taskyard.net.blocking_channel import BlockingChannel
from taskyard.settings.values import read_size
from taskyard.wire.native import peer, value_messages
from taskyard.wire.value_names import BYTES_FLOOR, Holder, StoreDocument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.net.keys import PeerKey

#: The variable with the size of the cache: the setting `values.cache`.
CACHE_VARIABLE: Final = "TASKYARD_VALUES_CACHE"
CACHE_BYTES: Final = 10 << 30

#: A value in the cache is kept at least this long after its last use: it is about to be mapped.
_CACHE_NS_MIN: Final = 60 * SECOND_NS

#: How often to ask whether a value is synced. A gigabyte takes seconds.
_SYNC_SECONDS: Final = 0.02
_SYNC_SECONDS_MAX: Final = 0.5


class ValueAccess:
    """The values of one broker. Several threads may use it."""

    def __init__(
        self, endpoint: str, key: PeerKey | None = None, timeout: float | None = None
    ) -> None:
        """Connect at the first use. `timeout` limits the time without an answer."""
        self._endpoint = endpoint
        self._key = key
        self._timeout = timeout
        self._document: StoreDocument | None = None
        self._has_asked = False
        self._direct: ValueFiles | None = None

    def bytes_min(self) -> int | None:
        """Return the size of the smallest value. None: the broker keeps none."""
        with _Connections(self) as connections:
            document = self._described(connections)
        return None if document is None else max(document.bytes_min, BYTES_FLOOR)

    def put(self, content: memoryview) -> str:
        """Store a value unless it is there, and return its name. Raises `ValueNotStored`."""
        with _Connections(self) as connections:
            self._described(connections)
            if self._direct is not None:
                return self._direct.put(content)
            name = name_of(content)
            _upload(connections.get(), name, content.cast("B"))
            return name

    def renew(self, name: str) -> bool:
        """Keep a value for the time that it may wait for its task. Return whether it is there."""
        with _Connections(self) as connections:
            self._described(connections)
            if self._direct is not None:
                return self._direct.touch(name)
            build = partial(value_messages.put_value, value=name.encode())
            reply = connections.get().ask(build)
            return reply.kind != peer.ERROR and reply.value.received == length_of(name)

    def load(self, names: Sequence[str], holder: Holder | None = None) -> list[memoryview]:
        """Map values into memory. Raises `ValueMissing` or `ValueDamaged`.

        A worker gives the task that it holds, and gets no other values.
        """
        with _Connections(self) as connections:
            document = self._described(connections)
            if document is None:
                raise ValueMissing("values: the broker keeps none")
            if self._direct is not None:
                return [*map(self._direct.load, names)]
            cache = _cache(document)
            return [self._cached(cache, name, connections, holder) for name in names]

    def _described(self, connections: _Connections) -> StoreDocument | None:
        """Return how the broker keeps values. Asks once."""
        if not self._has_asked:
            reply = connections.get().ask(value_messages.store)
            with contextlib.suppress(
                msgspec.DecodeError
            ):  # a broker without a disk has no document
                self._document = msgspec.convert(reply.document(), StoreDocument)
                self._direct = self._usable_directory(self._document)
            self._has_asked = True
        return self._document

    def _usable_directory(self, document: StoreDocument) -> ValueFiles | None:
        """Return the directory if this process may use it directly."""
        if not document.directory:  # all values go through the broker
            return None
        if not document.shared and not endpoints.is_local(self._endpoint):
            return None
        files = ValueFiles(Path(document.directory))
        terms = files.terms()
        if terms is None or terms.identity != document.identity:
            return None
        is_own = files.directory.stat().st_uid == os.geteuid()
        return files if is_own and os.access(files.directory, os.W_OK) else None

    def _cached(
        self, cache: ValueFiles, name: str, connections: _Connections, holder: Holder | None
    ) -> memoryview:
        """Map a value of the cache. One that is missing is fetched first."""
        if not cache.touch(name):
            _make_room(cache, length_of(name))
            _download(connections.get(), cache, name, holder)
        return cache.load(name)

    def connect(self) -> BlockingChannel:
        return BlockingChannel(self._endpoint, self._key, self._timeout)


class _Connections:
    """Opens a connection when it is needed, and closes it at the end."""

    def __init__(self, access: ValueAccess) -> None:
        self._access = access
        self._stack = contextlib.ExitStack()
        self._connection: BlockingChannel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def get(self) -> BlockingChannel:
        if self._connection is None:
            self._connection = self._stack.enter_context(self._access.connect())
        return self._connection


def _upload(connection: BlockingChannel, name: str, content: memoryview) -> None:
    """Send a value from where the broker's part of it ends, until the broker has synced it."""
    value, offset, data, pause = name.encode(), 0, b"", _SYNC_SECONDS
    while True:
        place, part = offset, data
        reply = connection.ask(
            lambda number: value_messages.put_value(number, value, place, part)  # noqa: B023  # called at once
        )
        if reply.kind == peer.ERROR:
            raise ValueNotStored(reply.reason or "values: the broker keeps none")
        offset = reply.value.received
        if offset < len(content):
            data = bytes(content[offset : offset + VALUE_PART_BYTES_MAX])
        elif reply.value.syncing:
            data = b""
            time.sleep(pause)
            pause = min(2 * pause, _SYNC_SECONDS_MAX)
        else:
            return


def _download(
    connection: BlockingChannel, cache: ValueFiles, name: str, holder: Holder | None
) -> None:
    """Fetch a value into the cache. Its content is checked when it is mapped."""
    unfinished = cache.unfinished_path(f"{name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = open_regular(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            offset = 0
            while offset < length_of(name):
                offset += os.write(descriptor, _part(connection, name, offset, holder))
        finally:
            os.close(descriptor)
        cache.finish(unfinished, name)
    except OSError as error:
        text = f"value {short_name(name)}: {error.strerror} in the cache {cache.directory}"
        raise ValueNotStored(f"{text} (free some space)") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _part(connection: BlockingChannel, name: str, offset: int, holder: Holder | None) -> bytes:
    value, count = name.encode(), VALUE_PART_BYTES_MAX
    if holder is None:
        reply = connection.ask(
            lambda number: value_messages.get_value(number, value, offset, count)
        )
    else:
        task = (holder.task, holder.attempt)
        reply = connection.ask(
            lambda number: value_messages.get_task_value(
                number, holder.worker, task, value, offset=offset, count=count
            )
        )
    if reply.kind in (peer.NOT_FOUND, peer.ERROR) or not reply.value.data:
        raise ValueMissing(reply.reason or f"value {short_name(name)}: cut at the broker")
    return reply.value.data


# The cache.


def _cache(document: StoreDocument) -> ValueFiles:
    """Return the cache of a broker's values, which the processes of this user share."""
    root = Path(tempfile.gettempdir()) / f"taskyard-values-{os.geteuid()}"
    make_private_directory(root)
    found = root.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{root}: not a directory of this user (remove it, or set TMPDIR)")
    cache = ValueFiles(root / document.identity)
    if cache.terms() is None:
        cache.create(StoreTerms(document.identity, durable=False))
    return cache


def _make_room(cache: ValueFiles, bytes_more: int) -> None:
    """Remove values that were not used for the longest time, so that a new one fits."""
    limit = _cache_bytes()
    files = sorted(cache.walk(), key=lambda file: file.used_ns)
    used = bytes_more + sum(file.bytes_total for file in files)
    for file in files:
        if used <= limit:
            return
        # Others that have mapped it keep it.
        if cache.remove(file.name, time.time_ns() - _CACHE_NS_MIN):
            used -= file.bytes_total
    for left in cache.unfinished():  # of processes that were killed
        if left.used_ns < time.time_ns() - 3600 * SECOND_NS:
            with contextlib.suppress(OSError):
                left.path.unlink()


def _cache_bytes() -> int:
    given = os.environ.get(CACHE_VARIABLE, "")
    return read_size(given) if given else CACHE_BYTES
