"""`taskyard failover`: a term ends once, and only if a standby is ready."""

from typing import Any, cast

from taskyard.postgresql.leader import SeenStandby, StandbyRow, Term
from taskyard.postgresql.lease import Handover


class FakeLease:
    """The lease of a leader in epoch 3, at 100 ns, with standbys."""

    term = Term(3, "x")
    lease_ns = 50

    def __init__(self, *behind_ns: int) -> None:
        self.standbys = self
        self._seen = [
            SeenStandby(StandbyRow("s", "host", [], 1, 10), 110 - one, is_live=True)
            for one in behind_ns
        ]

    def seen(self) -> list[SeenStandby]:
        return self._seen

    def now_ns(self) -> int:
        return 100


def handover(*behind_ns: int) -> Handover:
    return Handover(cast("Any", FakeLease(*behind_ns)))


def test_ready_standby_takes_over() -> None:
    made = handover(51, 50)
    assert (made(3, force=False), made.is_requested) == ("", True)


def test_missing_or_late_standby_is_no_reason_to_stop() -> None:
    for made, text in ((handover(), "no standby has reported"), (handover(51), "behind")):
        assert text in made(3, force=False)
        assert not made.is_requested
        assert (made(3, force=True), made.is_requested) == ("", True)


def test_request_that_is_sent_again_ends_no_later_term() -> None:
    made = handover(10)
    assert made(2, force=True) == ""
    assert "has not begun" in made(4, force=True)
    assert not made.is_requested
