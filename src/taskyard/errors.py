"""The one error tree, split by whose fault it is. The lowest layer: it imports nothing of ours.

A message says what happened, to what, and what to do about it. The command line prints it as one
line and leaves with the class's exit code; nobody else turns an error into a number.

    TaskyardError
    ├── PeerError              the peer's: it sent what it must not, or is not there
    │   ├── Malformed          bytes that are no message; what a decoder raises, and nothing else
    │   └── NoBroker           nobody answers there
    ├── UserError              the user's: usage and settings
    │   ├── Refused            the broker understood, and said no
    │   │   └── NameLost       another process has the worker's name
    │   └── StateLocked        the state directory is in use by another process
    ├── TaskFailed             the task's own: it was tried, and there is no result
    │   └── TaskBlocked        it waits behind a task that failed
    ├── OutputTruncated        the task is done, but only the end of its output is kept
    ├── TimedOut               what was waited for did not come in time
    ├── ClientClosed           nobody listens for an answer any more
    ├── ExecutorBroken         an executor's own processes are gone, and what they held; it is in
    │                          `client.executor`: its other base takes 20 ms to import
    ├── StateError             the disk's, or ours: what is kept can't be trusted or kept on
    │   ├── UnknownFormat      written by another version of Taskyard
    │   ├── JournalDamaged     what is on disk is not what was written
    │   └── JournalFailed      a write or a sync failed; nothing more may be acknowledged
    └── IllegalTransition      ours: a bug; a machine was told to do what its table forbids
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What a process leaves with. Scripts rely on these numbers: they never change."""

    OK = 0
    TASK_FAILED = 1
    USAGE = 2
    NO_BROKER = 3
    TIMED_OUT = 4
    CANCELLED = 5
    STATE_DAMAGED = 6
    INTERRUPTED = 130


class TaskyardError(Exception):
    """Everything that Taskyard raises on purpose."""

    #: Unless a class knows better, going on would risk the state: leave as if it were damaged.
    exit_code: ClassVar[ExitCode] = ExitCode.STATE_DAMAGED


class PeerError(TaskyardError):
    """The peer's fault: a malformed or forbidden message, or no answer at all."""

    exit_code = ExitCode.NO_BROKER


class Malformed(PeerError):
    """Bytes that are no message of the dialect. Decoders raise this or return a value."""


class NoBroker(PeerError):
    """Nobody answers where a broker should be."""


class UserError(TaskyardError):
    """The user's fault: an argument, a setting or a file that can't be used as it is."""

    exit_code = ExitCode.USAGE


class Refused(UserError):
    """The broker understood what it was asked, did nothing, and said why."""


class NameLost(Refused):
    """The broker gave a worker's name to another process, because this one was silent."""


class StateLocked(UserError):
    """The state directory is in use by another process."""


class TaskFailed(TaskyardError):
    """A task ended without a result. The text is its reason."""

    exit_code = ExitCode.TASK_FAILED


class TaskBlocked(TaskFailed):
    """A task waits behind one that failed, and will go on only if that is tried again."""


class OutputTruncated(TaskyardError):
    """A task is done, but only the end of its output is kept."""

    exit_code = ExitCode.TASK_FAILED

    def __init__(self, text: str, output: str | bytes = b"", bytes_total: int = 0) -> None:
        super().__init__(text)
        #: The part that is kept, of the type that `result()` returns for that task.
        self.output = output
        #: Length of the whole output.
        self.bytes_total = bytes_total


class TimedOut(TaskyardError, TimeoutError):
    """What was waited for did not come in the time that was given."""

    exit_code = ExitCode.TIMED_OUT


class ClientClosed(TaskyardError):
    """The client was closed while something of it was not answered yet."""

    exit_code = ExitCode.CANCELLED


class StateError(TaskyardError):
    """The state directory can't be trusted, or can't be written on."""

    exit_code = ExitCode.STATE_DAMAGED


class UnknownFormat(StateError):
    """A file of the state directory has a format that this version can't read."""


class JournalDamaged(StateError):
    """The journal is not what was written: a hole, a flipped byte, a lost end."""

    def __init__(self, wrong: str, lost: str = "") -> None:
        super().__init__(f"{wrong}: {lost}" if lost else wrong)
        self.wrong = wrong
        self.lost = lost


class JournalFailed(StateError):
    """A write or a sync of the journal failed, so what it held may not be on disk."""


class IllegalTransition(TaskyardError):
    """A machine was told to do what its table forbids: a bug of ours, told with its story."""
