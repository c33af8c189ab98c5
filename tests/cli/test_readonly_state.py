"""Read-only commands on full disks and read-only mounts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import ExitCode
from tests.kit.disks import mounted, small_disk
from tests.kit.processes import Broker, Running, run, run_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.needs("mounts")

#: Commands that need no broker, with their exit codes.
READING: tuple[tuple[Sequence[str], int], ...] = (
    (("status",), 0),
    (("status", "--json"), 0),
    (("list",), 0),
    (("show", "good"), 0),
    (("results", "good"), 0),
    (("log", "bad"), 0),
    (("why", "waits"), 0),
    (("workers",), 0),
    (("services",), 0),
    (("lanes",), 0),
    (("journal", "check"), 0),
    (("journal", "check", "--deep"), 0),
)

NO_SOCKETS = shutil.ignore_patterns("*.sock")

DISK_BYTES = 8 * 1024 * 1024


@contextmanager
def full_disk(content: Path) -> Iterator[Path]:
    """Mount a full disk with a copy of a directory."""
    with small_disk(DISK_BYTES) as disk:
        shutil.copytree(content, disk, dirs_exist_ok=True, ignore=NO_SOCKETS)
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert os.statvfs(disk).f_bavail == 0
        yield disk


@contextmanager
def read_only_disk(content: Path) -> Iterator[Path]:
    with mounted("--bind", str(content)) as disk:
        remount = ["mount", "-o", "remount,ro,bind", str(disk)]
        subprocess.run(remount, check=True, capture_output=True)
        yield disk


#: Two commands may run in different seconds.
AGES = re.compile(r"\d+ \w+ ago|\d+\.\d s ago|just now")

DISKS = {"full": full_disk, "read-only": read_only_disk}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the state of a stopped broker."""
    directory = tmp_path_factory.mktemp("stopped")
    with Broker(directory) as broker:
        _use(directory)
        assert broker.terminate()[0] == 0
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the state of a killed broker, whose log has rows."""
    directory = tmp_path_factory.mktemp("killed")
    with Broker(directory) as broker:
        _use(directory)
        broker.kill()
    (directory / ".taskyard/journal.sqlite-shm").unlink(missing_ok=True)
    assert (directory / ".taskyard/journal.sqlite-wal").stat().st_size
    return directory


def _use(directory: Path) -> None:
    """Run one task, fail one, and leave one waiting."""
    with Running(directory, "worker", "--until-eof", "--slots", "1") as worker:
        for name, *words in (
            ("good", "echo", "well done"),
            ("bad", "sh", "-c", "echo trouble >&2; exit 4"),
        ):
            assert run_here(directory, "submit", "--name", name, "--", *words)[0] == 0
        assert run_here(directory, "wait", "good", "bad")[0] == 1
        later = ("--name", "waits", "--after", "bad", "--lane", "slow", "--", "true")
        assert run_here(directory, "submit", *later)[0] == 0
        worker.hang_up()
        worker.end()


def files_of(directory: Path) -> dict[str, bytes]:
    state = directory / ".taskyard"
    return {path.name: path.read_bytes() for path in state.iterdir() if path.is_file()}


def read(directory: Path, *words: str) -> tuple[int, str]:
    """Run a command that reads. Return its exit status and its stdout, without ages."""
    code, out, _ = run_here(directory, *words)
    return code, AGES.sub("AGO", out.replace(str(directory), "HERE"))


@pytest.mark.parametrize("left", ["stopped", "killed"])
@pytest.mark.parametrize("disk", DISKS)
def test_every_verb_that_reads_answers_as_on_a_sound_disk(
    request: pytest.FixtureRequest, tmp_path: Path, left: str, disk: str
) -> None:
    content: Path = request.getfixturevalue(left)
    shutil.copytree(content, tmp_path / "sound", ignore=NO_SOCKETS)
    with DISKS[disk](content) as directory:
        before = files_of(directory)
        for words, code in READING:
            found = read(directory, *words)
            assert found[0] == code, (words, found)
            assert found == read(tmp_path / "sound", *words), words
        after = files_of(directory)
    before.pop("lock")
    after.pop("lock")
    assert after == before


@pytest.mark.parametrize("disk", DISKS)
def test_verbs_that_write_say_why_they_can_not(stopped: Path, disk: str) -> None:
    with DISKS[disk](stopped) as directory:
        history = [("pipeline", "history")] if find_spec("pyspark") else []
        for words in (("journal", "compact"), ("broker",), *history):
            code, out, err = run(directory, *words)
            assert code in (ExitCode.USAGE, ExitCode.STATE_DAMAGED), (words, err)
            assert out == ""
            assert err.count("\n") == 1, err
            assert any(part in err for part in ("free some space", "Read-only file system")), err


@pytest.mark.parametrize("is_used", [True, False])
def test_verbs_find_the_running_broker_through_a_read_only_mount(
    tmp_path: Path,
    is_used: bool,  # noqa: FBT001
) -> None:
    """The lock and the socket are the same through both mounts."""
    (tmp_path / "live").mkdir()
    with Broker(tmp_path / "live") as broker:
        if is_used:
            _use(tmp_path / "live")
        with read_only_disk(tmp_path / "live") as directory:
            code, out, err = run_here(directory, "status", "--json")
            assert (code, err) == (0, "")
            assert ('"done":1' in out) is is_used
            assert run_here(directory, "journal", "check")[0] == 0
        assert broker.terminate()[0] == 0
