"""The `taskyard` command itself: the group of verbs, and how an error becomes an exit code.

The only place that ends the process. A verb raises an error of the tree, or returns an `ExitCode`,
or returns nothing when all is good.
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

#: What a shell sets that asks what could follow; click's name for it.
COMPLETION_VARIABLE: Final = "_TASKYARD_COMPLETE"


@click.group(
    cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@config_option
@verbose_option
def taskyard() -> None:
    """Run campaigns of tasks, durably, on however many workers there are."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process."""
    if COMPLETION_VARIABLE in os.environ:
        _complete()
    sys.exit(run(taskyard, sys.argv[1:] if arguments is None else arguments))


def _complete() -> NoReturn:
    """Tell a shell what could follow. Somebody waits at the keyboard: to tidy up the memory of a
    process that is about to end would take a third of the time."""
    gc.disable()
    status = 1
    try:
        status = run(taskyard, [])
    except SystemExit as ending:  # click ends by itself
        status = ending.code if isinstance(ending.code, int) else 1
    finally:
        _discard_stdout()
        os._exit(status)


def run(group: click.Command, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; what went wrong is on stderr by then."""
    with escaping_output():
        return _run(group, arguments)


def _run(group: click.Command, arguments: Sequence[str]) -> int:
    cli_context = CliContext()
    answer: object = None
    try:
        answer = group.main(arguments, prog_name="taskyard", standalone_mode=False, obj=cli_context)
        _flush_stdout()
    except BrokenPipeError:  # nobody reads on, as `head` does: no error
        _discard_stdout()
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.Abort:
        click.echo(f"taskyard: {cli_context.interrupt_message}", err=True)
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  # also a mistake of ours is told in a line
        return _report(_as_taskyard_error(error), cli_context)
    return answer if isinstance(answer, int) else ExitCode.OK


def _as_taskyard_error(error: Exception) -> TaskyardError:
    """Whatever went wrong, as an error of ours."""
    if isinstance(error, TaskyardError):
        return error
    if isinstance(error, OSError):
        _discard_stdout()
        return _os_error(error)
    if isinstance(error, UnicodeEncodeError):
        return UserError(f"{error.object!r} is no text in UTF-8; write it so")
    return _internal_error(error)


def _flush_stdout() -> None:
    if sys.stdout is not None:  # as it is for a process that was started with it closed
        sys.stdout.flush()


def _discard_stdout() -> None:
    """What stdout did not take would be tried again when Python ends, and spoil the exit code."""
    with suppress(OSError, ValueError):  # of a stdout that is none
        _flush_stdout()
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_error(error: OSError) -> UserError:
    """An error of the system that no verb knew better: a file that can't be used as it is, or,
    without a name, mostly a stdout that takes no more."""
    reason = error.strerror or str(error)
    if error.filename is None:
        told = UserError(f"can't read or write on: {reason}; see that stdout can be written")
    else:
        told = UserError(f"can't use {error.filename}: {reason}; see that it is there and yours")
    told.__cause__ = error
    return told


def _internal_error(error: Exception) -> TaskyardError:
    """What nobody foresaw, with the innermost place of ours on its way."""
    import traceback  # noqa: PLC0415  # as below

    ours = __file__.removesuffix("cli/entry.py")
    way = [step for step in traceback.extract_tb(error.__traceback__) if ours in step.filename]
    place = "".join(f" at {step.filename.removeprefix(ours)}:{step.lineno}" for step in way[-1:])
    told = TaskyardError(
        f"a mistake of Taskyard's own{place}: {error!r}; give -v, and tell its makers what it shows"
    )
    told.__cause__ = error
    return told


def _report(error: TaskyardError, cli_context: CliContext) -> int:
    """Say in one line what happened; where it came from only to those who ask, and to a log."""
    if cli_context.verbose or (cli_context.is_supervised and type(error) is TaskyardError):
        import traceback  # noqa: PLC0415  # it takes longer to import than `--help` has

        traceback.print_exception(error)
    text = " ".join(str(error).splitlines())
    if isinstance(error, JournalDamaged) and "`taskyard journal check" not in text:
        text += "; `taskyard journal check` tells all that is wrong"
    click.echo(f"taskyard: {escape_line(text)}", err=True)
    return error.exit_code
