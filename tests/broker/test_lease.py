"""A broker whose lease has ended sends nothing, also if it has nothing to commit."""

import pytest

from taskyard.broker.turn import Broker
from taskyard.core.events import StatsRequested, SubmitRequested
from taskyard.core.model import Submission
from taskyard.core.scheduler import Scheduler
from taskyard.errors import LeaderLost
from tests.kit.broker import TurnHarness


class LeasedHarness(TurnHarness):
    def __init__(self) -> None:
        super().__init__()
        self.has_lease = True
        self.broker = Broker(Scheduler(), self, self.store, self, check_lease=self._check)

    def _check(self) -> None:
        if not self.has_lease:
            raise LeaderLost("the lease has ended")


@pytest.mark.parametrize(
    "event",
    [SubmitRequested(0, b"client", Submission([b"a"], [b""])), StatsRequested(0, b"client")],
)
def test_reply_leaves_only_while_the_lease_runs(
    event: SubmitRequested | StatsRequested,
) -> None:
    harness = LeasedHarness()
    assert len(harness.run_turn([event])) == 1
    harness.has_lease = False
    with pytest.raises(LeaderLost):
        harness.run_turn([event])
    assert harness.effects == ()
