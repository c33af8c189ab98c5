"""The one error tree, split by whose fault it is. The lowest layer: it imports nothing of ours.

A message says what happened, to what, and what to do about it. The command line prints it as one
line and leaves with the class's exit code; nobody else turns an error into a number.

    TaskyardError
    ├── PeerError              the peer's: it sent what it must not, or is not there
    ├── UserError              the user's: usage and settings
    │   └── StateLocked        the state directory is in use by another process
    ├── StateError             the disk's, or ours: what is kept can't be trusted or kept on
    │   ├── FormatUnknown      written by another version of Taskyard
    │   ├── JournalDamaged     what is on disk is not what was written
    │   └── JournalFailed      a write or a sync failed; nothing more may be acknowledged
    └── IllegalTransition      ours: a bug; a machine was told to do what its table forbids
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What a process leaves with. Scripts rely on these numbers: they never change."""

    GOOD = 0
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


class UserError(TaskyardError):
    """The user's fault: an argument, a setting or a file that can't be used as it is."""

    exit_code = ExitCode.USAGE


class StateLocked(UserError):
    """The state directory is in use by another process."""


class StateError(TaskyardError):
    """The state directory can't be trusted, or can't be written on."""

    exit_code = ExitCode.STATE_DAMAGED


class FormatUnknown(StateError):
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
