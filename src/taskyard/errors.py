"""The error tree, by cause. The lowest layer: it imports no other module of Taskyard.

A message reads `subject: problem`, with a hint where the remedy isn't obvious. The command line
prints it as one line and exits with the class's exit code. Scripts and programs branch on `code`,
never on the text. `docs/errors.md` lists all codes with cause and remedy.

    TaskyardError
    ├── PeerError              the peer sent a bad message, or does not answer
    │   ├── Malformed          bytes that are not a message of the dialect
    │   └── NoBroker           no broker answers
    ├── UserError              bad usage. Other subclasses are beside what they check:
    │   │                      InvalidTask, InvalidCampaign, InvalidValue, InvalidSettings
    │   ├── Refused            the broker refused the request
    │   │   └── NameLost       another process has the worker's name
    │   ├── UnknownName        no such task, campaign, service, lane, worker or key
    │   ├── UnusableFile       a file is missing, unreadable, unwritable or of another kind
    │   ├── UnusableEndpoint   an endpoint is invalid, in use or not allowed
    │   ├── UnusableKey        a key file is missing, invalid, unprotected or of another role
    │   ├── UnusableState      a directory is no state directory, or another user's
    │   ├── UnusableStore      a database can't be used as a store
    │   ├── UnknownFormat      the state was written by another version of Taskyard
    │   ├── StateLocked        the state directory is in use by another process
    │   │   └── StoreInUse     another broker or command uses the store in PostgreSQL
    │   ├── NotEncodable       a value can't be sent as JSON or pickled
    │   └── NotInstalled       an optional package or a program is missing
    ├── TaskFailed             the task ended without a result
    │   ├── TaskBlocked        it waits behind a task that failed
    │   ├── Final              raised by a function: another attempt would fail too
    │   └── CallLost           an executor's call has neither a value nor an exception. Defined in
    │                          `client.executor`, for the reason below
    ├── BytesTruncated         the task is done, but only a part of its output is kept
    ├── BytesMissing           long output, or a large argument or result, was removed
    ├── BytesDamaged           a large argument, result or output is damaged
    ├── BytesNotStored         there is no room for a large argument or result
    ├── TimedOut               a timeout passed
    ├── ClientClosed           the client was closed before the answer arrived
    ├── Interrupted            the command was interrupted
    ├── ProcessEnded           a process that the command started has ended
    ├── ExecutorBroken         an executor's own processes ended. Defined in `client.executor`,
    │                          because its other base takes 20 ms to import
    ├── StateError             the state directory can't be trusted or written
    │   ├── JournalDamaged     the journal differs from what was written
    │   ├── JournalFailed      a write or a sync failed, so nothing more may be acknowledged
    │   └── LeaderLost         another broker has taken over the journal
    └── IllegalTransition      a bug: a transition that the state table forbids
"""

from _pickle import PicklingError  # that of pickle, without its imports
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """Exit codes of the commands. Scripts rely on these numbers: they never change."""

    OK = 0
    TASK_FAILED = 1
    USAGE = 2
    NO_BROKER = 3
    TIMED_OUT = 4
    CANCELLED = 5
    STATE_DAMAGED = 6
    STORE_IN_USE = 7
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


class TaskyardError(Exception):
    """Base of all errors that Taskyard raises on purpose."""

    #: Names the cause, for programs. It never changes. Codes of refusals come from the broker.
    code: str = "internal"
    #: The default is the most cautious: stop as if the state were damaged.
    exit_code: ExitCode = ExitCode.STATE_DAMAGED
    #: The tasks, campaigns or other things at fault, as users write them.
    names: tuple[str, ...] = ()


class PeerError(TaskyardError):
    """A peer sent a malformed or forbidden message, or does not answer."""

    code = "bad-message"
    exit_code = ExitCode.NO_BROKER


class Malformed(PeerError):
    """Bytes that are not a message of the dialect. Decoders raise nothing else."""


class NoBroker(PeerError):
    """No broker answers at its endpoint."""

    code = "no-broker"


class UserError(TaskyardError):
    """An argument, a setting or a file is invalid."""

    code = "usage"
    exit_code = ExitCode.USAGE


class TaskProblem(NamedTuple):
    """A task that can't be submitted."""

    #: The full name. Empty: the problem is not of one task.
    name: str
    code: str
    text: str


class Refused(UserError):
    """The broker refused a request and changed nothing. The text is its reason."""

    def __init__(
        self,
        text: str = "",
        code: str = "",
        names: tuple[str, ...] = (),
        problems: tuple[TaskProblem, ...] = (),
    ) -> None:
        super().__init__(text)
        #: A stable code, such as "conflict" or "forbidden".
        self.code = code
        #: The full names of the tasks at fault. Empty: the whole request is refused.
        self.names = names
        #: The tasks at fault, each with its own code and text. A reply has at most 2,000.
        self.problems = problems


class NameLost(Refused):
    """The broker gave a worker's name to another process, because this one sent no heartbeats."""

    def __init__(
        self, text: str = "", code: str = "name-lost", names: tuple[str, ...] = ()
    ) -> None:
        super().__init__(text, code, names)


class SeveralBrokers(UserError):
    """A request needs one broker, and several are given."""

    code = "several-brokers"


