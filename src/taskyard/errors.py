"""The error tree, by cause. The lowest layer: it imports no other module of Taskyard.

A message reads `subject: problem`, with a hint where the remedy isn't obvious. The command line
prints it as one line and exits with the class's code. Nothing else maps errors to numbers.

    TaskyardError
    ├── PeerError              the peer sent a bad message, or does not answer
    │   ├── Malformed          bytes that are not a message of the dialect
    │   └── NoBroker           no broker answers
    ├── UserError              bad usage or settings
    │   ├── Refused            the broker refused the request
    │   │   └── NameLost       another process has the worker's name
    │   └── StateLocked        the state directory is in use by another process
    ├── TaskFailed             the task ended without a result
    │   └── TaskBlocked        it waits behind a task that failed
    ├── OutputTruncated        the task is done, but only the end of its output is kept
    ├── TimedOut               a timeout passed
    ├── ClientClosed           the client was closed before the answer arrived
    ├── ExecutorBroken         an executor's own processes ended. Defined in `client.calls`,
    │                          because its other base takes 20 ms to import
    ├── StateError             the state directory can't be trusted or written
    │   ├── UnknownFormat      written by another version of Taskyard
    │   ├── JournalDamaged     the journal differs from what was written
    │   └── JournalFailed      a write or a sync failed, so nothing more may be acknowledged
    └── IllegalTransition      a bug: a transition that the state table forbids
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of the commands. Scripts rely on these numbers: they never change."""

    OK = 0
    TASK_FAILED = 1
    USAGE = 2
    NO_BROKER = 3
    TIMED_OUT = 4
    CANCELLED = 5
    STATE_DAMAGED = 6
    INTERRUPTED = 130


class TaskyardError(Exception):
    """Base of all errors that Taskyard raises on purpose."""

    #: The default is the most cautious: stop as if the state were damaged.
    exit_code: ClassVar[ExitCode] = ExitCode.STATE_DAMAGED


class PeerError(TaskyardError):
    """A peer sent a malformed or forbidden message, or does not answer."""

    exit_code = ExitCode.NO_BROKER


class Malformed(PeerError):
    """Bytes that are not a message of the dialect. Decoders raise nothing else."""


class NoBroker(PeerError):
    """No broker answers at its endpoint."""


class UserError(TaskyardError):
    """An argument, a setting or a file is invalid."""

    exit_code = ExitCode.USAGE


class Refused(UserError):
    """The broker refused a request and changed nothing. The text is its reason."""

    def __init__(self, text: str = "", code: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        #: A stable code, such as "conflict" or "forbidden".
        self.code = code
        #: The full names of the tasks at fault. Empty: the whole request is refused.
        self.names = names


class NameLost(Refused):
    """The broker gave a worker's name to another process, because this one sent no heartbeats."""

    def __init__(
        self, text: str = "", code: str = "name-lost", names: tuple[str, ...] = ()
    ) -> None:
        super().__init__(text, code, names)


class StateLocked(UserError):
    """The state directory is in use by another process."""


class TaskFailed(TaskyardError):
    """A task ended without a result. The text is its reason."""

    exit_code = ExitCode.TASK_FAILED


class TaskBlocked(TaskFailed):
    """A task waits behind one that failed. It can only run if that one is retried."""


class OutputTruncated(TaskyardError):
    """A task is done, but only the end of its output is kept."""

    exit_code = ExitCode.TASK_FAILED

    def __init__(self, text: str, output: str | bytes = b"", bytes_total: int = 0) -> None:
        super().__init__(text)
        #: The end that is kept, of the type that `result()` returns for the task.
        self.output = output
        #: Length of the whole output.
        self.bytes_total = bytes_total


class TimedOut(TaskyardError, TimeoutError):
    """A timeout passed before the wait was over."""

    exit_code = ExitCode.TIMED_OUT


class ClientClosed(TaskyardError):
    """The client was closed before the answer arrived."""

    exit_code = ExitCode.CANCELLED


class StateError(TaskyardError):
    """The state directory can't be trusted or written."""

    exit_code = ExitCode.STATE_DAMAGED


class UnknownFormat(StateError):
    """A file of the state directory has a format that this version can't read."""


class JournalDamaged(StateError):
    """The journal differs from what was written: a gap, a flipped byte, a missing end."""

    def __init__(self, wrong: str, lost: str = "") -> None:
        super().__init__(f"{wrong}: {lost}" if lost else wrong)
        self.wrong = wrong
        self.lost = lost


class JournalFailed(StateError):
    """A write or a sync of the journal failed, so its records may not be on disk."""


class IllegalTransition(TaskyardError):
    """A bug: a transition that the state table forbids, with its history."""
