"""Truncated results in tables: never taken for whole ones. Needs no session."""

from typing import Any, cast

import pyarrow as pa

from pyspark_taskyard.tables import results_batch
from taskyard.client.client import Client
from taskyard.client.requests import TaskResult
from taskyard.core.model import Result
from taskyard.core.states import TaskState
from taskyard.pipeline.jobs import map_rows

REASON = "result truncated: only the last 3 of 9 bytes are kept"


class Told:
    """A client of a broker that has three tasks."""

    def results(self, _names: list[str]) -> dict[str, TaskResult]:
        return {
            "whole": TaskResult(TaskState.DONE, b"all"),
            "cut": TaskResult(TaskState.DONE, b"end", 9),
            "bad": TaskResult(TaskState.FAILED, b"why"),
        }

    def existing(self, _names: list[str]) -> dict[str, dict[str, Any]]:
        states = {"whole": "done", "cut": "done", "bad": "failed"}
        return {name: {"state": state, "attempt": 1} for name, state in states.items()}


def test_truncated_result_is_replaced_by_a_reason() -> None:
    batch = pa.record_batch({"task": ["whole", "cut", "bad"]})
    fetched = map_rows._fetched(cast("Client", Told()), batch)  # noqa: SLF001
    assert fetched["result"].to_pylist() == ["all", None, None]
    assert fetched["reason"].to_pylist() == [None, REASON, "why"]


def test_results_have_the_end_of_a_truncated_result_and_a_reason() -> None:
    view = {"campaign": "", "service": "exec", "attempt": 1, "reason": "", "ended": 1.0}
    views = [{"name": name, "state": "done", **view} for name in ("whole", "cut")]
    batch = results_batch(views, [Result(b"all"), Result(b"end", 9)])
    assert batch["result"].to_pylist() == [b"all", b"end"]
    assert batch["reason"].to_pylist() == ["", REASON]
