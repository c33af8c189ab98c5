"""Rows of tasks as Arrow columns: input rows become prepared tasks or rejects.

A batch of plain rows is checked and converted column by column. Any other batch goes row by row
through the functions of `taskyard load`, so both give the same result. Owns the columns in between
(`PREPARED_SCHEMA`): what a submission needs, or why a row is rejected. A bundle is several rows of
one place, and its first row has its payload. Knows neither files nor Spark, only pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, structs

from taskyard.campaign.batches import bundle_submission, encode_batch, task_bytes
from taskyard.campaign.lanes import LaneTemplates, is_template
from taskyard.campaign.lines import InvalidRow
from taskyard.campaign.tables import rows_of
from taskyard.campaign.task_spec import BundleRef, InvalidTask, TaskSpec, expand_row, service_of
from taskyard.campaign.task_spec import assign_lanes as assign_bundle_lanes
from taskyard.campaign.values import InvalidValue
from taskyard.core.limits import AFTER_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, PRIORITY_MAX
from taskyard.core.model import Terms

#: A task to submit, or a rejected row.
PREPARED_SCHEMA: Final = pa.schema(
    [
        # Its split of the input, and its line in the split. All tasks of a bundle have the same.
        pa.field("place", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("payload", pa.binary()),
        pa.field("lane", pa.string()),
        pa.field("after", pa.list_(pa.field("element", pa.string()))),
        # Properties shared with other tasks, as JSON. Few are different.
        pa.field("terms", pa.string()),
        # The given run time.
        pa.field("seconds", pa.float64()),
        # Null for a valid row. Otherwise the error, and the row as JSON. If the row is null, the
        # file itself is unreadable, and the reason says where.
        pa.field("reason", pa.string()),
        pa.field("row", pa.string()),
    ]
)

#: The most rows, and bytes of payloads, that are Python objects at once. They fill some messages.
ROWS_PER_BATCH: Final = 20_000
BYTES_PER_BATCH: Final = 8 * 1024 * 1024

#: A rejected row is cut here. It is meant for reading, not for loading.
ROW_CHARACTERS_MAX: Final = 10_000

#: Returns the lane template of a service. Empty: it has none.
TemplateLookup = Callable[[str], str]

_encode = msgspec.json.Encoder(enc_hook=repr).encode
_decode_terms = msgspec.json.Decoder(TaskSpec).decode


def pack(rows: pa.RecordBatch | pa.Table) -> bytes:
    """Serialize rows to one value, which Spark carries without looking inside."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_PACK_OPTIONS) as writer:
        writer.write(rows)
    return bytes(sink.getvalue())


def unpack(values: Iterable[pa.Scalar | bytes]) -> pa.Table:
    """Deserialize rows from values of `pack`, in order."""
    buffers = (one if isinstance(one, bytes) else one.as_buffer() for one in values)
    return pa.concat_tables([pa.ipc.open_stream(buffer).read_all() for buffer in buffers])


_PACK_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")


class RowCollector:
    """Collects rows into columns, one by one."""

    def __init__(self, campaign: str, template_of: TemplateLookup = lambda _service: "") -> None:
        """Set the lanes of bundles that give none by `template_of`, else by their recipients."""
        self._campaign = campaign
        self._template_of = template_of
        self._columns: dict[str, list[object]] = {name: [] for name in PREPARED_SCHEMA.names}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._columns["place"])

    @property
    def is_full(self) -> bool:
        return len(self) >= ROWS_PER_BATCH or self._bytes >= BYTES_PER_BATCH

    def add_row(self, place: int, raw: object, seconds: float | None = None) -> None:
        """Add one row as a format read it: a task's keys, or `InvalidRow`."""
        if isinstance(raw, InvalidRow):
            self._reject(place, raw.reason, raw.raw, raw.name)
            return
        try:
            specs, payload = self._check_row(raw)
        except InvalidTask as bad:
            name = raw.get("name") if isinstance(raw, dict) else None
            self._reject(place, str(bad), raw, name if isinstance(name, str) else "")
            return
        self._bytes += len(payload)
        terms = _terms_text(specs[0])
        for number, spec in enumerate(specs):
            self._add(
                place=place,
                name=spec.name,
                payload=None if number else payload,
                lane=spec.lane,
                after=spec.after,
                terms=terms,
                seconds=seconds,
            )

    def _check_row(self, raw: object) -> tuple[Sequence[TaskSpec], bytes]:
        """Return a task, or those of a bundle, and their payload. Raises `InvalidTask`."""
        specs = expand_row(raw, self._campaign)
        if specs[0].bundle_ref is not None:
            template = self._template_of(service_of(specs[0]))
            assign_bundle_lanes(specs, self._campaign, template)
            return specs, bundle_submission(specs, b"", 0).text_of(0)
        whole = encode_batch(specs, b"", 0)
        lane = whole.lanes[0] if whole.lanes else b""
        task_bytes(whole.names[0], whole.text_of(0), lane, whole.after[0] if whole.after else ())
        return specs, whole.text_of(0)

    def reject_file(self, place: int, reason: str) -> None:
        """Reject the whole file, with all its rows."""
        self._add(place=place, reason=reason)

    def _reject(self, place: int, reason: str, raw: object, name: str) -> None:
        self._add(place=place, reason=reason, row=row_text(raw), name=_utf8_safe(name) or None)

    def _add(self, **values: object) -> None:
        for name, column in self._columns.items():
            column.append(values.get(name))

    def flush(self) -> pa.RecordBatch:
        """Return the collected rows, and start again."""
        columns = [pa.array(self._columns[one.name], one.type) for one in PREPARED_SCHEMA]
        for column in self._columns.values():
            column.clear()
        self._bytes = 0
        return pa.RecordBatch.from_arrays(columns, schema=PREPARED_SCHEMA)


