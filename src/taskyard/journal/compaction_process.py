"""The child process that compacts a journal while its broker runs, and the broker's handle on it.

Started as `python -P -m taskyard.journal.compaction_process STATE HEAD`, with HEAD the sealed head
of the last row to compact, in hexadecimal. It writes history, index and snapshot, reads them back
and prints a `CompactionReport` as JSON. Trimming rows and freeing memory are left to the broker.

The child runs at a lower priority, leaves the disk reserve to the broker, and ends with it. The
stdin is a pipe from the broker: on Linux SIGIO kills the child when the kernel closes the other
end. Elsewhere SIGIO is ignored, and the child checks its parent process now and then. A child
killed at any point leaves a state from which the next child continues.
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
from msgspec.structs import asdict

from taskyard.errors import JournalFailed, TaskyardError
from taskyard.journal import chain, compaction, state_store
from taskyard.journal.chain import Head, seal
from taskyard.journal.compaction import CompactionResult, DatabaseTerm
from taskyard.journal.files import free_bytes
from taskyard.journal.sqlite import JournalReader
from taskyard.journal.store import DISK_RESERVE_BYTES

#: Arguments that follow: the state directory and the sealed head, in hexadecimal.
COMPACTION_COMMAND: tuple[str, ...] = (
    sys.executable,
    "-P",
    "-m",
    "taskyard.journal.compaction_process",
)


#: The variable with a `DatabaseTerm`, for a journal in PostgreSQL.
DATABASE_VARIABLE: Final = "TASKYARD_COMPACTION_DATABASE"


class CompactionReport(CompactionResult, omit_defaults=True):
    """The result of the child's part of a compaction."""

    #: Why it failed. Empty if everything was written and read back.
    failed: str = ""


_decode = msgspec.json.Decoder(CompactionReport).decode


class CompactionChild:
    """A running child process for one head. Raises OSError if it can't be started."""

    def __init__(
        self, directory: Path, identity: bytes, head: Head, database: DatabaseTerm | None = None
    ) -> None:
        self.head = head
        environment = dict(os.environ)
        if database is not None:
            environment[DATABASE_VARIABLE] = msgspec.json.encode(database).decode()
        # A separate session: Ctrl-C goes to the broker, which then kills the child.
        self._process = subprocess.Popen(
            [*COMPACTION_COMMAND, str(directory.absolute()), seal(identity, head).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> CompactionReport | None:
        """Return the report once, when the child has ended. None until then."""
        if self._process.poll() is None:
            return None
        output, _ = self._process.communicate()
        try:
            return _decode(output)
        except msgspec.MsgspecError:
            status = self._process.returncode
            how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
            return CompactionReport(failed=f"child process {how}")

    def kill(self) -> None:
        """Kill the child. The next child continues from whatever it left."""
        self._process.kill()
        self._process.communicate()


#: The broker and its workers come first. On a busy machine about a quarter of a core is left for
#: the compaction, which still has to finish.
NICENESS: Final = 5

#: Rows between two checks of the disk and the parent: some megabytes.
ROWS_PER_CHECK: Final = 256

#: As in the broker: millions of small objects that are never part of a cycle.
GC_THRESHOLD: Final = 50_000


def run(directory: Path, sealed: bytes, check_abort: Callable[[], None]) -> CompactionReport:
    """Compact up to a sealed head. `check_abort` may raise to stop."""
    found = chain.unseal(sealed)
    if found is None:
        return CompactionReport(failed="the sealed head in the arguments is damaged")

    def progress(_step: str, done: int, _total: int) -> None:
        if done % ROWS_PER_CHECK == 0:
            check_abort()

    try:
        described = os.environ.get(DATABASE_VARIABLE)
        if described:
            term = msgspec.json.decode(described, type=DatabaseTerm)
            outcome = state_store.driver().compact(term, directory, found, progress)
            return CompactionReport(**asdict(outcome))
        with JournalReader(directory, *found) as reader:
            outcome = compaction.export(directory, reader, progress)
            check_abort()
            compaction.verify_covered(directory, reader, reader.head)
        return CompactionReport(**asdict(outcome))
    except TaskyardError as error:
        return CompactionReport(failed=str(error))


class AbortCheck:
    """Stops the compaction when the parent has ended or the disk reserve is reached."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parent = os.getppid()

    def __call__(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)
        free = free_bytes(self._directory)
        if free < DISK_RESERVE_BYTES:
            raise JournalFailed(
                f"{self._directory}: compaction stopped with {free} bytes free on the disk, "
                "which are reserved for completions (free some space)"
            )


def exit_on_stdin_close() -> None:
    """Have SIGIO kill this process when the other end of stdin closes, or exit if it has."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    looking = select.poll()
    looking.register(0, select.POLLIN)
    if looking.poll(0):
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Run the child process."""
    exit_on_stdin_close()
    os.nice(NICENESS)
    gc.set_threshold(GC_THRESHOLD)
    directory = Path(arguments[0])
    report = run(directory, bytes.fromhex(arguments[1]), AbortCheck(directory))
    os.write(1, msgspec.json.encode(report) + b"\n")
    # Freeing millions of objects one by one would take longer than some of the steps.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
