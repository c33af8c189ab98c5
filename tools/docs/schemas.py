"""JSON Schemas of the documents that commands print, for `docs/schemas` and the tests."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import msgspec

import taskyard.cli.documents  # noqa: F401  # it adds documents
from taskyard.cli.documents import JsonDocument
from taskyard.cli.journal import (
    JournalCheckDocument,
    JournalCompactDocument,
    JournalExportDocument,
)
from taskyard.wire import record_views
from taskyard.wire.record_views import RecordDocument
from taskyard.wire.views import Stats


class StatusDocument(Stats, tag_field="document", tag="status"):
    """`status`: the broker's statistics as they arrived."""

    version: Literal[1]


#: Documents that extend a struct of another package.
_EXTENDED: Final = (
    *(StatusDocument, JournalCheckDocument),
    *(JournalExportDocument, JournalCompactDocument),
)


def _by_name() -> dict[str, list[type[msgspec.Struct]]]:
    """Return the structs of each document, in the order of the source."""
    found: dict[str, list[type[msgspec.Struct]]] = {}
    kinds: list[type[msgspec.Struct]] = [*_EXTENDED, *JsonDocument.__subclasses__()]
    while kinds:
        kind = kinds.pop(0)
        found.setdefault(str(kind.__struct_config__.tag), []).append(kind)
        kinds = [*(() if kind in _EXTENDED else kind.__subclasses__()), *kinds]
    return found


#: The structs of each document by its name. Some commands have several, depending on options.
DOCUMENTS: Final = _by_name()

#: Decodes a line of `watch`, which is a record unless it is a gap.
_RECORDS: Final = msgspec.json.Decoder(record_views.AnyRecordDocument)


def check(encoded: bytes | str) -> None:
    """Raise `msgspec.ValidationError` unless the text is the document that its tag names."""
    raw = msgspec.json.decode(encoded)
    name = raw.get("document")
    if name == "watch" and raw.get("kind") != "gap":
        msgspec.convert({key: raw.pop(key) for key in ("version", "document")}, _Opening)
        _RECORDS.decode(msgspec.json.encode(raw))
        return
    errors = [f"unknown document {name!r}"]
    for kind in DOCUMENTS.get(name, ()):
        try:
            msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            errors.append(f"{kind.__name__}: {error}")
        else:
            return
    raise msgspec.ValidationError("; ".join(errors))


class _Opening(msgspec.Struct):
    """The fields of every document."""

    version: Literal[1]
    document: str


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    kinds: list[Any] = [*DOCUMENTS[name]]
    if name == "watch":
        kinds += [*RecordDocument.__subclasses__()]
    made, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    title = f"What `taskyard {name} --json` prints{', a line' if name == 'watch' else ''}"
    if name == "error":
        title = "What a command prints on stderr if it fails with --json"
    return {"title": title, "anyOf": [*made], "$defs": parts}


def file_name(name: str) -> str:
    return f"{name.replace(' ', '-')}.json"


def schemas() -> dict[str, str]:
    """Return the text of every schema by its file name."""
    return {
        file_name(name): json.dumps(schema(name), indent=2, sort_keys=True, ensure_ascii=False)
        + "\n"
        for name in DOCUMENTS
    }
