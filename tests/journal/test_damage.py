"""Flip a byte of a small journal, or cut a file, anywhere: harmless or refused, never accepted.

A run flips every byte of a witness, and tries every offset of a file's header. Of the rest it tries
a sample: one of every few neighbours. With --whole it tries all.
Harmless means that exactly the acknowledged rows come back and that the journal can be written.
Refused means a StateError, with every file unchanged.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from taskyard.errors import StateError, UnknownFormat
from taskyard.journal import sqlite
from taskyard.journal.chain import SEALED_BYTES, Row
from taskyard.journal.sqlite import SqliteStore, verify_journal
from taskyard.journal.witness import SLOT_SPACING_BYTES
from tests.journal.scenarios import log_end

#: SQLite's smallest page size, so that a small journal has pages of every kind.
PAGE_BYTES = 512
#: Of SQLite's log: its header, and a frame of one page.
LOG_HEADER_BYTES, FRAME_BYTES = 32, 24 + PAGE_BYTES
DATABASE, LOG, WITNESS = "journal.sqlite", "journal.sqlite-wal", "witness"
#: How a journal was left, and the sizes of its rows: large ones need overflow pages.
STATES = {"closed": (80, 90, 1, 3), "killed": (1, 90, 1, 3)}
FILES = [
    (state, name)
    for state in STATES
    for name in (DATABASE, LOG, WITNESS)
    if (state, name) != ("closed", LOG)
]
#: The size of the header of an SQLite database.
HEADER_BYTES = 100
#: Each case is split, so that it can run on several cores.
SHARDS = 4
FLIPPED_BYTES_MIN = 4096


class Journal:
    """The files of a journal on disk, and its acknowledged rows."""

    def __init__(self, files: dict[str, bytes], rows: list[Row]) -> None:
        self.files = files
        self.rows = rows


def on_memory_disk() -> Path | None:
    """Use a place without disk syncs, if there is one: thousands of journals are opened."""
    place = Path("/dev/shm")  # noqa: S108 - only the parent of a private directory
    return place if place.is_dir() else None


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with TemporaryDirectory(dir=on_memory_disk()) as directory:
        yield Path(directory)


def built(state: str, directory: Path) -> Journal:
    """Make journals: `closed` has free pages and no log, `killed` is as a SIGKILL leaves it."""
    store = SqliteStore(directory, PAGE_BYTES)
    for size in STATES[state]:
        store.commit(b"body %d " % size * size, records=size)
    if state == "closed":
        store.trim(1)
    rows = list(store.rows())
    if state == "closed":
        store.close()
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    store.close()
    if LOG in files:  # with one frame of the zeros after its end
        files[LOG] = files[LOG][: log_end(files[LOG]) + FRAME_BYTES]
    return Journal(files, rows)


@pytest.fixture(scope="module")
def journals(place: Path) -> dict[str, Journal]:
    return {state: built(state, place / state) for state in STATES}


def lay_out(files: dict[str, bytes], directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


def reopened(directory: Path) -> list[Row]:
    store = SqliteStore(directory, PAGE_BYTES)
    try:
        return list(store.rows())
    finally:
        store.close()


def content_of(path: Path) -> bytes:
    """Treat a missing log as an empty one: SQLite creates it."""
    return path.read_bytes() if path.exists() else b""


def is_harmless(journal: Journal, files: dict[str, bytes], directory: Path) -> bool:
    """Return whether it opens with all acknowledged rows, and then commits and keeps one more."""
    lay_out(files, directory)
    try:
        store = SqliteStore(directory, PAGE_BYTES)
    except StateError:
        for name in (DATABASE, LOG, WITNESS):
            assert content_of(directory / name) == files.get(name, b"")
        return False
    assert list(store.rows()) == journal.rows
    store.commit(b"one more", 1)
    store.close()
    again = reopened(directory)
    assert again[:-1] == journal.rows
    assert again[-1].body == b"one more"
    return True


def offsets(state: str, name: str, content: bytes) -> list[int]:
    """Return every offset, but few in the padding between the witness's slots and in some pages
    under a log: pages of the same kind are flipped byte by byte in journals without a log."""
    if name == WITNESS:
        padding = range(SEALED_BYTES, SLOT_SPACING_BYTES, 256)
        return [*range(SEALED_BYTES), *padding, *range(SLOT_SPACING_BYTES, len(content))]
    step = 3 if (state, name) == ("killed", DATABASE) else 1
    return list(range(0, len(content), step))


def cuts(state: str, name: str, content: bytes) -> list[int]:
    """Return offsets around the end of every page or frame, and every seventh; all of a witness."""
    if name == WITNESS:
        return offsets(state, name, content)
    first, step = (LOG_HEADER_BYTES, FRAME_BYTES) if name == LOG else (0, PAGE_BYTES)
    around = (0, 1, step - 1)
    return [at for at in range(len(content)) if at % 7 == 0 or (at - first) % step in around]


def flipped(content: bytes, offset: int) -> bytes:
    """Return the flipped bits, which change from byte to byte: high, low, all."""
    mask = (0x01, 0x80, 0xFF, 0x10)[offset % 4]
    return content[:offset] + bytes([content[offset] ^ mask]) + content[offset + 1 :]


def cut(content: bytes, offset: int) -> bytes:
    return content[:offset]


Harm = Callable[[bytes, int], bytes]
Sample = Callable[[Sequence[int]], list[int]]


def harm_at(
    places: list[int], journal: Journal, name: str, harm: Harm, directory: Path
) -> tuple[int, int]:
    """Return how often it was harmless, and how often refused."""
    content = journal.files[name]
    outcomes = [
        is_harmless(journal, {**journal.files, name: harm(content, offset)}, directory)
        for offset in places
    ]
    return outcomes.count(True), outcomes.count(False)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("harm", [flipped, cut])
@pytest.mark.parametrize(("state", "name"), FILES)
def test_damage_anywhere_is_harmless_or_refused(  # noqa: PLR0913, PLR0917 - a case
    journals: dict[str, Journal],
    place: Path,
    sample: Sample,
    state: str,
    name: str,
    harm: Harm,
    shard: int,
) -> None:
    directory = place / f"{state}-{name}-{harm.__name__}-{shard}"
    journal = journals[state]
    choose = offsets if harm is flipped else cuts
    every = choose(state, name, journal.files[name])
    kept_bytes = len(journal.files[name]) if harm is flipped else 0
    kept = [at for at in every if at < (kept_bytes if name == WITNESS else HEADER_BYTES)]
    places = [*kept, *sample([at for at in every if at not in kept])][shard::SHARDS]
    harmless, refused = harm_at(places, journal, name, harm, directory)
    print(f"{state} {name} {harm.__name__}: {harmless} harmless, {refused} refused")  # noqa: T201
    assert refused or name == WITNESS  # whose other slot is enough


@pytest.mark.parametrize("state", STATES)
def test_untouched_journal_is_harmless(
    journals: dict[str, Journal], tmp_path: Path, state: str
) -> None:
    journal = journals[state]
    assert is_harmless(journal, journal.files, tmp_path / "state")


def test_enough_bytes_are_flipped(journals: dict[str, Journal]) -> None:
    count = sum(len(offsets(state, name, journals[state].files[name])) for state, name in FILES)
    assert count >= FLIPPED_BYTES_MIN


@pytest.mark.parametrize(("state", "name"), FILES)
def test_missing_file_is_refused(
    journals: dict[str, Journal], tmp_path: Path, state: str, name: str
) -> None:
    files = {other: content for other, content in journals[state].files.items() if other != name}
    assert not is_harmless(journals[state], files, tmp_path / "state")


@pytest.mark.parametrize("state", STATES)
def test_files_of_another_journal_are_refused(
    journals: dict[str, Journal], tmp_path: Path, state: str
) -> None:
    other = built(state, tmp_path / "other")
    for name in (DATABASE, WITNESS):
        mixed = {**journals[state].files, name: other.files[name]}
        assert not is_harmless(journals[state], mixed, tmp_path / "state")


def is_sound(directory: Path) -> bool:
    try:
        return not verify_journal(directory, sqlite.connect_readonly).wrong
    except UnknownFormat:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("state", "name"), FILES)
def test_check_agrees_with_opening_and_touches_nothing(
    journals: dict[str, Journal], place: Path, sample: Sample, state: str, name: str
) -> None:
    journal, directory = journals[state], place / f"check-{state}-{name}"
    for offset in sample(range(0, len(journal.files[name]), 37)):
        files = {**journal.files, name: flipped(journal.files[name], offset)}
        lay_out(files, directory)
        sound = is_sound(directory)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
        assert is_harmless(journal, files, directory) == sound
