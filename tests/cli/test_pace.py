"""The lines and bars of a campaign that runs."""

from __future__ import annotations

import time

import pytest

from taskyard.cli.options import Talk
from taskyard.cli.pace import Pace


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(time, "monotonic", watch)
    return watch


def counts(**given: int) -> dict[str, int]:
    states = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")
    return dict.fromkeys(states, 0) | given


def test_line_comes_now_and_then_with_rate_and_rest(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Pace(Talk(), "c", 100) as pace:
        pace.update(counts(ready=100))
        assert capsys.readouterr().err == ""
        watch.seconds += 10
        pace.update(counts(ready=58, leased=2, done=39, failed=1))
    assert capsys.readouterr() == (
        "",
        "c: 39 of 100 done, 1 failed, 2 running, 4/s, about 15 s left\n",
    )


def test_slow_campaign_has_a_rate_a_minute(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Pace(Talk(), "c", 10) as pace:
        pace.update(counts(ready=10))
        watch.seconds += 20
        pace.update(counts(delayed=5, done=5))
    assert "5 waiting for their time, 15.0/min, about 20 s left" in capsys.readouterr().err


def test_quiet_shows_nothing(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Talk()
    talk.quiet = True
    with Pace(talk, "c", 1) as pace:
        watch.seconds += 60
        pace.update(counts(done=1))
    assert capsys.readouterr() == ("", "")