class UnknownName(UserError):
    """A task, campaign, service, lane, worker or key of that name does not exist."""

    code = "unknown"

    def __init__(self, text: str, *names: str) -> None:
        super().__init__(text)
        self.names = names


class UnusableFile(UserError):
    """A file is missing, can't be read or written, or has another content than expected."""

    code = "unusable-file"


class UnusableEndpoint(UserError):
    """An endpoint is invalid, in use, or not allowed without keys."""

    code = "unusable-endpoint"


class UnusableKey(UserError):
    """A key file is missing, invalid, readable by others, or has another role."""

    code = "unusable-key"


class UnusableState(UserError):
    """A directory is no state directory, or belongs to another user."""

    code = "unusable-state"


class UnusableStore(UserError):
    """A database has no tables of a store, or those of another version, or can't be reached."""

    code = "unusable-store"


class UnknownFormat(UserError):
    """A state directory or store has a format of another version. Nothing in it was changed."""

    code = "state-format"


class StateLocked(UserError):
    """The state directory is in use by another process."""

    code = "state-locked"


class StoreInUse(StateLocked):
    """Another broker or command uses the store in PostgreSQL. It may be free later."""

    code = "store-in-use"
    exit_code = ExitCode.STORE_IN_USE


class NotEncodable(UserError, PicklingError):
    """A value can't be sent as JSON or pickled."""

    code = "not-encodable"


class NotInstalled(UserError):
    """An optional package or a program that the command needs is not installed."""

    code = "not-installed"


class TaskFailed(TaskyardError):
    """A task ended without a result. The text names it and the reason."""

    code = "task-failed"
    exit_code = ExitCode.TASK_FAILED

    def __init__(self, text: str = "", reason: str = "") -> None:
        super().__init__(text)
        #: The reason alone, as the worker reported it.
        self.reason = reason


class TaskBlocked(TaskFailed):
    """A task waits behind one that failed. It can only run if that one is retried."""

    code = "task-blocked"


class Final(TaskFailed):
    """Raised in a task's function: the task fails at once, whatever retries it has left."""

    code = "final"


#: Refusals that the same request may not meet later.
_PASSING: frozenset[str] = frozenset(
    {"busy", "full", "name-held", "no-standby", "overloaded", "retry-later", "shutting-down"}
)


def is_final(error: BaseException) -> bool:
    """Return whether a function that raised an error would raise it at every attempt."""
    if isinstance(error, UserError):
        return not isinstance(error, StateLocked) and error.code not in _PASSING
    return isinstance(error, Final)


class BytesTruncated(TaskyardError):
    """A task is done, but only a part of its output is kept."""

    code = "bytes-truncated"
    exit_code = ExitCode.TASK_FAILED

    def __init__(self, text: str, output: str | bytes = b"", bytes_total: int = 0) -> None:
        super().__init__(text)
        #: The end that is kept, of the type that `result()` returns for the task.
        self.output = output
        #: Length of the whole output.
        self.bytes_total = bytes_total


class BytesDamaged(TaskyardError):
    """A large argument, result or output differs from what was stored."""

    code = "bytes-damaged"
    exit_code = ExitCode.TASK_FAILED


class BytesMissing(TaskyardError):
    """Long output, or a large argument or result, is not at the broker any more."""

    code = "bytes-missing"
    exit_code = ExitCode.TASK_FAILED


class BytesNotStored(TaskyardError):
    """A large argument or result can't be stored: the disk or `blobs.quota` is full."""

    code = "bytes-not-stored"
    exit_code = ExitCode.TASK_FAILED


class TimedOut(TaskyardError, TimeoutError):
    """A timeout passed before the wait was over."""

    code = "timed-out"
    exit_code = ExitCode.TIMED_OUT


class ClientClosed(TaskyardError):
    """The client was closed before the answer arrived."""

    code = "client-closed"
    exit_code = ExitCode.CANCELLED


class Interrupted(TaskyardError):
    """The command was interrupted, by Ctrl-C or because its processes were stopped."""

    code = "interrupted"
    exit_code = ExitCode.INTERRUPTED


class OutputClosed(TaskyardError):
    """The reader of stdout has stopped before the end, as `head` does."""

    code = "output-closed"
    #: As of a process that SIGPIPE has ended.
    exit_code = ExitCode.OUTPUT_CLOSED


class ProcessEnded(TaskyardError):
    """A process that a command started has ended unexpectedly."""

    code = "process-ended"

    def __init__(self, text: str, status: int = ExitCode.STATE_DAMAGED) -> None:
        """`status` is the exit status of the process."""
        super().__init__(text)
        if status and status in list(ExitCode):
            self.exit_code = ExitCode(status)


class StateError(TaskyardError):
    """The state directory can't be trusted or written."""


class JournalDamaged(StateError):
    """The journal differs from what was written: a gap, a flipped byte, a missing end."""

    code = "journal-damaged"

    def __init__(self, wrong: str, lost: str = "") -> None:
        super().__init__(f"{wrong}: {lost}" if lost else wrong)
        self.wrong = wrong
        self.lost = lost


class JournalFailed(StateError):
    """A write or a sync of the journal failed, so its records may not be on disk."""

    code = "journal-failed"


class LeaderLost(StateError):
    """Another broker has taken over the journal, or may have. This one must not answer any more."""

    code = "leader-lost"


class IllegalTransition(TaskyardError):
    """A bug: a transition that the state table forbids, with its history."""
