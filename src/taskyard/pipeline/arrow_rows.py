"""Tasks as Arrow columns: a table with the keys of a task becomes what is submitted, or rejects.

A batch of rows that are all as plain as most are is checked and turned column by column; any other
goes row by row through the very functions that `taskyard load` reads with, so both mean the same.
Owns the columns in between (`PREPARED_SCHEMA`): what a submission needs, and of a bad row why it
is bad. Knows neither files nor Spark; pyarrow is all it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs

from taskyard.campaign.batches import encode_batch, task_bytes
from taskyard.campaign.lanes import is_template
from taskyard.campaign.lines import InvalidRow
from taskyard.campaign.parquet import rows_of
from taskyard.campaign.task_spec import InvalidTask, TaskSpec, check_task, service_of
from taskyard.core.limits import AFTER_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, PRIORITY_MAX
from taskyard.core.model import Terms

#: A task that can be submitted, or a row that can't be one.
PREPARED_SCHEMA: Final = pa.schema(
    [
        # Where it stands: which split of the input, and which line of that.
        pa.field("place", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("payload", pa.binary()),
        pa.field("lane", pa.string()),
        pa.field("after", pa.list_(pa.field("element", pa.string()))),
        # What a task shares with others, as JSON: there are few different ones.
        pa.field("terms", pa.string()),
        # How long it is said to run.
        pa.field("seconds", pa.float64()),
        # Null: it is good. Else what is wrong, and the row as JSON; where that is null, no row is
        # wrong but the file, and the reason says where.
        pa.field("reason", pa.string()),
        pa.field("row", pa.string()),
    ]
)

#: Rows that are Python objects at once, and bytes of their payloads.
ROWS_PER_BATCH: Final = 16_384
BYTES_PER_BATCH: Final = 8 * 1024 * 1024

#: How much of a rejected row is kept: it is to be found and mended, not to be loaded.
ROW_CHARACTERS_MAX: Final = 10_000

_BUNDLE: Final = (
    'has "recipients": a bundle is taken whole, in one message; load this line with `taskyard load`'
)

_encode = msgspec.json.Encoder(enc_hook=repr).encode
_decode_terms = msgspec.json.Decoder(TaskSpec).decode


def pack(rows: pa.RecordBatch | pa.Table) -> bytes:
    """Rows as one value, to be carried by who need not look inside."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_PACK_OPTIONS) as writer:
        writer.write(rows)
    return bytes(sink.getvalue())


def unpack(values: Iterable[pa.Scalar | bytes]) -> pa.Table:
    """The rows of such values, one after the other."""
    buffers = (one if isinstance(one, bytes) else one.as_buffer() for one in values)
    return pa.concat_tables([pa.ipc.open_stream(buffer).read_all() for buffer in buffers])


_PACK_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")


class RowCollector:
    """Rows on their way into columns, one by one."""

    def __init__(self, campaign: str) -> None:
        self._campaign = campaign
        self._columns: dict[str, list[object]] = {name: [] for name in PREPARED_SCHEMA.names}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._columns["place"])

    @property
    def is_full(self) -> bool:
        return len(self) >= ROWS_PER_BATCH or self._bytes >= BYTES_PER_BATCH

    def add_row(self, place: int, raw: object, seconds: float | None = None) -> None:
        """One row as a format read it: a task's keys, or `InvalidRow`."""
        if isinstance(raw, InvalidRow):
            self._reject(place, raw.reason, raw.raw, raw.name)
            return
        try:
            spec, payload = _check_row(raw, self._campaign)
        except InvalidTask as bad:
            name = raw.get("name") if isinstance(raw, dict) else None
            self._reject(place, str(bad), raw, name if isinstance(name, str) else "")
            return
        self._bytes += len(payload)
        self._add(
            place=place,
            name=spec.name,
            payload=payload,
            lane=spec.lane,
            after=spec.after,
            terms=_terms_text(spec),
            seconds=seconds,
        )

    def reject_file(self, place: int, reason: str) -> None:
        """The whole file, whatever it has beside this."""
        self._add(place=place, reason=reason)

    def _reject(self, place: int, reason: str, raw: object, name: str) -> None:
        self._add(place=place, reason=reason, row=row_text(raw), name=_utf8_safe(name) or None)

    def _add(self, **values: object) -> None:
        for name, column in self._columns.items():
            column.append(values.get(name))

    def flush(self) -> pa.RecordBatch:
        """What was gathered; gathering begins anew."""
        columns = [pa.array(self._columns[one.name], one.type) for one in PREPARED_SCHEMA]
        for column in self._columns.values():
            column.clear()
        self._bytes = 0
        return pa.RecordBatch.from_arrays(columns, schema=PREPARED_SCHEMA)


def _check_row(raw: object, campaign: str) -> tuple[TaskSpec, bytes]:
    """A task and its payload. Raises `InvalidTask`."""
    if isinstance(raw, dict) and raw.get("recipients") is not None:
        raise InvalidTask(_BUNDLE)
    spec = check_task(raw, campaign)
    whole = encode_batch([spec], b"", 0)
    lane = whole.lanes[0] if whole.lanes else b""
    task_bytes(whole.names[0], whole.payloads[0], lane, whole.after[0] if whole.after else ())
    return spec, whole.payloads[0]


