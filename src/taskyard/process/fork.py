"""A child that is forked from this process, which has imported what the child needs.

Owns the state of the child before its program runs: its own standard files, no other descriptors,
and the signal handlers of a new interpreter. It costs a tenth of a new interpreter. To
`child.ChildProcess` it is a `subprocess.Popen` whose child never gets to the command.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NoReturn, TextIO, cast

from taskyard.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The threads of this process, on Linux.
_THREADS: Final = "/proc/self/task"

#: Handled by the process that forks.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)

#: Blocked while this process forks.
_INTERRUPTS: Final = (signal.SIGINT,)


def can_fork() -> bool:
    """Return whether this process has one thread. A child would wait for locks of others."""
    try:
        return len(os.listdir(_THREADS)) == 1  # noqa: PTH208 - the names are not used
    except OSError:  # not Linux
        return False


def start_forked(program: Callable[[], int], stdout: int) -> subprocess.Popen[str]:
    """Fork. The child waits for a byte on its stdin, then exits with the result of `program`.

    `stdout` is as for `subprocess.Popen`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()  # a collection in the child would copy all pages
    # Functions that are called after a fork would drop an interrupt, and print it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        return subprocess.Popen(
            [sys.executable],  # not executed
            stdin=subprocess.PIPE,
            stdout=stdout,
            encoding="utf-8",
            errors="backslashreplace",
            restore_signals=False,
            process_group=0,
            # It never returns.
            preexec_fn=lambda: run_forked(  # noqa: PLW1509  # this process has one thread
                lambda: program() if os.read(0, 1) else 0
            ),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.unfreeze()


def run_forked(
    program: Callable[[], int], standard: Sequence[int] = (0, 1, 2), others: Sequence[int] = ()
) -> NoReturn:
    """Run a program in a child that was just forked, and exit with its result.

    `standard` become its standard files. All descriptors but these and `others` are closed.
    """
    status = 1
    try:
        for own, given in enumerate(standard):
            os.dup2(given, own)
        for one, following in pairwise(sorted([2, *others, os.sysconf("SC_OPEN_MAX")])):
            os.closerange(one + 1, following)
        _reset_interpreter()
        status = program()
        sys.stdout.flush()
    except KeyboardInterrupt:  # before it had its own group
        status = ExitCode.INTERRUPTED
    except BaseException:  # noqa: BLE001 - nothing of the parent may run
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reset_interpreter() -> None:
    """Make signals, standard files and the module path those of a new interpreter."""
    gc.enable()  # `subprocess` disables it before a fork
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    sys.stdin, sys.stdout, sys.stderr = (
        _open_text(number, mode) for number, mode in enumerate("rww")
    )
    if not sys.flags.safe_path:
        del sys.path[:1]  # as with -P


def _open_text(descriptor: int, mode: str) -> TextIO:
    opened = os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
    return cast("TextIO", opened)
