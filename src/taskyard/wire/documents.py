"""The base of JSON documents, and how the fields of a document follow from a struct of the core.

Owns the rules of these fields: names as text, times as seconds, and null for what is absent. The
documents themselves are in `views`, `record_views` and `health_views`.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Struct, structs

from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MILLISECOND_NS: Final = SECOND_NS // 1000

#: Types of fields whose values are the same in the core, unless they are bytes.
_UNCHANGED: Final = (int, bool, list[int])

encode = msgspec.json.Encoder().encode


class Document(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all documents and their parts."""


_D = TypeVar("_D", bound=Document)


def seconds(ns: int) -> float | None:
    """Return a time or a duration to the millisecond. 0 is none."""
    return ns // _MILLISECOND_NS / 1000 if ns else None


class _Derived(NamedTuple):
    """A field of a document that follows from an attribute of a struct."""

    name: str
    attribute: str
    #: For b"": null, if the field may be null.
    empty: str | None
    #: With None a value that is not bytes stays as it is.
    convert: Callable[[Any], Any] | None


def filled(kind: type[_D], source: Struct, **given: Any) -> _D:  # noqa: ANN401  # any fields
    """Return a document whose fields are given, or follow from the fields of a struct.

    A field `due` has the value of `due`, or that of `due_ns` in seconds. Bytes become text, and an
    enumeration becomes its text or its name. A field that may be null is null for b"" and 0.
    """
    for name, attribute, empty, convert in _derived(kind, type(source), tuple(given)):
        value = getattr(source, attribute)
        if type(value) is bytes:
            given[name] = shown(value) if value else empty
        else:
            given[name] = value if convert is None else convert(value)
    return kind(**given)


@lru_cache(None)
def _derived(kind: type[Document], source: type[Struct], given: tuple[str, ...]) -> list[_Derived]:
    """Return the fields of a document that are not given and that a source has."""
    found: list[_Derived] = []
    for field in structs.fields(kind):
        name, is_nullable = field.name, NoneType in get_args(field.type)
        convert: Callable[[Any], Any] | None
        if name not in given and hasattr(source, name):
            convert = None if field.type in _UNCHANGED else _or_null if is_nullable else plain
            found.append(_Derived(name, name, None if is_nullable else "", convert))
        elif name not in given and hasattr(source, f"{name}_ns"):
            convert = seconds if is_nullable else _each_in_seconds
            found.append(_Derived(name, f"{name}_ns", None, convert))
    return found


def plain(value: Any) -> Any:  # noqa: ANN401  # any field
    """Return a value of the core as it is in JSON."""
    if isinstance(value, bytes):
        return shown(value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    return value


def _or_null(value: Any) -> Any:  # noqa: ANN401  # any field
    return None if value == 0 else plain(value)


def _each_in_seconds(times_ns: Iterable[int]) -> list[float | None]:
    return [*map(seconds, times_ns)]