def row_text(raw: object) -> str:
    """A row as JSON, for whoever has to mend it; of a long one its beginning, as text."""
    text = _utf8_safe(_encode(raw).decode())
    return text if len(text) <= ROW_CHARACTERS_MAX else _encode(text[:ROW_CHARACTERS_MAX]).decode()


def _utf8_safe(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _terms_text(spec: TaskSpec) -> str:
    """All of a task that others may have as well."""
    shared = structs.replace(
        spec,
        name="",
        argv=None,
        call=None,
        args=None,
        kwargs=None,
        payload=None,
        after=(),
        lane="",
        env=None,
        cwd=None,
        service=service_of(spec),
    )
    return _encode(shared).decode()


def service_of_terms(terms: str) -> str:
    """The service that tasks of these terms go to."""
    return service_of(_decode_terms(terms))


def prepared_to_row(task: dict[str, Any]) -> dict[str, object]:
    """The keys that make this row of `PREPARED_SCHEMA`, for whoever has to mend it."""
    from taskyard.campaign.task_spec import to_row  # noqa: PLC0415  # of rejects alone

    terms, payload = _decode_terms(task["terms"]), task["payload"]
    work: dict[str, object] = {"payload": payload}
    if terms.service in ("exec", "call"):
        work = msgspec.json.decode(payload)
    more = {"name": task["name"], "after": tuple(task["after"] or ()), "lane": task["lane"] or ""}
    own = structs.replace(terms, **more, **work)
    default = service_of(structs.replace(own, service=None))
    return to_row(structs.replace(own, service=None if own.service == default else own.service))


class SharedTerms(Struct):
    """Terms by their text, for one campaign, counted from one moment."""

    campaign: bytes
    now_ns: int
    #: The service of tasks that name none themselves; None: as the work says.
    cached: dict[str, Terms] = {}

    def get(self, text: str) -> Terms:
        found = self.cached.get(text)
        if found is None:
            spec = structs.replace(_decode_terms(text), payload=b"")
            found = self.cached[text] = encode_batch([spec], self.campaign, self.now_ns).terms[0]
        return found


# Column by column.


def prepare(
    flush: pa.RecordBatch, places: Sequence[int] | np.ndarray[Any, Any], campaign: str
) -> Iterator[pa.RecordBatch]:
    """The rows of a table with the keys of a task, prepared; `places` has one for each."""
    plain = _fast_columns(flush)
    if plain is not None:
        places_column = pa.array(places, pa.int64())
        yield pa.RecordBatch.from_arrays([places_column, *plain], schema=PREPARED_SCHEMA)
        return
    gathering = RowCollector(campaign)
    for place, raw in zip(places, rows_of(flush), strict=True):
        gathering.add_row(int(place), raw)
        if gathering.is_full:
            yield gathering.flush()
    if len(gathering):
        yield gathering.flush()


def _fast_columns(flush: pa.RecordBatch) -> list[pa.Array] | None:
    """The columns of `PREPARED_SCHEMA` after the first, if every row is good and has nothing
    special; None: look at them one by one."""
    given = {
        name: _decoded(flush.column(name))
        for name in flush.schema.names
        if flush.column(name).null_count < len(flush)
    }
    work = given.keys() & {"argv", "payload"}
    if not flush.num_rows or "name" not in given or len(work) != 1:
        return None
    if given.keys() - _PLAIN_KEYS or not _are_names(given["name"], nullable=False):
        return None
    payload = (
        _command_payloads(given["argv"]) if "argv" in given else _payload_column(given["payload"])
    )
    if payload is None:
        return None
    after, lane = _after_column(given), _lane_column(given)
    terms = _plain_terms(given, "exec" if "argv" in given else "default", len(flush))
    if after is None or lane is None or terms is None:
        return None
    nothing = [
        pa.nulls(len(flush), PREPARED_SCHEMA.field(name).type)
        for name in PREPARED_SCHEMA.names[-3:]
    ]
    return [given["name"].cast(pa.string()), payload, lane, after, terms, *nothing]


#: What a plain task may have.
_PLAIN_KEYS: Final = frozenset(
    {"name", "argv", "payload", "after", "service", "lane", "priority", "slots"}
)


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list_of_texts(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and _is_text(kind.value_type))


def _are_names(names: pa.Array, *, nullable: bool) -> bool:
    """All are plain ASCII, not too long, and have no space at an end, which would be cut off."""
    if not _is_text(names.type) or (names.null_count and not nullable):
        return False
    if not len(names):
        return True
    lengths = pc.binary_length(names)
    shortest, longest = pc.min_max(lengths).as_py().values()
    if not shortest or longest > NAME_BYTES_MAX or not _is_printable_ascii(names):
        return False
    spaced = pc.or_(pc.starts_with(names, " "), pc.ends_with(names, " "))
    return not pc.any(spaced).as_py()


def _is_printable_ascii(texts: pa.Array) -> bool:
    """All the bytes at once: a column lies in one piece."""
    joined = _value_bytes(texts)
    return joined.isascii() and joined.decode("ascii").isprintable()


def _value_bytes(texts: pa.Array) -> bytes:
    """What all of them consist of."""
    _, offsets, values = texts.buffers()
    if values is None:
        return b""
    wide = pa.types.is_large_string(texts.type)
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)
    first, last = int(ends[texts.offset]), int(ends[texts.offset + len(texts)])
    return bytes(memoryview(values)[first:last])


