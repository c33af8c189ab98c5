"""Rates and paces, with times as arguments."""

from taskyard.tui.samples import Pace, Throughput

_STATES = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")


def counts(**numbers: int) -> dict[str, int]:
    return dict.fromkeys(_STATES, 0) | numbers


def test_throughput_counts_ended_tasks_and_estimates_the_rest() -> None:
    throughput = Throughput()
    throughput.add(0.0, counts(ready=40))
    assert (throughput.rates(), throughput.rate(), throughput.seconds_left()) == ([], 0.0, None)
    throughput.add(1.0, counts(ready=34, done=5, failed=1))
    throughput.add(3.0, counts(ready=30, done=9, failed=1))
    assert throughput.rates() == [6.0, 2.0]
    assert throughput.rate() == 10 / 3
    assert throughput.seconds_left() == 9.0


def test_throughput_forgets_what_is_older_than_a_minute() -> None:
    throughput = Throughput()
    throughput.add(0.0, counts())
    throughput.add(1.0, counts(done=1000))
    throughput.add(62.0, counts(done=1000, ready=5))
    assert throughput.rate() == 0.0
    assert throughput.seconds_left() is None


def test_throughput_starts_anew_with_another_state() -> None:
    throughput = Throughput()
    throughput.add(0.0, counts(done=1000))
    throughput.add(1.0, counts(done=3))
    assert throughput.rates() == []


def test_expensive_requests_are_repeated_rarely() -> None:
    pace = Pace()
    assert pace.is_due(0.0)
    pace.took(100.0, 100.5)
    assert not pace.is_due(125.0)
    assert pace.is_due(125.5)
    pace.took(200.0, 260.0)
    assert pace.is_due(290.0)
    pace.took(300.0, 310.0)
    pace.reset()
    assert pace.is_due(310.0)
