"""Tables on a terminal."""

from __future__ import annotations

import sys

import pytest

from taskyard.cli.output import print_table

NAME = "a-name-" * 12
STATES = ("BLOCKED", "DELAYED", "READY", "LEASED", "DONE", "FAILED", "CANCELLED")
REASON = "the disk of the machine in the cellar is full, and none is there to empty it"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a terminal of 80 columns without colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("narrow")
def test_name_that_is_too_long_ends_in_an_ellipsis_and_numbers_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("CAMPAIGN", *STATES), [(NAME, *([1_000_000] * 2), *([0] * 5)), ("b", *([1] * 7))])
    header, _, first, second = (
        line.split() for line in capsys.readouterr().out.splitlines() if line.strip()
    )
    assert header == ["CAMPAIGN", *STATES]
    assert first[0].startswith("a-name-")
    assert first[0].endswith("…")
    assert first[1:] == ["1,000,000", "1,000,000", "0", "0", "0", "0", "0"]
    assert second == ["b", *(["1"] * 7)]


@pytest.mark.usefixtures("narrow")
def test_generated_name_is_not_cut_beside_seven_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("CAMPAIGN", *STATES), [("map-b860e126c0", *([100] * 7))])
    assert "map-b860e126c0" in capsys.readouterr().out


@pytest.mark.usefixtures("narrow")
def test_long_text_wraps_to_the_next_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("NAME", "REASON"), [("a", REASON)], wrapped=["REASON"])
    assert REASON in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("narrow")
def test_spare_columns_are_left_out_where_there_is_little_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(("NAME", "AGE", "REASON"), [("a", 1, "b")], optional=["AGE"])
    assert capsys.readouterr().out.split() == ["NAME", "AGE", "REASON", "a", "1", "b"]  # a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("NAME", "AGE", "REASON"), [("a", 1, "b")], optional=["AGE"])
    header, _, row = (line.split() for line in capsys.readouterr().out.splitlines() if line.strip())
    assert (header, row) == (["NAME", "REASON"], ["a", "b"])
    monkeypatch.setenv("COLUMNS", "120")
    print_table(("NAME", "AGE", "REASON"), [("a", 1, "b")], optional=["AGE"])
    assert "AGE" in capsys.readouterr().out
