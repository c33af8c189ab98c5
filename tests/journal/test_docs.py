"""docs/journal.md says what the code does: its tables are compared with it."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pyarrow as pa
import pytest

from taskyard.core import image, records, tasks, workers
from taskyard.core.records import AnyRecord, ReturnReason
from taskyard.core.states import TaskState
from taskyard.journal import chain, chronicle, finished, history, schema, snapshot, witness

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()

ARRAYS = [
    tasks.Submission,
    tasks.Terms,
    workers.WorkerFacts,
    image.Image,
    image.ServiceImage,
    image.LaneImage,
    image.QueueImage,
    image.WorkerImage,
    image.LeaseImage,
]


def rows(pattern: str) -> list[list[str]]:
    """The cells of table rows that begin so."""
    lines = [line for line in PAGE.splitlines() if re.match(pattern, line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(\w+)`", cell))


def test_records_are_documented_with_their_numbers_and_fields() -> None:
    documented = [
        (int(number), *quoted(name), quoted(fields))
        for number, name, fields, _ in rows(r"\| \d+ \| `[A-Z]")
    ]
    assert documented == [
        (record.__struct_config__.tag, record.__name__, record.__struct_fields__)
        for record in get_args(AnyRecord)
    ]


def test_arrays_are_documented_with_their_fields() -> None:
    documented = {quoted(name)[0]: quoted(fields) for name, fields in rows(r"\| `[A-Z]\w+` \|")}
    expected: dict[str, tuple[str, ...]] = {}
    for array in ARRAYS:
        assert issubclass(array, msgspec.Struct)
        expected[array.__name__] = array.__struct_fields__
    assert documented == expected


@pytest.mark.parametrize(("table", "columns"), history.TABLES.items(), ids=history.TABLES)
def test_columns_of_the_history_are_documented(table: str, columns: pa.Schema) -> None:
    section = PAGE.split(f"### `{table}`")[1].split("\n#")[0]
    lines = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (yes|no) \| \S", section, re.MULTILINE)
    assert lines == [
        (field.name, str(field.type), "yes" if field.nullable else "no") for field in columns
    ]


def test_kinds_are_documented() -> None:
    section = PAGE.split("Kinds: ")[1].split(".")[0]
    kinds = [kind.decode() for kind in (*chronicle.KINDS.values(), chronicle.READY)]
    assert sorted(quoted(section)) == sorted(kinds)


def test_reasons_and_states_are_documented() -> None:
    for reason in ReturnReason:
        assert f"{int(reason)} {reason.name.lower()}" in PAGE
    for state in TaskState:
        assert f"{int(state)} {state.name}" in PAGE


def test_tables_are_documented_letter_by_letter() -> None:
    statements = re.findall(r"^CREATE TABLE .*$", PAGE, re.MULTILINE)
    assert statements == [*schema.TABLES.values(), *finished.TABLES.values()]


def test_layouts_are_documented_with_their_sizes() -> None:
    sizes = [int(size) for (size, _) in rows(r"\| \d+ \| (?!`[A-Z])")]
    label, identity = len(chain.LABEL), chain.IDENTITY_BYTES
    assert sizes[:6] == [label, identity, 8, 8, chain.CHAIN_BYTES, 32]
    assert sum(sizes[:6]) == chain.SEALED_BYTES
    assert sizes[6:] == [len(snapshot.MAGIC), 4, chain.SEALED_BYTES, 8, 32]
    assert sum(sizes[6:]) == snapshot.HEADER_BYTES
    assert f"at offsets 0 and {witness.SLOT_SPACING_BYTES}" in PAGE


def test_limits_are_documented() -> None:
    assert f"{history.EVENTS_A_FILE_MAX:,} events" in PAGE
    assert f"up to {tasks.DIGEST_BYTES} bytes" in PAGE


def test_every_record_has_a_kind() -> None:
    assert set(chronicle.KINDS) == set(get_args(AnyRecord))
    assert len({*chronicle.KINDS.values(), chronicle.READY}) == len(chronicle.KINDS) + 1


def test_names_of_modules_are_those_of_the_page() -> None:
    files = (schema.FILE_NAME, witness.FILE_NAME, finished.FILE_NAME, snapshot.FOLDER)
    for name in (*files, history.FOLDER):
        assert f"`{name}" in PAGE
    assert records.__doc__
