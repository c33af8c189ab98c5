"""The `taskyard` command: the root group, and the exit code of an error.

The only module that ends the process. A command raises a `TaskyardError`, or returns an `ExitCode`,
or returns None for success.
"""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

import click

from taskyard import __version__
from taskyard.cli.commands import COMMANDS, LazyGroup
from taskyard.cli.format import escape_line
from taskyard.cli.options import CliContext, config_option, verbose_option
from taskyard.cli.terminal import escaping_output
from taskyard.errors import ExitCode, JournalDamaged, TaskyardError, UserError

#: Set by a shell to ask for completions. The name is click's.
COMPLETION_VARIABLE: Final = "_TASKYARD_COMPLETE"


@click.group(
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@config_option
@verbose_option
def taskyard() -> None:
    """Run campaigns of tasks durably on any number of workers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    if COMPLETION_VARIABLE in os.environ:
        _complete()
    sys.exit(run(taskyard, sys.argv[1:] if arguments is None else arguments))


def _complete() -> NoReturn:
    """Print completions and exit.

    Skips the garbage collection at exit, which takes a third of the time.
    """
    gc.disable()
    status = 1
    try:
        status = run(taskyard, [])
    except SystemExit as ending:  # raised by click
        status = ending.code if isinstance(ending.code, int) else 1
    finally:
        _discard_stdout()
        os._exit(status)


def run(group: click.Command, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Errors are printed to stderr."""
    with escaping_output():
        return _run(group, arguments)


def _run(group: click.Command, arguments: Sequence[str]) -> int:
    cli_context = CliContext()
    answer: object = None
    try:
        answer = group.main(arguments, prog_name="taskyard", standalone_mode=False, obj=cli_context)
        _flush_stdout()
    except BrokenPipeError:  # the reader has stopped, as `head` does
        _discard_stdout()
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.Abort:
        click.echo(f"taskyard: {cli_context.interrupt_message}", err=True)
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  # internal errors are printed in one line too
        return _report(_as_taskyard_error(error), cli_context)
    return answer if isinstance(answer, int) else ExitCode.OK


def _as_taskyard_error(error: Exception) -> TaskyardError:
    """Return any exception as a `TaskyardError`."""
    if isinstance(error, TaskyardError):
        return error
    if isinstance(error, OSError):
        _discard_stdout()
        return _os_error(error)
    if isinstance(error, UnicodeEncodeError):
        return UserError(f"{error.object!r}: not valid UTF-8")
    return _internal_error(error)


def _flush_stdout() -> None:
    if sys.stdout is not None:  # None in a process that was started with stdout closed
        sys.stdout.flush()


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null if it can't be flushed.

    Python would flush it again at exit, and fail with another exit code.
    """
    with suppress(OSError, ValueError):  # stdout may be closed or have no descriptor
        _flush_stdout()
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_error(error: OSError) -> UserError:
    """Return an `OSError` that no command has handled. Without a file name it is mostly stdout."""
    reason = error.strerror or str(error)
    if error.filename is None:
        wrapped = UserError(f"I/O error: {reason} (is stdout writable?)")
    else:
        wrapped = UserError(f"{error.filename}: {reason}")
    wrapped.__cause__ = error
    return wrapped


def _internal_error(error: Exception) -> TaskyardError:
    """Return an unexpected exception with the innermost line of Taskyard in its traceback."""
    import traceback  # noqa: PLC0415  # slow to import

    ours = __file__.removesuffix("cli/entry.py")
    way = [step for step in traceback.extract_tb(error.__traceback__) if ours in step.filename]
    location = "".join(f" at {step.filename.removeprefix(ours)}:{step.lineno}" for step in way[-1:])
    wrapped = TaskyardError(
        f"internal error{location}: {error!r}. Please report it with the output of `-v`."
    )
    wrapped.__cause__ = error
    return wrapped


def _report(error: TaskyardError, cli_context: CliContext) -> int:
    """Print an error in one line, with the traceback if -v is given or a supervisor logs it."""
    if cli_context.verbose or (cli_context.is_supervised and type(error) is TaskyardError):
        import traceback  # noqa: PLC0415  # slow to import

        traceback.print_exception(error)
    text = " ".join(str(error).splitlines())
    if isinstance(error, JournalDamaged) and "`taskyard journal check" not in text:
        text += " (details: `taskyard journal check`)"
    click.echo(f"taskyard: {escape_line(text)}", err=True)
    return error.exit_code
