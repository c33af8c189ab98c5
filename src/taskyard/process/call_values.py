"""Large parts of pickled calls and results: they become values, and only their names are sent.

A buffer of an array, or a whole pickle, is a value if the broker's settings have it as large. A
receiver maps it into memory. A payload or result without values is as it would be without this
module. Runs no code of a user but that of unpickling.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from msgspec import structs

from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.errors import BytesMissing
from taskyard.journal.blobs import short_name
from taskyard.wire import pickled
from taskyard.wire.pickled import CallHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.process.value_access import ValueAccess
    from taskyard.wire.pickled import CallBody, Pickled

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
