"""The page takes what the machine has left, and a little in any case."""

import pytest

from taskyard.web.follower import (
    ROUND_SECONDS_MAX,
    ROUND_SECONDS_MIN,
    SHARE_MIN,
    Pace,
    idle_seconds,
)


class Machine:
    """A machine with a clock and idle cores."""

    def __init__(self) -> None:
        self.now = self.idle = 0.0
        self.pace = Pace(lambda: self.idle, lambda: self.now)

    def run(self, seconds: int, idle_cores: float) -> float:
        """Let time pass. Return the share of the page at the end."""
        for _ in range(seconds):
            self.now += 1
            self.idle += idle_cores
            self.pace.share  # noqa: B018  # it looks at the machine
        return self.pace.share


def test_full_machine_leaves_the_page_a_little() -> None:
    machine = Machine()
    assert machine.run(1, 2.0) == 1.0
    assert machine.run(1, 0.0) == 0.5
    assert machine.run(20, 0.7) == SHARE_MIN
    assert machine.pace.pause_seconds(0.1) == pytest.approx(4.9)


def test_idle_machine_has_no_pauses() -> None:
    machine = Machine()
    machine.run(20, 0.0)
    assert machine.run(4, 1.0) == 1.0
    assert machine.pace.pause_seconds(0.1) == 0


def test_open_pages_change_less_often_on_a_full_machine() -> None:
    machine, used, rounds = Machine(), 0.0, []
    for _ in range(30):
        machine.run(1, 0.0)
        rounds.append(machine.pace.round_seconds(used))
        used += 0.2 / rounds[-1]  # a fifth of a second for each round
    assert rounds[0] == ROUND_SECONDS_MIN
    assert rounds[-1] == ROUND_SECONDS_MAX
    for _ in range(30):
        machine.run(1, 1.0)
        used += 0.01
        rounds.append(machine.pace.round_seconds(used))
    assert rounds[-1] == ROUND_SECONDS_MIN


def test_unknown_idle_time_has_no_pauses() -> None:
    machine = Machine()
    machine.pace = Pace(lambda: None, lambda: machine.now)
    machine.run(20, 0.0)
    assert machine.pace.pause_seconds(0.1) == 0


def test_idle_time_of_this_machine_grows() -> None:
    found = idle_seconds()
    assert found is None or found > 0
