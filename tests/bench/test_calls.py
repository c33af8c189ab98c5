"""The Python calls of each usual message, which may only fall.

A rise is a commit that says why, and writes the new numbers by `./yard bench calls --keep`. So is a
fall, because a number that is too high hides the next rise.
"""

from __future__ import annotations

import sys

import pytest

from bench.calls import suite
from bench.calls.tracer import Segment, Trace
from tests.kit.requirements import skip


def test_usual_messages_make_the_kept_number_of_calls() -> None:
    if sys.version_info[:2] != suite.PYTHON:
        skip("Python 3.11", "the kept numbers are of its calls")
    traces = {run: suite.trace(run) for run in ("plain", "native", "steal")}
    messages = {what: run for what, (run, _) in suite.MESSAGES.items() if run in traces}
    found = [*(suite.figures_of(what, traces) for what in messages), suite.client_figures()]
    assert suite.changed(found) == []


def test_change_is_reported_in_both_directions() -> None:
    (what, number), *_ = suite.kept().items()
    for changed in (number - 1, number + 1):
        figures = suite.Figures(
            what, own=changed, zmq=0, other=0, c=0, sqlite=0, allocations=0, files=1
        )
        assert suite.changed([figures]) == [
            f"{what}: {changed} calls of our own, {number} are kept"
        ]


def test_message_that_was_never_handled_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no turn of the run plain has the events"):
        suite.figures_of("plain Create", {"plain": Trace([Segment(["WatchRequested"])])})
