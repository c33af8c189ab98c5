"""Large parts of pickled calls and results: they become values, and only their names are sent.

A buffer of an array, or a whole pickle, is a value if the broker's settings have it as large. A
receiver maps it into memory. A payload or result without values is as it would be without this
module. Runs no code of a user but that of unpickling.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from taskyard.errors import ValueMissing
from taskyard.wire import pickled
from taskyard.wire.pickled import Origin
from taskyard.wire.value_names import BYTES_FLOOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.process.value_access import ValueAccess
    from taskyard.wire.pickled import CallBody, Pickled
    from taskyard.wire.value_names import Holder

#: Names of immutable contents that many calls share, such as the function of a `map`.
_NAMES_KEPT: Final = 8


class CallValues:
    """Stores and loads the large parts of calls at one broker."""

    def __init__(self, access: Callable[[], ValueAccess] | None) -> None:
        """`access` may block until there is a broker. It is called for large parts only.

        None: there is no broker, so nothing is large.
        """
        self._find_access = access
        #: Contents and their names, by identity.
        self._names: OrderedDict[int, tuple[bytes, str]] = OrderedDict()

    def is_large(self, size_bytes: int) -> bool:
        """Return whether a buffer or a pickle of this size is a value."""
        if size_bytes < BYTES_FLOOR or self._find_access is None:
            return False
        bytes_min = self._access().bytes_min()
        return bytes_min is not None and size_bytes >= bytes_min

    def _access(self) -> ValueAccess:
        if self._find_access is None:
            raise ValueMissing("large values: this process has no broker")
        return self._find_access()

    def encode(self, body: CallBody, origin: Origin) -> bytes:
        """Store the large parts of a call, and return its payload. Raises `ValueNotStored`."""
        named, pickle = self._stored(body, origin)
        return pickled.encode_pickled_call(pickle, named)

    def encode_result(self, value: object) -> bytes:
        """Store the large parts of a result, and return the rest. Raises `ValueNotStored`."""
        body = pickled.pickle_value(value, self.is_large)
        named, pickle = self._stored(body, _RESULT)
        return pickle if named is _RESULT else pickled.encode_pickled_call(pickle, named)

    def _stored(self, body: CallBody, origin: Origin) -> tuple[Origin, bytes]:
        """Store the large parts of a pickle. Return their names, and the rest of the pickle."""
        names = tuple(map(self._put, body.buffers))
        if self.is_large(len(body.pickle)):
            name = self._put(memoryview(body.pickle))
            return structs.replace(origin, values=names, body=name), b""
        return structs.replace(origin, values=names) if names else origin, body.pickle

    def _put(self, content: memoryview) -> str:
        owner = content.obj
        is_kept = isinstance(owner, bytes) and len(owner) == content.nbytes
        known = self._names.get(id(owner)) if is_kept else None
        if known is not None:
            return known[1]
        name = self._access().put(content)
        if isinstance(owner, bytes) and is_kept:
            self._names[id(owner)] = (owner, name)
            if len(self._names) > _NAMES_KEPT:
                self._names.popitem(last=False)
        return name

    def load_call(self, call: Pickled, holder: Holder | None = None) -> Any:  # noqa: ANN401  # a function and its arguments
        """Unpickle a call. Raises `ValueMissing`, `ValueDamaged`, and what unpickling raises."""
        origin = call.origin
        if not origin.values and not origin.body:
            return pickled.unpickle(call.call)
        names = [*origin.values, *([origin.body] if origin.body else [])]
        views = self._access().load(names, holder)
        return pickled.unpickle(views.pop() if origin.body else call.call, views)

    def load_result(self, result: bytes, holder: Holder | None = None) -> Any:  # noqa: ANN401  # any value of a user
        """Unpickle a result. Raises `ValueMissing`, `ValueDamaged`, and what unpickling raises."""
        if not pickled.is_pickled(result):
            return pickled.unpickle(result)
        return self.load_call(pickled.decode_pickled_call(result), holder)


_RESULT: Final = Origin()
