"""The page of errors, and how errors are printed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import pytest

from docs import error_texts
from docs.error_texts import exit_codes, page, template
from taskyard.cli.entry import run
from taskyard.errors import ExitCode, JournalDamaged, NoBroker, TaskyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("collected_once")


def test_page_of_errors_is_made_from_the_source() -> None:
    kept = (ROOT / "docs" / "errors.md").read_text()
    assert page() == kept, "./yard docs"


def test_errors_of_every_layer_are_collected() -> None:
    found = error_texts.collect()
    assert len(found) > 300
    layers = {one.place.partition("/")[0] for one in found}
    assert layers >= {"cli", "client", "worker", "broker", "net", "wire", "journal", "settings"}
    assert "sim" not in layers


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('f"unknown task {name} (see there)"', "unknown task {} (see there)"),
        ('reason or "unknown reason"', "unknown reason"),
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
