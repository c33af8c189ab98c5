"""`map` and `run` of commands with long output: every byte is kept, and memory is bounded.

Processes are those of a user: a command that starts its own broker and worker. `-s` prints their
peaks of memory. With --whole there are 2,000 commands, one of which writes 100 MB, and eight
commands that write 100 MB each at once.
"""

from __future__ import annotations

import hashlib
import random
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from tests.kit.processes import AT_THE_GATE, TASKYARD, environment, marks, until

if TYPE_CHECKING:
    from collections.abc import Iterator

MEGABYTE: Final = 1_000_000

#: The most that a process may grow by, however much is written: the spool of a worker (4 MiB) and
#: messages of 1 MiB, with copies on the way. All the output in memory would be far more.
GROWTH_BYTES_MAX: Final = 16 << 20

#: Writes a number of megabytes, all of them different.
WRITER: Final = """
import random, sys
for number in range(int(sys.argv[2])):
    sys.stdout.buffer.write(random.Random(f"{sys.argv[1]} {number}").randbytes(1_000_000))
"""

#: A short command, or a long one that waits for the file `gate`.
SCRIPT: Final = f"""
echo "$1" >> marks
if [ "$2" = 0 ]; then
    echo "out $1"
    echo "err $1" >&2
else
    {AT_THE_GATE}
    exec {shlex.quote(sys.executable)} -S writer.py "$1" "$2"
fi
"""


class Case(NamedTuple):
    """Numbers of short commands and of long ones, and the megabytes that a long one writes."""

    short: int
    long: int
    megabytes: int

    def lines(self) -> list[str]:
        """Return the arguments of the script, the short commands first."""
        short = [f"{number} 0" for number in range(self.short)]
        return short + [f"{self.short + number} {self.megabytes}" for number in range(self.long)]


CASES: Final = (
    Case(18, 2, 16),
    pytest.param(Case(1_999, 1, 100), marks=pytest.mark.whole),
    pytest.param(Case(0, 8, 100), marks=pytest.mark.whole),
)


def expected(line: str) -> str:
    """Return the digest of a command's stdout."""
    name, megabytes = line.split()
    if megabytes == "0":
        return hashlib.sha256(f"out {name}\n".encode()).hexdigest()
    digest = hashlib.sha256()
    for number in range(int(megabytes)):
        digest.update(random.Random(f"{name} {number}").randbytes(MEGABYTE))
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Peaks:
    """Peaks of the memory of a command, its broker and its worker, in bytes."""

    def __init__(self, pid: int) -> None:
        children: list[int] = []
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
        self._pids = dict(zip(("command", "broker", "worker"), [pid, *children], strict=True))
        self.bytes = dict.fromkeys(self._pids, 0)
        self.read()
        self._first = dict(self.bytes)

    def read(self) -> None:
        for role, pid in self._pids.items():
            self.bytes[role] = max(self.bytes[role], _peak(pid))

    def read_until_end(self, process: subprocess.Popen[bytes]) -> bool:
        """Read the peaks once. Return whether the command has ended."""
        self.read()
        return process.poll() is not None

    def growth(self) -> dict[str, int]:
        return {role: peak - self._first[role] for role, peak in self.bytes.items()}


def _peak(pid: int) -> int:
    """Return the peak of the resident memory of a process. 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


@contextmanager
def started(directory: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command with its stdout in the file `stdout`."""
    with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(
            [*TASKYARD, *words], cwd=directory, env=environment(), start_new_session=True, **files
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def command_line(verb: str, case: Case, directory: Path) -> list[str]:
    """Write the input of a verb. Return its words."""
    lines = case.lines()
    options = [verb, "--jobs", "8", "--output", "out"]
    if verb == "map":
        (directory / "lines").write_text("".join(f"{line}\n" for line in lines))
        words = ["--lines", "lines", "--colsep", " ", "--campaign", "c"]
        return [*options, *words, "--", "sh", "script", "{1}", "{2}"]
    (directory / "c.txt").write_text("".join(f"sh script {line}\n" for line in lines))
    return [*options, "--shell", "c.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("verb", ["map", "run"])
def test_long_output_is_whole_and_memory_is_bounded(verb: str, case: Case, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(SCRIPT)
    (tmp_path / "writer.py").write_text(WRITER)
    with started(tmp_path, *command_line(verb, case, tmp_path)) as process:
        until(lambda: len(marks(tmp_path)) == len(case.lines()), "all commands have started")
        peaks = Peaks(process.pid)
        (tmp_path / "gate").touch()
        until(lambda: peaks.read_until_end(process), "the end")
    assert process.returncode == 0, (tmp_path / "stderr").read_text()
    sizes = ", ".join(f"{role} {size >> 20} MiB" for role, size in peaks.bytes.items())
    sys.stdout.write(f"\n{verb}, {case}: {sizes}\n")
    assert {role: size for role, size in peaks.growth().items() if size > GROWTH_BYTES_MAX} == {}
    files = {_line(path): path for path in (tmp_path / "out" / "c").iterdir()}
    assert {line: digest_of(path / "1.out") for line, path in files.items()} == {
        line: expected(line) for line in case.lines()
    }
    for line in case.lines()[: case.short]:
        assert (files[line] / "1.err").read_text() == f"err {line.split()[0]}\n"
    if verb == "map":  # its stdout has all results, in the order of the input
        whole = hashlib.sha256()
        for line in case.lines():
            whole.update((files[line] / "1.out").read_bytes())
        assert digest_of(tmp_path / "stdout") == whole.hexdigest()


def _line(directory: Path) -> str:
    """Return the arguments of a command from the name of its task, which ends in a digest."""
    return " ".join(directory.name.split("-")[-3:-1])
