"""Progress lines and bars."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.cli.options import CliContext
from taskyard.cli.pipeline import StageProgress
from taskyard.cli.progress import ProgressBar
from taskyard.client.progress import RATE_SECONDS

if TYPE_CHECKING:
    Captured = pytest.CaptureFixture[str]


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    """A stream that records drawing."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(time, "monotonic", watch)
    return watch


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr with a terminal. Not a fixture: pytest replaces stderr later."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def counts(**given: int) -> dict[str, int]:
    states = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")
    return dict.fromkeys(states, 0) | given


def quiet() -> CliContext:
    cli_context = CliContext()
    cli_context.quiet = True
    return cli_context


def test_lines_are_printed_at_intervals_with_rate_and_remaining_time(
    watch: Watch, capsys: Captured
) -> None:
    with ProgressBar(CliContext(), "c") as meter:
        meter.count(counts(ready=100), 100)
        assert capsys.readouterr().err == ""
        watch.seconds += 10
        meter.count(counts(ready=58, leased=2, done=39, failed=1), 100)
        meter.count(counts(ready=57, leased=2, done=40, failed=1), 100)
    assert capsys.readouterr() == (
        "",
        "c: 39 of 100 done, 1 failed, 2 running, 60 left, 4/s, about 15 s left\n",
    )


def test_slow_campaign_has_a_rate_a_minute(watch: Watch, capsys: Captured) -> None:
    with ProgressBar(CliContext(), "c") as meter:
        meter.count(counts(ready=10), 10)
        watch.seconds += 20
        meter.count(counts(delayed=5, done=5), 10)
    assert "5 delayed, 5 left, 15.0/min, about 20 s left" in capsys.readouterr().err


def test_tasks_behind_a_failure_count_as_ended(watch: Watch, capsys: Captured) -> None:
    with ProgressBar(CliContext(), "c") as meter:
        meter.count(counts(ready=3), 3)
        watch.seconds += 10
        meter.count(counts(done=1, failed=1, blocked=1), 3, behind_failure=1)
    assert capsys.readouterr().err == "c: 1 of 3 done, 1 failed, 1 behind a failure\n"


def test_total_that_is_not_known_is_left_out(watch: Watch, capsys: Captured) -> None:
    with ProgressBar(CliContext(), "c\a", participle="submitted") as meter:
        meter.update(0, None)
        watch.seconds += 10
        meter.update(30_000, None)
    assert capsys.readouterr().err == "c\\x07: 30,000 submitted, 3,000/s\n"


def test_end_of_a_step_is_printed_at_once_if_requested(watch: Watch, capsys: Captured) -> None:
    with ProgressBar(CliContext(), participle="", prints_end=True) as meter:
        for step in ("reading", "writing"):
            meter.set_label(step)
            for done in range(3):
                meter.update(done, 2)
    assert watch.seconds == 100
    assert capsys.readouterr().err == "reading: 2 of 2\nwriting: 2 of 2\n"


def test_quiet_shows_nothing(watch: Watch, capsys: Captured) -> None:
    with ProgressBar(quiet(), "c", prints_end=True) as meter:
        watch.seconds += 60
        meter.count(counts(done=1), 1)
    assert capsys.readouterr() == ("", "")


def test_terminal_gets_a_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with ProgressBar(CliContext(), "[c]") as meter:
        meter.count(counts(ready=1, done=39, failed=2), 42)
        meter.print_above("a [line]")
    shown = terminal.getvalue()
    assert "[c]" in shown
    assert "41/42" in shown
    assert "\x1b[31m2 failed" in shown
    assert "a [line]\n" in shown
    assert "39 of 42 done" not in shown


def test_bar_begins_with_no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with ProgressBar(CliContext(), "c"):
        pass
    assert "0/?" in terminal.getvalue()
    assert "/100" not in terminal.getvalue()


def test_terminal_that_is_used_for_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    terminal = terminal_for(monkeypatch)
    for meter in (ProgressBar(CliContext(), "c", drawn=False), ProgressBar(quiet(), "c")):
        with meter:
            watch.seconds += 60
            meter.count(counts(done=1), 1)
    assert terminal.getvalue() == ""


def forced(*, is_quiet: bool = False) -> CliContext:
    cli_context = CliContext()
    cli_context.quiet, cli_context.shows_progress = is_quiet, True
    return cli_context


def test_forced_progress_has_lines_where_none_are_shown_otherwise(
    monkeypatch: pytest.MonkeyPatch, watch: Watch, capsys: Captured
) -> None:
    def show(meter: ProgressBar) -> None:
        with meter:
            meter.count(counts(ready=3), 3)
            watch.seconds += 10
            meter.count(counts(ready=1, leased=1, done=1), 3)
            meter.count(counts(done=3), 3)
            meter.count(counts(done=3), 3)

    lines = "c: 1 of 3 done, 1 running, 2 left, 6.0/min, about 20 s left\nc: 3 of 3 done\n"
    show(ProgressBar(forced(is_quiet=True), "c"))
    assert capsys.readouterr() == ("", lines)
    terminal = terminal_for(monkeypatch)
    show(ProgressBar(forced(), "c", drawn=False))
    assert terminal.getvalue() == lines


def test_progress_that_is_turned_off_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, watch: Watch, capsys: Captured
) -> None:
    cli_context = CliContext()
    cli_context.shows_progress = False
    for stream in (sys.stderr, terminal_for(monkeypatch)):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar(cli_context, "c") as meter:
            watch.seconds += 60
            meter.count(counts(done=1, ready=1), 2)
            assert not meter.is_shown
    assert capsys.readouterr() == ("", "")
    assert isinstance(stream, Terminal)
    assert stream.getvalue() == ""


def test_stages_are_lines_and_their_rows_too(watch: Watch, capsys: Captured) -> None:
    with StageProgress(CliContext(), "starting Spark on local[2]") as progress:
        assert capsys.readouterr().err == "starting Spark on local[2]\n"
        progress.show("submitting", 0, 100)
        watch.seconds += 10
        progress.show("submitting", 40, 100)
        progress.show("writing")
    assert capsys.readouterr().err == (
        "submitting\nsubmitting: 40 of 100 rows, 60 left, 4/s, about 15 s left\nwriting\n"
    )


def test_stage_names_what_it_counts_and_rare_updates_have_a_rate(
    watch: Watch, capsys: Captured
) -> None:
    with StageProgress(CliContext(), "starting Spark", counts="") as progress:
        for done in (0, 10, 40):
            progress.show("simulating points", done, 100)
            watch.seconds += 2 * RATE_SECONDS
    assert capsys.readouterr().err == (
        "starting Spark\nsimulating points\n"
        "simulating points: 10 of 100, 90 left, 15.0/min, about 6 min left\n"
        "simulating points: 40 of 100, 60 left, 45.0/min, about 1 min 20 s left\n"
    )


def test_stages_take_turns_in_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with StageProgress(CliContext(), "starting Spark") as progress:
        progress.show("writing", 1, 2)
        assert [one.description for one in bars_of(progress)] == ["writing"]
    assert "starting Spark" in terminal.getvalue()


def bars_of(progress: StageProgress) -> list[Any]:
    bars = progress._bar._bars  # noqa: SLF001  # drawn as a block, with times
    assert bars is not None
    return bars.tasks


def test_stages_are_silent_with_quiet(capsys: Captured) -> None:
    with StageProgress(quiet(), "starting Spark") as progress:
        progress.show("writing", 1, 2)
    assert capsys.readouterr().err == ""