def _command_payloads(argv: pa.Array) -> pa.Array | None:
    """The payloads of commands."""
    if not _is_list_of_texts(argv.type) or argv.null_count:
        return None
    words = argv.flatten()
    lengths = pc.list_value_length(argv)
    if words.null_count or not pc.min(lengths).as_py() or b"\0" in _value_bytes(words):
        return None
    texts = words.to_pylist()
    encode = msgspec.json.Encoder().encode
    ends = np.concatenate(([0], np.cumsum(lengths.to_numpy()))).tolist()
    if not all(texts[first] for first in ends[:-1]):
        return None
    payloads = [b'{"argv":%b}' % encode(texts[first:last]) for first, last in pairwise(ends)]
    return pa.array(payloads, pa.binary()) if _payloads_fit(payloads) else None


def _payloads_fit(payloads: Iterable[bytes]) -> bool:
    return max(map(len, payloads)) <= PAYLOAD_BYTES_MAX


def _payload_column(payload: pa.Array) -> pa.Array | None:
    """Plain payloads; of texts an empty one is a cell that was not given."""
    is_text = _is_text(payload.type)
    if payload.null_count or not (is_text or pa.types.is_binary(payload.type)):
        return None
    lengths = pc.min_max(pc.binary_length(payload)).as_py()
    if lengths["max"] > PAYLOAD_BYTES_MAX or (is_text and not lengths["min"]):
        return None
    return payload.cast(pa.binary())


def _after_column(given: dict[str, pa.Array]) -> pa.Array | None:
    """What each waits for; empty lists where nothing is said."""
    kind = PREPARED_SCHEMA.field("after").type
    rows = len(given["name"])
    if "after" not in given:
        empty = pa.array([], pa.string())
        return pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1), pa.int32()), empty).cast(kind)
    after = given["after"]
    if not _is_list_of_texts(after.type):
        return None
    lengths = pc.fill_null(pc.list_value_length(after), 0).to_numpy()
    names = after.flatten()
    if lengths.max() > AFTER_MAX or not _are_names(names, nullable=False):
        return None
    waiting = np.repeat(np.arange(rows), lengths)
    if _has_duplicates(waiting, names) or _waits_for_itself(given["name"], waiting, names):
        return None
    ends = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    return pa.ListArray.from_arrays(ends, names.cast(pa.string())).cast(kind)


def _has_duplicates(waiting: np.ndarray[Any, Any], names: pa.Array) -> bool:
    """Some task waits for one name twice."""
    codes = names.dictionary_encode().indices.to_numpy()
    pairs = waiting * (len(names) + 1) + codes
    return len(np.unique(pairs)) < len(pairs)


def _waits_for_itself(own: pa.Array, waiting: np.ndarray[Any, Any], names: pa.Array) -> bool:
    return bool(len(names)) and bool(pc.any(pc.equal(own.take(pa.array(waiting)), names)).as_py())


def _lane_column(given: dict[str, pa.Array]) -> pa.Array | None:
    """Lanes that are no templates; the open one where nothing is said."""
    rows = len(given["name"])
    if "lane" not in given:
        return pa.repeat("", rows)
    lane = given["lane"]
    if not _are_names(lane, nullable=True) or is_template(_value_bytes(lane).decode()):
        return None
    return pc.fill_null(lane, "").cast(pa.string())


def _plain_terms(given: dict[str, pa.Array], service: str, rows: int) -> pa.Array | None:
    """The terms as text: as many different ones as there are services, priorities and slots."""
    if "service" in given and not _are_names(given["service"], nullable=True):
        return None
    for key, (lowest, highest) in _NUMBERS.items():
        if key in given and not _are_numbers(given[key], lowest, highest):
            return None
    keys = [key for key in ("service", *_NUMBERS) if key in given]
    if not keys:
        return pa.repeat(_terms_text(TaskSpec(name="", service=service)), rows)
    texts: dict[tuple[object, ...], str] = {}
    column: list[str] = []
    for values in zip(*(given[key].to_pylist() for key in keys), strict=True):
        text = texts.get(values)
        if text is None:
            own = {key: one for key, one in zip(keys, values, strict=True) if one is not None}
            text = _terms_text(TaskSpec(**{"name": "", "service": service, **own}))
            texts[values] = text
        column.append(text)
    return pa.array(column, pa.string())


_NUMBERS: Final = {"priority": (-PRIORITY_MAX, PRIORITY_MAX), "slots": (1, (1 << 63) - 1)}


def _are_numbers(column: pa.Array, lowest: int, highest: int) -> bool:
    if not pa.types.is_integer(column.type):
        return False
    found = pc.min_max(column).as_py()
    return bool(lowest <= found["min"] and found["max"] <= highest)
