"""The whole broker: real processes, the journal on disk or in memory, all features on.

The task is always the same: one that does nothing, with a payload of 20 bytes, is submitted, given
to a worker, and its completion is acknowledged. What counts is CPU time of all processes together,
because wall times on a shared machine swing threefold; tasks a second are shown beside it.
"""

from collections.abc import Callable
from typing import Final

from bench.broker import calls as broker_calls
from bench.broker import campaigns as broker_campaigns
from bench.broker import sizes as broker_sizes
from bench.settings import Settings
from bench.table import TableLine

#: Every case by its name, in the order of the table.
CASES: Final[dict[str, Callable[[Settings], list[TableLine]]]] = {
    "batches": broker_campaigns.batches,
    "shapes": broker_campaigns.shapes,
    "plain": broker_calls.plain,
    "calls": broker_calls.calls,
    "latency": broker_calls.latency,
    "memory": broker_sizes.memory,
    "restart": broker_sizes.restart,
}


def run(settings: Settings, only: tuple[str, ...] = ()) -> list[TableLine]:
    """The measurements of these cases, or of all, as lines of the suite's table."""
    return [one for name in only or tuple(CASES) for one in CASES[name](settings)]
