"""The tables of blobs and files in a simulated PostgreSQL, and the product's statements on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Rows = list[tuple[Any, ...]]

#: Statements by a part of their text.
KINDS: Final = {
    "grown AS (INSERT INTO taskyard.blobs ": "append_blobs",
    "moved AS (UPDATE taskyard.blobs ": "seal_blob",
    "used AS (UPDATE taskyard.blobs ": "touch_blob",
    "gone AS (DELETE FROM taskyard.blobs WHERE kind = %(kind)s": "remove_blobs",
    "LEFT JOIN taskyard.parts ": "read_blob",
    "SELECT name, bytes, used_ns FROM taskyard.blobs ": "read_blob_names",
}

#: Writes, and what each returns if the leader's row is not as it requires.
UNHELD: Final[Mapping[str, Rows]] = {
    "append_blobs": [(0,)],
    "seal_blob": [(0,)],
    "touch_blob": [(0,)],
    "remove_blobs": [(0, 0, 0)],
}


class BlobRow(Struct, frozen=True):
    """A row of `taskyard.blobs`."""

    upload: str
    bytes_total: int
    used_ns: int


class BlobTables:
    """Methods without a docstring execute the statement of their name, and return its rows."""

    def __init__(self) -> None:
        self.blobs: dict[tuple[str, bytes], BlobRow] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        #: Called with each blob that is removed, and when it was used last.
        self.on_blob_removed: Callable[[str, int], None] = lambda _name, _used_ns: None

    def _check_term(self, values: Mapping[str, Any], kind: str) -> None:
        """Require that the writer has the term."""
        raise NotImplementedError

    def blob(self, name: str) -> bytes | None:
        """Return a blob. None: it is not there."""
        found = self.blobs.get(("sealed", name.encode()))
        return None if found is None else self._content(found)

    def _content(self, row: BlobRow) -> bytes:
        content = bytearray()
        for _, start, part in self._parts_of(row):
            content[start : start + len(part)] = part
        return bytes(content[: row.bytes_total])

    def _parts_of(self, row: BlobRow) -> list[tuple[int, int, bytes]]:
        return sorted(
            (row.bytes_total, start, part)
            for (upload, start), part in self.parts.items()
            if upload == row.upload
        )

    # Writes under a term.

    def append_blobs(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "blobs")
        columns = (values[name] for name in ("names", "uploads", "starts", "contents"))
        given = [*zip(*columns, strict=True)]
        if any(
            row.upload in values["uploads"]
            for (kind, _), row in self.blobs.items()
            if kind in {"sealed", "file"}
        ):
            return [(1,)]  # executed late: it violates a constraint, and its session is gone
        for name in dict.fromkeys(one[0] for one in given):
            own = [one for one in given if one[0] == name]
            end = max(start + len(content) for _, _, start, content in own)
            known = self.blobs.get((values["kind"], name))
            upload = min(one[1] for one in own) if known is None else known.upload
            bytes_total = end if known is None else max(end, known.bytes_total)
            self.blobs[values["kind"], name] = BlobRow(upload, bytes_total, values["used_ns"])
            for _, _, start, content in own:
                former = self.parts.get((upload, start), b"")
                self.parts[upload, start] = content + former[len(content) :]
        return [(1,)]

    def seal_blob(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "seal of a blob")
        stream = self.blobs.pop((values["kind"], values["name"]), None)
        key = values["as"], values["new"]
        known = self.blobs.get(key)
        if known is not None:
            self.blobs[key] = BlobRow(known.upload, known.bytes_total, values["used_ns"])
            if stream is not None:
                self._drop_upload(stream)
        elif stream is not None:
            self.blobs[key] = BlobRow(stream.upload, values["bytes"], values["used_ns"])
        return [(1,)]

    def touch_blob(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "use of a blob")
        key = "sealed", values["name"]
        known = self.blobs.get(key)
        if known is not None:
            self.blobs[key] = BlobRow(known.upload, known.bytes_total, values["used_ns"])
        return [(1,)]

    def remove_blobs(self, values: Mapping[str, Any]) -> Rows:
        self._check_term(values, "removal of blobs")
        bytes_total = count = 0
        for name in values["names"]:
            key = values["kind"], name
            row = self.blobs.get(key)
            if row is not None and row.used_ns <= values["used_ns_max"]:
                del self.blobs[key]
                self._drop_upload(row)
                bytes_total, count = bytes_total + row.bytes_total, count + 1
                if key[0] == "sealed":
                    self.on_blob_removed(name.decode(), row.used_ns)
        return [(1, bytes_total, count)]

    def _drop_upload(self, row: BlobRow) -> None:
        self.parts = {key: part for key, part in self.parts.items() if key[0] != row.upload}

    # Reads.

    def read_blob(self, values: Mapping[str, Any]) -> Rows:
        row = self.blobs.get((values["kind"], values["name"]))
        if row is None:
            return []
        first, end = values["offset"] - values["part_bytes"], values["end"]
        found = [one for one in self._parts_of(row) if first < one[1] < end]
        return [*found] or [(row.bytes_total, None, None)]

    def read_blob_names(self, values: Mapping[str, Any]) -> Rows:
        found = sorted(
            (name, row.bytes_total, row.used_ns)
            for (kind, name), row in self.blobs.items()
            if kind == values["kind"] and name > values["after"]
        )
        return [*found[: values["count"]]]
