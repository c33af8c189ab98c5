"""The `taskyard` command: the root group, and the exit code of an error.

The only module that ends the process. A command raises a `TaskyardError`, or returns an `ExitCode`,
or returns None for success.
"""

import atexit
import errno
import gc
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

import click

from taskyard import __version__, errors
from taskyard.cli.commands import COMMANDS, SUGGESTIONS, LazyGroup, usage_text
from taskyard.cli.format import escape_line, escaping_output
from taskyard.cli.options import CliContext

#: Set by a shell to ask for completions. The name is click's.
COMPLETION_VARIABLE: Final = "_TASKYARD_COMPLETE"

#: Imports create many objects, which all stay: collect rarely. The default is 700.
GC_THRESHOLD: Final = 50_000

#: Of a write without a file name: the output of a command. Files have names.
_WRITE_ERRORS: Final = (errno.ENOSPC, errno.EPIPE, errno.EDQUOT, errno.EFBIG)

#: May be caused by a working directory that was deleted.
_FILE_ERRORS: Final = (OSError, errors.UnusableFile, errors.StateError)


@click.group(
    cls=LazyGroup,
    lazy_commands=COMMANDS,
    suggestions=SUGGESTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def taskyard() -> None:
    """Run campaigns of tasks durably on any number of workers."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    _open_standard_streams()
    if COMPLETION_VARIABLE in os.environ:
        _complete()
    given = sys.argv[1:] if arguments is None else arguments
    gc.set_threshold(GC_THRESHOLD)
    _exit(run(taskyard, given, is_main_program=True))


def _exit(status: int) -> NoReturn:
    """Exit as the interpreter does, but leave all objects to the kernel.

    Freeing each takes as long as the start of an interpreter.
    """
    gc.freeze()  # the collection at exit would visit every object
    if any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
        sys.exit(status)  # waits for the threads
    atexit._run_exitfuncs()  # noqa: SLF001  # the only way to call them alone
    _discard_stdout()
    with suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or None
        sys.stderr.flush()
    os._exit(status)


def _open_standard_streams() -> None:
    """Open standard streams that are closed on /dev/null, as a daemon's may be.

    A socket or a file would get their descriptors otherwise, and their readers and writers with it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one
            os.set_inheritable(descriptor, True)  # noqa: FBT003  # positional only
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


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


def run(group: click.Command, arguments: Sequence[str], *, is_main_program: bool = False) -> int:
    """Run a command and return its exit code. Errors are printed to stderr.

    `is_main_program`: the process runs nothing else.
    """
    with escaping_output():
        return _run(group, arguments, CliContext(is_main_program=is_main_program))


def _run(group: click.Command, arguments: Sequence[str], cli_context: CliContext) -> int:
    answer: object = None
    try:
        answer = group.main(arguments, prog_name="taskyard", standalone_mode=False, obj=cli_context)
        _flush_stdout()
    except BrokenPipeError:  # the reader has stopped, as `head` does
        _discard_stdout()
    except click.ClickException as error:
        return _report_usage(error, cli_context, arguments)
    except click.Abort:
        return _print_error(errors.Interrupted(cli_context.interrupt_message), cli_context)
    except Exception as error:  # noqa: BLE001  # internal errors are printed in one line too
        return _report(_as_taskyard_error(error), cli_context)
    return answer if isinstance(answer, int) else errors.ExitCode.OK


def _as_taskyard_error(error: Exception) -> errors.TaskyardError:
    """Return any exception as a `TaskyardError`."""
    if isinstance(error, _FILE_ERRORS) and _is_directory_deleted():
        return errors.UnusableFile(
            "working directory: it was deleted (change to another directory)"
        )
    if isinstance(error, errors.TaskyardError):
        return error
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, UnicodeEncodeError):
        return errors.UserError(f"{error.object!r}: not valid UTF-8")
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


def _os_error(error: OSError) -> errors.UserError:
    """Return an `OSError` that no command has handled, with its file or its operation."""
    reason = error.strerror or str(error)
    subject = error.filename
    if subject is None:
        subject = "stdout" if error.errno in _WRITE_ERRORS else f"I/O error{_location(error)}"
    wrapped = errors.UnusableFile(f"{subject}: {reason}")
    wrapped.__cause__ = error
    return wrapped


def _is_directory_deleted() -> bool:
    try:
        os.getcwd()  # noqa: PTH109  # `Path.cwd` is the same
    except FileNotFoundError:
        return True
    return False


def _internal_error(error: Exception) -> errors.TaskyardError:
    """Return an unexpected exception with its location."""
    wrapped = errors.TaskyardError(
        f"internal error{_location(error)}: {error!r}. Please report it with the output of `-v`."
    )
    wrapped.__cause__ = error
    return wrapped


def _location(error: Exception) -> str:
    """Return the innermost line of Taskyard in a traceback: ` at FILE:LINE`."""
    import traceback  # noqa: PLC0415  # slow to import

    ours = __file__.removesuffix("cli/entry.py")
    way = [step for step in traceback.extract_tb(error.__traceback__) if ours in step.filename]
    return "".join(f" at {step.filename.removeprefix(ours)}:{step.lineno}" for step in way[-1:])


def _report_usage(
    error: click.ClickException, cli_context: CliContext, arguments: Sequence[str]
) -> int:
    """Print a usage error. It may precede the parsing of --json and -q."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return errors.ExitCode.USAGE
    cli_context.as_json = cli_context.as_json or "--json" in arguments
    return _print_error(errors.UserError(usage_text(error)), cli_context)


def _report(error: errors.TaskyardError, cli_context: CliContext) -> int:
    """Print an error, with the traceback if -v is given or a supervisor logs it."""
    _discard_stdout()
    if cli_context.verbose or (cli_context.is_supervised and type(error) is errors.TaskyardError):
        import traceback  # noqa: PLC0415  # slow to import

        traceback.print_exception(error)
    return _print_error(error, cli_context)


def _print_error(error: errors.TaskyardError, cli_context: CliContext) -> int:
    """Print an error in one line on stderr, as text or as a JSON document. Return its exit code."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, errors.JournalDamaged) and "`taskyard journal check" not in text:
        text += " (details: `taskyard journal check`)"
    with suppress(OSError):  # stderr may be the same pipe as stdout, or a closed terminal
        if cli_context.as_json:
            _print_error_document(error, text)
        else:
            code = f" [{error.code}]" if cli_context.verbose else ""
            click.echo(f"taskyard: {escape_line(text)}{code}", err=True)
    return error.exit_code


def _print_error_document(error: errors.TaskyardError, text: str) -> None:
    """Print an error as a JSON document on stderr: stdout may have a part of another document."""
    from taskyard.cli.documents import ErrorDetails, ErrorDocument  # noqa: PLC0415  # not needed by `--help`
    from taskyard.cli.output import encode_json  # noqa: PLC0415

    text, *names = (_as_utf8(one) for one in (text, *error.names))
    details = ErrorDetails(code=error.code, names=names, text=text, exit_code=error.exit_code)
    click.echo(encode_json(ErrorDocument(error=details)), err=True)


def _as_utf8(text: str) -> str:
    """Escape bytes of a file name or argument that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
