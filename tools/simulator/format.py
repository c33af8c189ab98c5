"""Lines for people: events and effects, with what is usual left out. Not part of the digest."""

from __future__ import annotations

from enum import Enum

import msgspec
from msgspec import NODEFAULT, Struct


def short_text(thing: object) -> str:
    """A thing in a few words: only what it does not share with every other of its kind."""
    if isinstance(thing, Struct):
        fields = msgspec.structs.fields(thing)
        told = {
            field.name: getattr(thing, field.name) for field in fields if _is_shown(thing, field)
        }
        return (
            f"{type(thing).__name__}({', '.join(f'{k}={short_text(v)}' for k, v in told.items())})"
        )
    if isinstance(thing, bytes):
        return thing.decode(errors="backslashreplace") or "''"
    if isinstance(thing, Enum):
        return thing.name
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(short_text, thing))}]"
    if isinstance(thing, dict):
        pairs = [f"{short_text(key)}: {short_text(value)}" for key, value in thing.items()]
        return f"{{{', '.join(pairs)}}}"
    return str(thing)


def _is_shown(thing: Struct, field: msgspec.structs.FieldInfo) -> bool:
    """An event's time is at the beginning of its line; a default goes without saying."""
    value = getattr(thing, field.name)
    if field.name == "now_ns":
        return False
    if field.default_factory is not NODEFAULT:
        return bool(value != field.default_factory())
    return bool(value != field.default)
