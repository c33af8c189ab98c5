"""The `taskyard` command itself: the group of verbs, and how an error becomes an exit code.

The only place that ends the process. A verb raises an error of the tree, or returns an `ExitCode`,
or returns nothing when all is good.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from taskyard import __version__
from taskyard.cli.lazy import LazyGroup
from taskyard.cli.options import Talk, config_option, verbose_option
from taskyard.cli.verbs import VERBS
from taskyard.cli.words import plain
from taskyard.errors import ExitCode, TaskyardError, UserError


@click.group(cls=LazyGroup, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@config_option
@verbose_option
def taskyard() -> None:
    """Run campaigns of tasks, durably, on however many workers there are."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process."""
    sys.exit(run(taskyard, sys.argv[1:] if arguments is None else arguments))


def run(group: click.Command, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; what went wrong is on stderr by then."""
    talk = Talk()
    answer: object = None
    try:
        answer = group.main(arguments, prog_name="taskyard", standalone_mode=False, obj=talk)
        _flush_answer()
    except TaskyardError as error:
        return _report(error, talk)
    except BrokenPipeError:  # nobody reads on, as `head` does: no error
        _drop_answer()
    except OSError as error:
        _drop_answer()
        return _report(_in_words(error), talk)
    except UnicodeEncodeError as error:
        return _report(UserError(f"{error.object!r} is no text in UTF-8; write it so"), talk)
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except click.Abort:
        click.echo(f"taskyard: {talk.interrupted}", err=True)
        return ExitCode.INTERRUPTED
    return answer if isinstance(answer, int) else ExitCode.GOOD


def _flush_answer() -> None:
    if sys.stdout is not None:  # as it is for a process that was started with it closed
        sys.stdout.flush()


def _drop_answer() -> None:
    """What stdout did not take would be tried again when Python ends, and spoil the exit code."""
    with suppress(OSError, ValueError):  # of a stdout that is none
        _flush_answer()
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_words(error: OSError) -> UserError:
    """An error of the system that no verb knew better: a file that can't be used as it is, or,
    without a name, mostly a stdout that takes no more."""
    reason = error.strerror or str(error)
    if error.filename is None:
        told = UserError(f"can't read or write on: {reason}; see that stdout can be written")
    else:
        told = UserError(f"can't use {error.filename}: {reason}; see that it is there and yours")
    told.__cause__ = error
    return told


def _report(error: TaskyardError, talk: Talk) -> int:
    """Say in one line what happened; where it came from only to those who ask."""
    if talk.verbose:
        traceback.print_exception(error)
    click.echo(f"taskyard: {plain(' '.join(str(error).splitlines()))}", err=True)
    return error.exit_code
