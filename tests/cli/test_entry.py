"""The root command: lazy imports, errors in one line, exit codes."""

import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import click
import pytest

from taskyard import __version__
from taskyard.cli.commands import COMMANDS, SUGGESTIONS, Command, Group, LazyCommand, LazyGroup
from taskyard.cli.entry import run, taskyard
from taskyard.cli.work import load, map_rows, submit
from taskyard.cli.work import run as run_file
from taskyard.errors import (
    ExitCode,
    IllegalTransition,
    JournalDamaged,
    JournalFailed,
    PeerError,
    StateError,
    StateLocked,
    StoreInUse,
    TaskyardError,
    UserError,
)
from tests.kit.processes import environment


def group_of(command: click.Command) -> click.Group:
    """Return a group with the command `act` and the options of the real group."""
    group = Group("taskyard", callback=lambda: None)
    group.add_command(command, "act")
    return group


def failing_verb(error: BaseException) -> click.Group:
    @click.command(cls=Command)
    def act() -> None:
        raise error

    return group_of(act)


def answering_verb(answer: ExitCode | None) -> click.Group:
    return group_of(click.Command("act", callback=lambda: answer))


def test_exit_codes_never_change() -> None:
    assert [(code.name, code.value) for code in ExitCode] == [
        ("OK", 0),
        ("TASK_FAILED", 1),
        ("USAGE", 2),
        ("NO_BROKER", 3),
        ("TIMED_OUT", 4),
        ("CANCELLED", 5),
        ("STATE_DAMAGED", 6),
        ("STORE_IN_USE", 7),
        ("INTERRUPTED", 130),
        ("OUTPUT_CLOSED", 141),
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TaskyardError, 6),
        (PeerError, 3),
        (UserError, 2),
        (StateLocked, 2),
        (StoreInUse, 7),
        (StateError, 6),
        (JournalFailed, 6),
        (IllegalTransition, 6),
    ],
)
def test_error_is_one_line_and_its_exit_code(
    error: type[TaskyardError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(failing_verb(error("it broke:\nmend it")), ["act"]) == code
    assert capsys.readouterr() == ("", "taskyard: it broke: mend it\n")


@pytest.mark.parametrize("arguments", [["-v", "act"], ["act", "-v"], ["act", "--verbose"]])
def test_verbose_shows_where_an_error_came_from(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(failing_verb(UserError("it broke")), arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback")
    assert errors.endswith("\ntaskyard: it broke [usage]\n")


def test_damage_is_one_line_that_names_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(failing_verb(JournalDamaged("row 3 is missing", "it is lost")), ["act"]) == 6
    message = "taskyard: row 3 is missing: it is lost (details: `taskyard journal check`)\n"
    assert capsys.readouterr() == ("", message)


def test_unexpected_exception_is_an_internal_error_with_its_location(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(failing_verb(ZeroDivisionError()), ["act"]) == 6
    errors = capsys.readouterr().err
    assert re.fullmatch(
        r"taskyard: internal error at cli/entry.py:\d+: ZeroDivisionError\(\)\. .*\n",
        errors,
    )


def test_file_that_the_system_refuses_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = PermissionError(13, "Permission denied", "campaign.jsonl")
    assert run(failing_verb(error), ["act"]) == 2
    assert capsys.readouterr() == (
        "",
        "taskyard: campaign.jsonl: Permission denied\n",
    )


def test_os_error_has_a_traceback_with_verbose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(failing_verb(OSError(5, "Input/output error")), ["act", "-v"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback")
    assert errors.endswith(": Input/output error [unusable-file]\n")
    assert "\ntaskyard: I/O error at cli/entry.py:" in errors


def test_deleted_working_directory_is_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    with chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        codes = [run(taskyard, words) for words in (["list"], ["map", "echo", ":::", "a"])]
        os.chdir(tmp_path)
    line = "taskyard: working directory: it was deleted (change to another directory)\n"
    assert (codes, capsys.readouterr().err) == ([2, 2], 2 * line)


def test_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run(answering_verb(None), ["act"]) == 0


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), click.Abort()])
def test_interruption_exits_130_with_one_line(
    interruption: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(failing_verb(interruption), ["act"]) == 130
    out, errors = capsys.readouterr()
    assert (out, errors.strip()) == ("", "taskyard: interrupted")


def test_command_without_standard_streams_runs(tmp_path: Path) -> None:
    shell = '"$0" -m taskyard.cli map touch {} ::: made <&- >&- 2>&-'
    words = ["/bin/sh", "-c", shell, sys.executable]
    subprocess.run(words, cwd=tmp_path, env=environment(), check=True)
    assert (tmp_path / "made").exists()


#: Exits while a thread runs. A daemon would run for ever.
PROGRAM = """
import atexit, sys, threading, time
from taskyard.cli.entry import main
def run():
    while is_daemon:
        time.sleep(1)
    time.sleep(0.1)
    print("thread")
is_daemon = sys.argv[1] == "daemon"
atexit.register(print, "at exit")
threading.Thread(target=run, daemon=is_daemon).start()
main(["--no-such"])
"""


@pytest.mark.parametrize(
    ("kind", "lines"), [("thread", ["thread", "at exit"]), ("daemon", ["at exit"])]
)
def test_exit_runs_exit_functions_and_waits_for_threads(kind: str, lines: list[str]) -> None:
    words = [sys.executable, "-c", PROGRAM, kind]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (2, lines)
    assert "unknown option --no-such" in done.stderr


#: Interrupts itself when it begins to import a module.
INTERRUPTED_PROGRAM = """
import os, signal, sys
from taskyard.cli import main
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
main(["status"])
"""


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("taskyard.cli.entry", ""),
        ("click", ""),
        ("taskyard.cli.inspect", ""),
        ("taskyard.client.discovery", "\ntaskyard: interrupted\n"),
    ],
)
def test_interrupted_import_prints_no_traceback(module: str, line: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", INTERRUPTED_PROGRAM, module]
    more: Any = {"env": environment(), "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(words, check=False, **more)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", line)


def test_broken_pipe_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    group = LazyGroup("taskyard", lazy_commands={"act": LazyCommand(f"{__name__}:closed_pipe", "")})
    assert run(group, ["act"]) == 0
    assert capsys.readouterr() == ("", "")


@click.command
def closed_pipe() -> None:
    raise BrokenPipeError(32, "Broken pipe")


def test_control_characters_of_an_error_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(failing_verb(UserError("task \x1b[2J is not there")), ["act"]) == 2
    assert capsys.readouterr().err == "taskyard: task \\x1b[2J is not there\n"


def test_argument_that_is_not_utf8_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command
    @click.argument("name")
    def act(name: str) -> None:
        name.encode()

    assert run(group_of(act), ["act", "\udcff"]) == 2
    assert capsys.readouterr().err == "taskyard: '\\udcff': not valid UTF-8\n"


def test_verb_that_returns_nothing_is_good() -> None:
    assert run(answering_verb(None), ["act"]) == 0


def test_verb_may_return_its_exit_code() -> None:
    assert run(answering_verb(ExitCode.TIMED_OUT), ["act"]) == 4


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["--no-such-option"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(taskyard, arguments) == 2
    assert "(see `taskyard --help`)" in capsys.readouterr().err


def test_suggestions_name_commands_for_words_that_are_none() -> None:
    assert not SUGGESTIONS.keys() & COMMANDS.keys()
    named = {name for names in SUGGESTIONS.values() for name in names if name[0] != "-"}
    assert named <= COMMANDS.keys()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("sumbit", "unknown command sumbit (did you mean submit?)"),
        ("work", "unknown command work (did you mean worker or workers?)"),
        ("frobnicate", "unknown command frobnicate (see `taskyard --help`)"),
        ("ps", "unknown command ps (did you mean list or workers?)"),
        ("stop", "unknown command stop (did you mean down or cancel?)"),
    ],
)
def test_misspelt_command_gets_suggestions(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(taskyard, [typed]) == 2
    assert capsys.readouterr().err == f"taskyard: {message}\n"


def test_file_that_click_cannot_open_is_a_usage_error_not_a_failed_task() -> None:
    assert run(failing_verb(click.FileError("campaign.jsonl", "no such file")), ["act"]) == 2


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_on_stdout_and_good(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(taskyard, [option]) == 0
    assert capsys.readouterr().out.startswith("Usage: taskyard")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(taskyard, ["--version"]) == 0
    assert capsys.readouterr().out == f"taskyard {__version__}\n"


@click.command
def greet() -> None:
    """Say hello."""
    click.echo("hello")


def lazy_group(target: str) -> LazyGroup:
    return LazyGroup(
        "taskyard", lazy_commands={"greet": LazyCommand(target, "Say hello, from the table.")}
    )


def test_listing_verbs_imports_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lazy_group("no_such_module:greet"), ["--help"]) == 0
    assert "greet  Say hello, from the table." in capsys.readouterr().out


def test_command_is_imported_when_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lazy_group(f"{__name__}:greet"), ["greet"]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_table_entry_that_is_no_command_is_an_internal_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(lazy_group("taskyard:__version__"), ["greet"]) == 6
    assert "taskyard:__version__ is a str, not a click command" in capsys.readouterr().err


def test_commands_exist_and_their_help_matches_the_table() -> None:
    context = click.Context(taskyard)
    commands = {name: taskyard.get_command(context, name) for name in COMMANDS}
    summaries = {
        name: command.get_short_help_str(limit=200) if command else None
        for name, command in commands.items()
    }
    assert summaries == {name: verb.summary for name, verb in COMMANDS.items()}


def test_package_runs_as_the_command() -> None:
    """It needs its own process: `__main__` runs when it is imported."""
    words = [sys.executable, "-m", "taskyard", "run"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "taskyard: run: missing FILE (or give -- COMMAND, or ::: VALUES) "
        "(see `taskyard run --help`)\n"
    )


@pytest.mark.parametrize("command", [run_file, map_rows, load, submit])
def test_every_option_is_explained_once_under_its_subject(command: click.Command) -> None:
    assert isinstance(command, Command)
    grouped = [name for names in command.groups.values() for name in names]
    options = [one.name for one in command.params if isinstance(one, click.Option)]
    assert len(grouped) == len(set(grouped))
    assert sorted(set(options) - set(grouped)) == []
    assert {*command.most} <= {*options}
    context = click.Context(command, info_name=command.name)
    short = command.get_help(context)
    assert len(re.findall(r"^  -", short, re.MULTILINE)) <= len(command.most) + 3
    context.meta["taskyard.help.all"] = True
    whole = command.get_help(context)
    for one in command.params:
        if isinstance(one, click.Option):
            assert one.opts[-1] in whole
    assert "Connection and output: taskyard help connection" in short


def test_help_of_map_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(taskyard, ["map", "--help"]) == 0
    assert len(capsys.readouterr().out.split()) <= 500
