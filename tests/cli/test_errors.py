"""Every error that reaches a user says what to do, and is on the page of errors."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import pytest

from taskyard.cli import error_texts
from taskyard.cli.entry import run
from taskyard.cli.error_texts import exit_codes, page, template
from taskyard.errors import ExitCode, JournalDamaged, NoBroker, TaskyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("collected_once")

#: What advice looks like: an order, or a command that tells more.
ADVICE: Final = re.compile(
    r"`taskyard |\b(must|goes? with|give|say|use|start|see|write|save|leave|mend|ask|submit|open"
    r"|put|set|make|run it|send|free|remove|retry|wait|install|convert|choose|end|did you mean)\b"
)

#: Texts whose advice stands in one of their values, or that need none; and why.
WITHOUT: Final = {
    "{}: {}": "a place and what is wrong there, from a table of reasons",
    "{}:{}: {}": "the same with a line",
    "{}:1: {}": "the same in the first line",
    '"{}" {}': "the same with a key of a task",
    "has a name that {}": "the same with one of several names",
    "task {}: {}": "the same with a task",
    '"lane" of recipient {} {}': "the same with a recipient",
    "{}: the lane {}": "the same with the line of a mapped task",
    "is {}, which {}": "the same with a template, and what comes of it",
    "the lane of service {} {}": "the same with a service",
    "{}: listen.{}: {}": "the same with a setting",
    "{}: broker.url: {}": "the same with a setting",
    "{}{}": "the first of what is wrong with the settings, and how to see the others",
    "{} is defined in {}: {}": "where a function is defined, and how to allow that",
    "task {} was refused: {}": "what the broker says",
    "{}: {} ({})": "what the broker says, and what was submitted before it",
    "{}:{}: more than {} lines are bad; is this the right format? The first: {}": "one of many",
    "{}: the table {}": "what is wrong with the table, from a list",
    "task {} failed: no reason given": "the task's own words",
    "can't read the journal, {} ({}); {}": "what to do depends on how it failed",
    "{} failed in {}: {}; nothing more is acknowledged: {}": "likewise",
    "the key {} was revoked before; nothing is left to do": "nothing is",
    "task {} waits for {}, which was refused": "the refusal of that task says what to do",
    "a name stands twice in one message": "a mistake of a program that speaks the dialect itself",
    "the message's columns differ in length": "likewise",
    "the submission's columns differ in length": "likewise",
    "a payload for each task is needed, or one for all": "likewise",
    "a task points to terms that are not there": "likewise",
    "there are more terms than tasks": "likewise",
}


def test_page_of_errors_is_made_from_the_source() -> None:
    kept = (ROOT / "docs" / "errors.md").read_text()
    assert page() == kept, "say what to do in it, then: ./yard docs"


def test_every_error_says_what_to_do() -> None:
    # Of damage it is said where it is printed: see below.
    silent = [one for one in error_texts.collect() if not ADVICE.search(one.text)]
    assert [
        one for one in silent if one.text not in WITHOUT and one.error != "JournalDamaged"
    ] == []


def test_no_exception_is_kept_that_is_not_needed() -> None:
    texts = [one.text for one in error_texts.collect() if not ADVICE.search(one.text)]
    assert [text for text in WITHOUT if text not in texts] == []


def test_errors_of_every_layer_are_collected() -> None:
    found = error_texts.collect()
    assert len(found) > 300
    layers = {one.place.partition("/")[0] for one in found}
    assert layers >= {"cli", "client", "worker", "broker", "net", "wire", "journal", "settings"}
    assert "sim" not in layers


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('f"no task is called {name}; give another"', "no task is called {}; give another"),
        ('reason or "nobody knows"', "nobody knows"),
        ('f"{wrong}; {hint}"', "{}; see there"),
        ('first + "; and so on"', "{}; and so on"),
        ("hint", "see there"),
        ("text", ""),
        ("1", ""),
    ],
)
def test_text_is_read_out_of_the_source(code: str, text: str) -> None:
    parsed = ast.parse(code, mode="eval")
    assert template(parsed.body, {"hint": "see there"}) == text


def test_errors_below_an_error_are_errors_and_ours_are_not() -> None:
    source = (
        "class Worse(Refused): ...\nclass Refused(UserError): ...\nclass Other(ValueError): ..."
    )
    codes = exit_codes([ast.parse(source), ast.parse("class UserError(TaskyardError): ...")])
    assert codes["Worse"] == codes["Refused"] == 2
    assert "Other" not in codes
    assert "Malformed" not in codes


def failing(error: Exception) -> Callable[[str], int]:
    @click.group()
    @click.pass_obj
    def group(cli_context: object) -> None:
        del cli_context

    @group.command()
    @click.option("-v", is_flag=True)
    @click.pass_obj
    def verb(cli_context: object, *, v: bool) -> None:
        cli_context.verbose = v  # type: ignore[attr-defined]
        raise error

    return lambda words: run(group, words.split())


@pytest.mark.parametrize(
    "error",
    [
        UserError("x is no y; give another"),
        NoBroker("nobody answers; start one"),
        TaskyardError("bad; see there"),
        OSError(28, "No space left on device", "there"),
        OSError("no file at all"),
        RuntimeError("a mistake of ours"),
        RecursionError("too deep"),
    ],
)
def test_traceback_is_for_those_who_ask(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error)("verb") > 0
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("taskyard: ")
    assert failing(error)("verb -v") > 0
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["", "rows 1..2 are lost"])
def test_damage_is_told_with_how_to_learn_more(
    lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(JournalDamaged("row 3 is missing", lost))("verb") == ExitCode.STATE_DAMAGED
    assert "; `taskyard journal check` tells all" in capsys.readouterr().err