def row_text(raw: object) -> str:
    """Return a row as JSON for the user to correct. A long row is cut and returned as text."""
    text = _utf8_safe(_encode(raw).decode())
    return text if len(text) <= ROW_CHARACTERS_MAX else _encode(text[:ROW_CHARACTERS_MAX]).decode()


def _utf8_safe(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _terms_text(spec: TaskSpec) -> str:
    """Return the properties of a task that others may share, as JSON.

    Those of a bundle's tasks include the bundle's name and lane template.
    """
    bundle = spec.bundle_ref
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
        inputs=None,
        outputs=None,
        service=service_of(spec),
        bundle_ref=bundle and BundleRef(bundle.bundle, 0, "", bundle.template),
    )
    return _encode(shared).decode()


def service_of_terms(terms: str) -> str:
    """Return the service of tasks with these terms."""
    return service_of(_decode_terms(terms))


def prepared_to_row(task: dict[str, Any]) -> dict[str, object]:
    """Return the keys of a task, or of a bundle by its first task, for the user to correct."""
    from taskyard.campaign.task_spec import to_row  # noqa: PLC0415  # of rejects alone

    terms, payload = _decode_terms(task["terms"]), task["payload"]
    work: dict[str, object] = {"payload": payload}
    lane = task["lane"] or ""
    if terms.bundle_ref is not None:
        lane = ""  # a bundle's row has its template
    elif terms.service in ("exec", "call"):
        work = msgspec.json.decode(payload)
    more = {"name": task["name"], "after": tuple(task["after"] or ()), "lane": lane}
    own = structs.replace(terms, **more, **work)
    default = service_of(structs.replace(own, service=None))
    return to_row(structs.replace(own, service=None if own.service == default else own.service))


class SharedTerms(Struct):
    """Terms by their JSON text, for one campaign and one start of all durations."""

    campaign: bytes
    now_ns: int
    #: Parsed terms by text.
    cached: dict[str, Terms] = {}

    def get(self, text: str) -> Terms:
        found = self.cached.get(text)
        if found is None:
            spec = structs.replace(_decode_terms(text), payload=b"")
            found = self.cached[text] = encode_batch([spec], self.campaign, self.now_ns).terms[0]
        return found


def assign_lanes(
    rows: pa.RecordBatch, campaign: str, template_of: TemplateLookup
) -> pa.RecordBatch:
    """Set the lanes of tasks that give none. Reject tasks that their template does not fit."""
    texts = [text for text in pc.unique(rows["terms"]).to_pylist() if text is not None]
    templates = {text: template_of(service_of_terms(text)) for text in texts}
    if not any(templates.values()):
        return rows
    shared, known = SharedTerms(campaign.encode(), 0), LaneTemplates()
    known.put({shared.get(text).service: one for text, one in templates.items()})
    changed = {name: rows[name].to_pylist() for name in ("lane", "reason", "row")}
    for number, task in enumerate(rows.to_pylist()):
        if task["reason"] is None and not task["lane"]:
            terms = shared.get(task["terms"])
            try:
                lane = known.lane_of(task["name"].encode(), task["payload"], terms)
                changed["lane"][number] = lane.decode()
            except InvalidValue as bad:
                changed["reason"][number] = str(bad)
                changed["row"][number] = row_text(prepared_to_row(task))
    for name, column in changed.items():
        field = PREPARED_SCHEMA.get_field_index(name)
        rows = rows.set_column(field, PREPARED_SCHEMA[field], pa.array(column, pa.string()))
    return rows


# Column by column.


def prepare(
    batch: pa.RecordBatch,
    places: Sequence[int] | np.ndarray[Any, Any],
    campaign: str,
    template_of: TemplateLookup = lambda _service: "",
) -> Iterator[pa.RecordBatch]:
    """Prepare the rows of a table with the keys of a task. `places` has one for each row."""
    plain = _fast_columns(batch)
    if plain is not None:
        places_column = pa.array(places, pa.int64())
        yield pa.RecordBatch.from_arrays([places_column, *plain], schema=PREPARED_SCHEMA)
        return
    collector = RowCollector(campaign, template_of)
    for place, raw in zip(places, rows_of(batch), strict=True):
        collector.add_row(int(place), raw)
        if collector.is_full:
            yield collector.flush()
    if len(collector):
        yield collector.flush()


