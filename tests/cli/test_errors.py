"""Error codes: their table, and how errors are printed."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
import pytest

from docs import error_codes, schemas
from taskyard.cli.commands import Command
from taskyard.cli.entry import run, taskyard
from taskyard.client.internal import InternalClient
from taskyard.core.model import Refusal
from taskyard.errors import (
    ExitCode,
    JournalDamaged,
    NoBroker,
    ProcessEnded,
    TaskyardError,
    UnknownName,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.yard import Yard


# The table.


def test_table_has_every_code_of_the_source_and_no_other() -> None:
    rows = [code for group in error_codes.GROUPS.values() for code in group]
    assert sorted(rows) == sorted(error_codes.exit_codes())


def test_every_code_has_one_exit_code_cause_and_remedy() -> None:
    exits = error_codes.exit_codes()
    assert {code: found for code, found in exits.items() if len(found) != 1} == {}
    for row in error_codes.explanations().values():
        assert row.cause.endswith(".")
        assert row.remedy.endswith(".")


def test_codes_are_words_with_dashes() -> None:
    words = [word for code in error_codes.exit_codes() for word in code.split("-")]
    assert [word for word in words if not (word.isalpha() and word.islower())] == []


def test_only_bugs_and_bases_have_the_code_of_a_bug() -> None:
    internal = [one.__name__ for one in error_codes.error_classes() if one.code == "internal"]
    assert sorted(internal) == [
        "IllegalTransition",
        "StateError",
        "TaskyardError",
    ]


def test_refusals_of_the_broker_are_the_first_group() -> None:
    refusals, *_ = error_codes.GROUPS.values()
    assert sorted(refusals) == sorted(one.value for one in Refusal)


def test_example_on_the_page_follows_the_schema() -> None:
    schemas.check(msgspec.json.encode(error_codes.EXAMPLE))


@pytest.mark.parametrize(
    "error",
    [UnknownName("unknown worker 'w9'", "w9"), ProcessEnded("it ended", 3), NoBroker("no reply")],
)
def test_code_names_and_exit_code_survive_pickling(error: TaskyardError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # of our own
    kept = [(one.code, one.names, one.exit_code, str(one)) for one in (error, copy)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("status", "code"), [(0, 6), (3, 3), (-9, 6), (77, 6)])
def test_ended_process_passes_its_exit_code_on_if_it_is_one_of_ours(status: int, code: int) -> None:
    assert ProcessEnded("it ended", status).exit_code == code


# Errors provoked through the command line.


@pytest.fixture(scope="module", autouse=True)
def files(yard: Yard) -> None:
    """Create the tasks and files that the commands below name."""
    for name, words in {"bad": ["--", "false"], "late": ["--due", "1h", "--", "true"]}.items():
        assert run(taskyard, ["submit", "--state", str(yard.state), "--name", name, *words]) == 0
    assert run(taskyard, ["wait", "--state", str(yard.state), "bad"]) == 1
    (yard.directory / "empty").mkdir()
    (yard.directory / "bad.toml").write_text("[broker]\nstate = 7\n")
    (yard.directory / "bad.jsonl").write_text("[1, 2]\n")
    damaged = yard.directory / "damaged"
    with InternalClient(state=yard.state) as client:
        client.status()
    shutil.copytree(yard.state, damaged, ignore=shutil.ignore_patterns("*.lock", "*.sock"))
    (damaged / "journal.sqlite").write_bytes(b"no database" * 1000)


#: A code, its exit code and a command. STATE is the broker's, DIR the directory around it.
PROVOKED: Final = [
    ("unknown", 2, "drain --state STATE w9"),
    ("unknown", 2, "wait --state STATE --campaign none"),
    ("unknown", 2, "show --state STATE no-such-task"),
    ("unknown", 2, "keys revoke --state STATE nobody"),
    ("usage", 2, "wait --state STATE bad --campaign none"),
    ("usage", 2, "status --state STATE --no-such-option"),
    ("usage", 2, "no-such-command"),
    ("no-broker", 3, "cancel --state DIR/empty some"),
    ("timed-out", 4, "wait --state STATE late --timeout 0.01"),
    ("invalid-setting", 2, "status --config DIR/bad.toml"),
    ("invalid-task", 2, "submit --state STATE --due 2h --expiry 1h -- true"),
    ("invalid-campaign", 2, "load --state STATE DIR/missing.jsonl"),
    ("unusable-file", 2, "submit --state STATE --payload @DIR/missing"),
    ("unusable-key", 2, "status --broker tcp://192.0.2.1:9"),
    ("unusable-key", 2, "status --broker tcp://127.0.0.1:9 --key DIR/missing.key"),
    ("unusable-endpoint", 2, "status --broker nonsense"),
    ("unusable-state", 2, "journal check --state DIR/empty"),
    ("state-locked", 2, "journal compact --state STATE"),
    ("task-failed", 1, "result --state STATE bad"),
    ("journal-damaged", 6, "status --state DIR/damaged"),
]


def last_document(err: str) -> dict[str, Any]:
    line = err.splitlines()[-1]
    schemas.check(line)
    error: dict[str, Any] = msgspec.json.decode(line)["error"]
    return error


@pytest.mark.parametrize(
    ("code", "exit_code", "words"), PROVOKED, ids=[words for *_, words in PROVOKED]
)
def test_error_has_its_code_and_exit_code(
    yard: Yard, code: str, exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = (
        words.replace("STATE", str(yard.state)).replace("DIR", str(yard.directory)).split()
    )
    at = 1 if command in ("keys", "journal") else 0
    assert run(taskyard, [command, *rest[:at], "--json", *rest[at:]]) == exit_code
    out, err = capsys.readouterr()
    error = last_document(err)
    assert (error["code"], error["exit_code"]) == (code, exit_code)
    assert error_codes.exit_codes()[code] == [exit_code]
    assert f"taskyard: {error['text']}" not in err
    assert not out or msgspec.json.decode(out)["document"] == command


@pytest.mark.parametrize(("command", "names"), [("drain", ["w9"]), ("why", ["t1", "t2"])])
def test_error_names_the_things_at_fault(
    yard: Yard, command: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(taskyard, [command, "--state", str(yard.state), "--json", *names]) == 2
    assert last_document(capsys.readouterr().err)["names"] == names


def test_error_of_an_option_before_json_is_printed_as_json(
    yard: Yard, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(yard.directory / "bad.toml")
    words = ["journal", "check", "--config", config, "--state", str(yard.state), "--json"]
    assert run(taskyard, words) == 2
    assert last_document(capsys.readouterr().err)["code"] == "invalid-setting"


# How errors are printed.


def failing(error: BaseException) -> Callable[[str], int]:
    @click.group()
    @click.pass_obj
    def group(cli_context: object) -> None:
        del cli_context

    @group.command(cls=Command)
    def verb() -> None:
        raise error

    return lambda words: run(group, words.split())


@pytest.mark.parametrize(
    "error",
    [
        UserError("unknown x 'y'"),
        NoBroker("no reply (start one)"),
        TaskyardError("bad; see there"),
        OSError(28, "No space left on device", "there"),
        OSError("no file at all"),
        RuntimeError("a mistake of ours"),
        RecursionError("too deep"),
    ],
)
def test_traceback_is_printed_with_verbose_only(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error)("verb") > 0
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("taskyard: ")
    assert failing(error)("verb -v") > 0
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["", "rows 1..2 are lost"])
def test_damage_is_reported_with_a_hint(lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(JournalDamaged("row 3 is missing", lost))("verb") == ExitCode.STATE_DAMAGED
    assert "(details: `taskyard journal check`)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (UserError("unknown x 'y'"), "usage", 2),
        (NoBroker("no reply"), "no-broker", 3),
        (OSError(28, "No space left on device", "there"), "unusable-file", 2),
        (RuntimeError("a mistake of ours"), "internal", 6),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_code_is_printed_with_verbose_and_in_json(
    error: BaseException, code: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error)("verb") == exit_code
    assert f"[{code}]" not in capsys.readouterr().err
    assert failing(error)("verb -v") == exit_code
    assert capsys.readouterr().err.endswith(f" [{code}]\n")
    assert failing(error)("verb --json") == exit_code
    assert last_document(capsys.readouterr().err)["code"] == code


def test_text_that_is_not_utf8_is_escaped_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(UnknownName("unknown task '\udcff'", "\udcff"))("verb --json") == 2
    error = last_document(capsys.readouterr().err)
    assert (error["text"], error["names"]) == ("unknown task '\\udcff'", ["\\udcff"])
