"""What a broker and the program that compacts beside it say to each other.

Apart from the program itself, which needs Arrow: a broker must not wait for that, nor hold it.
"""

import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from taskyard.errors import JournalFailed, TaskyardError
from taskyard.journal import chain
from taskyard.journal.chain import Head, seal
from taskyard.journal.files import free_bytes
from taskyard.journal.reader import JournalReader
from taskyard.journal.store import DISK_RESERVE_BYTES

#: Given the state directory and the sealed head up to which to go, in hexadecimal.
COMPACTION_COMMAND: tuple[str, ...] = (
    sys.executable,
    "-P",
    "-m",
    "taskyard.journal.compaction_process",
)


class CompactionReport(msgspec.Struct, omit_defaults=True):
    """How a compaction ended, as far as it is done beside the broker."""

    #: Why it could not be done; empty: all is there, and was read back.
    failed: str = ""
    rows: int = 0
    events: int = 0
    #: Tasks that ended in these rows, and tasks in the snapshot.
    ended: int = 0
    unfinished: int = 0


_decode = msgspec.json.Decoder(CompactionReport).decode


class CompactionChild:
    """The program at work, for one head. Raises OSError if it can't be started."""

    def __init__(self, directory: Path, identity: bytes, head: Head) -> None:
        self.head = head
        # A session of its own: Ctrl-C is for the broker, which ends this in its own time.
        self._process = subprocess.Popen(
            [*COMPACTION_COMMAND, str(directory.absolute()), seal(identity, head).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> CompactionReport | None:
        """How it ended, once; None while it has not."""
        if self._process.poll() is None:
            return None
        said, _ = self._process.communicate()
        try:
            return _decode(said)
        except msgspec.MsgspecError:
            status = self._process.returncode
            how = f"was killed by signal {-status}" if status < 0 else f"left with status {status}"
            return CompactionReport(f"the process that does it {how}")

    def kill(self) -> None:
        """Kill it: whatever it was at, the next one comes to the same end."""
        self._process.kill()
        self._process.communicate()


#: The broker and its workers go first; where they want it all, a quarter of a processor is left for
#: this, because it has to come to its end.
NICENESS: Final = 5

#: Rows between two looks at the disk and at the parent: some megabytes.
ROWS_PER_CHECK: Final = 256

#: As in the broker: millions of small objects that are never part of a cycle.
GC_THRESHOLD: Final = 50_000


def run(directory: Path, sealed: bytes, check_abort: Callable[[], None]) -> CompactionReport:
    """Compact beside the broker, up to a sealed head. `check_abort` may raise to end it."""
    from taskyard.journal import compaction  # noqa: PLC0415  # Arrow: not in the broker

    found = chain.unseal(sealed)
    if found is None:
        return CompactionReport(failed="the head to go up to is damaged on its way here; try again")

    def progress(_step: str, done: int, _total: int) -> None:
        if done % ROWS_PER_CHECK == 0:
            check_abort()

    try:
        with JournalReader(directory, *found) as reader:
            outcome = compaction.export(directory, reader, progress)
            check_abort()
            compaction.verify_covered(directory, reader, reader.head)
        return CompactionReport("", outcome.rows, outcome.events, outcome.ended, outcome.unfinished)
    except TaskyardError as error:
        return CompactionReport(failed=str(error))


class AbortCheck:
    """Looks whether to go on: the parent lives, and the disk has room for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parent = os.getppid()

    def __call__(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)
        free = free_bytes(self._directory)
        if free < DISK_RESERVE_BYTES:
            raise JournalFailed(
                f"compacting {self._directory} was given up with {free} bytes left on its disk, "
                "which are kept for completions; free some space there"
            )


class NoPandas:
    """Keeps Arrow from importing pandas with its first array: half a second, and 40 MB."""

    def find_spec(self, name: str, *_: object) -> None:
        """Refuse to find it, before anything else looks for it."""
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used here", name=name)


def exit_on_stdin_close() -> None:
    """Ask for SIGIO when the other end of stdin is closed; it may be closed already."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    looking = select.poll()
    looking.register(0, select.POLLIN)
    if looking.poll(0):
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Run as a program of its own."""
    exit_on_stdin_close()
    os.nice(NICENESS)
    sys.meta_path.insert(0, NoPandas())
    gc.set_threshold(GC_THRESHOLD)
    directory = Path(arguments[0])
    report = run(directory, bytes.fromhex(arguments[1]), AbortCheck(directory))
    os.write(1, msgspec.json.encode(report) + b"\n")
    # Not the long way out: to free millions of objects one by one takes longer than some steps.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
