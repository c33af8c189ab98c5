"""The broker's ledger beside the reference model, after a recovery and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.models import ENDED, Violation

if TYPE_CHECKING:
    from simulator.reference_model import ReferenceModel
    from taskyard.core.ledger import Ledger


def compare(
    ledger: Ledger,
    model: ReferenceModel,
    replaced: dict[tuple[bytes, int], bool],
    when: str,
) -> None:
    """Require that the broker's ledger matches the journal."""
    if ledger.record != model.records:
        raise Violation("recovery", f"{when}: {ledger.record} of {model.records} records")
    _compare_tasks(ledger, model, when)
    lanes = _lane_state(ledger)
    if lanes != model.lanes.snapshot():
        raise Violation(
            "recovery", f"{when}: lanes {lanes}, by the journal {model.lanes.snapshot()}"
        )
    returned = {key: one.returned for key, one in ledger.replaced.items()}
    if returned != replaced:
        raise Violation("recovery", f"{when}: replaced {returned}, not {replaced}")
    if [*ledger.workers] != [*model.workers]:
        raise Violation("recovery", f"{when}: workers {[*ledger.workers]}, not {[*model.workers]}")


def _compare_tasks(ledger: Ledger, model: ReferenceModel, when: str) -> None:
    """Require that the tasks that have not ended are the same as in the journal."""
    expected = {
        task_model.name: (
            task_model.state,
            task_model.attempt,
            task_model.worker,
            task_model.lane,
            task_model.failures,
            task_model.losses,
            task_model.terms.environment,
        )
        for task_model in model.tasks.values()
        if task_model.state not in ENDED
    }
    known = {
        task.name: (
            task.state,
            task.attempt,
            b"" if task.lease is None else task.lease.worker.name,
            task.lane.name,
            task.failures,
            task.losses,
            task.terms.environment,
        )
        for task in ledger.tasks.values()
        if task.state not in ENDED
    }
    for name in [*expected, *known]:
        one, other = expected.get(name), known.get(name)
        if one != other:
            task_model = model.tasks.get(name)
            text = f"{when}: {other}, by the journal {one}"
            model.require(False, "recovery", text, task_model)  # noqa: FBT003


def _lane_state(ledger: Ledger) -> dict[tuple[bytes, bytes], tuple[int, list[bytes]]]:
    """Return the broker's state of its lanes, without their tasks."""
    lanes = {
        (service.name, lane.name): lane
        for service in ledger.services.values()
        for lane in service.lanes.values()
        if lane.extras is not None
    }
    waiting = {
        key: [] if lane.extras is None else [task.name for task in lane.extras.next_run.values()]
        for key, lane in sorted(lanes.items())
    }
    return {
        key: (lanes[key].released, names)
        for key, names in waiting.items()
        if names or lanes[key].released
    }