def _fast_columns(batch: pa.RecordBatch) -> list[pa.Array] | None:
    """Return the columns of `PREPARED_SCHEMA` after the first, if all rows are plain and valid.

    None: the rows must be checked one by one.
    """
    given = {
        name: _decoded(batch.column(name))
        for name in batch.schema.names
        if batch.column(name).null_count < len(batch)
    }
    work = given.keys() & {"argv", "payload"}
    if not batch.num_rows or "name" not in given or len(work) != 1:
        return None
    if given.keys() - _PLAIN_KEYS or not _are_names(given["name"], nullable=False):
        return None
    payload = (
        _command_payloads(given["argv"]) if "argv" in given else _payload_column(given["payload"])
    )
    if payload is None:
        return None
    after, lane = _after_column(given), _lane_column(given)
    terms = _plain_terms(given, "exec" if "argv" in given else "default", len(batch))
    if after is None or lane is None or terms is None:
        return None
    nothing = [
        pa.nulls(len(batch), PREPARED_SCHEMA.field(name).type)
        for name in PREPARED_SCHEMA.names[-3:]
    ]
    return [given["name"].cast(pa.string()), payload, lane, after, terms, *nothing]


#: The keys of a plain task.
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
    """Return whether all are ASCII, short enough, and have no space at an end to be stripped."""
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
    """Return whether all texts are printable ASCII. Checks the bytes of the column at once."""
    return not _value_bytes(texts).translate(None, _PRINTABLE)


def _value_bytes(texts: pa.Array) -> bytes:
    """Return the concatenated bytes of a column of texts."""
    _, offsets, values = texts.buffers()
    if values is None:
        return b""
    wide = pa.types.is_large_string(texts.type)
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)
    first, last = int(ends[texts.offset]), int(ends[texts.offset + len(texts)])
    return bytes(memoryview(values)[first:last])


def _command_payloads(argv: pa.Array) -> pa.Array | None:
    """Return the payloads of commands."""
    if not _is_list_of_texts(argv.type) or argv.null_count:
        return None
    words = argv.flatten()
    lengths = pc.list_value_length(argv)
    joined = _value_bytes(words)
    if words.null_count or not pc.min(lengths).as_py() or b"\0" in joined:
        return None
    if not pc.min(pc.binary_length(pc.list_element(argv, 0))).as_py():
        return None
    if not joined.translate(None, _UNESCAPED):
        payloads = pc.binary_join_element_wise(
            '{"argv":["', pc.binary_join(argv.cast(_TEXTS), '","'), '"]}', ""
        ).cast(pa.binary())
    else:
        texts, encode = words.to_pylist(), msgspec.json.Encoder().encode
        ends = np.concatenate(([0], np.cumsum(lengths.to_numpy()))).tolist()
        parts = [b'{"argv":%b}' % encode(texts[first:last]) for first, last in pairwise(ends)]
        payloads = pa.array(parts, pa.binary())
    is_short = pc.max(pc.binary_length(payloads)).as_py() <= PAYLOAD_BYTES_MAX
    return payloads if is_short else None


_TEXTS: Final = pa.list_(pa.string())

#: Printable ASCII, and those of its characters that JSON does not escape.
_PRINTABLE: Final = bytes(range(0x20, 0x7F))
_UNESCAPED: Final = _PRINTABLE.translate(None, b'"\\')


def _payload_column(payload: pa.Array) -> pa.Array | None:
    """Return plain payloads. An empty text counts as missing."""
    is_text = _is_text(payload.type)
    if payload.null_count or not (is_text or pa.types.is_binary(payload.type)):
        return None
    lengths = pc.min_max(pc.binary_length(payload)).as_py()
    if lengths["max"] > PAYLOAD_BYTES_MAX or (is_text and not lengths["min"]):
        return None
    return payload.cast(pa.binary())


def _after_column(given: dict[str, pa.Array]) -> pa.Array | None:
    """Return the dependencies of each task. A missing value is an empty list."""
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
    """Return whether a task waits for one name twice."""
    codes = names.dictionary_encode().indices.to_numpy()
    pairs = np.sort(waiting * (len(names) + 1) + codes)
    return bool(np.any(pairs[1:] == pairs[:-1]))


def _waits_for_itself(own: pa.Array, waiting: np.ndarray[Any, Any], names: pa.Array) -> bool:
    return bool(len(names)) and bool(pc.any(pc.equal(own.take(pa.array(waiting)), names)).as_py())


def _lane_column(given: dict[str, pa.Array]) -> pa.Array | None:
    """Return lanes if none is a template. A missing value is the open lane."""
    rows = len(given["name"])
    if "lane" not in given:
        return pa.repeat("", rows)
    lane = given["lane"]
    if not _are_names(lane, nullable=True) or is_template(_value_bytes(lane).decode()):
        return None
    return pc.fill_null(lane, "").cast(pa.string())


def _plain_terms(given: dict[str, pa.Array], service: str, rows: int) -> pa.Array | None:
    """Return the terms as JSON texts, one for each combination of service, priority and slots."""
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
