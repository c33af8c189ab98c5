"""Compares every choice by the index of demands with the choice by a pass over the lane.

Schedules are too small for a worker to meet many tasks that do not fit, so the index is read here
at each choice in addition. The choice itself stays, so that a schedule runs as without this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.models import Violation
from simulator.mutations.registry import patched
from taskyard.core.selection import Selection

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from taskyard.core.demand_queues import Demand
    from taskyard.core.entities import Lane, Task


def compared_choices() -> AbstractContextManager[None]:
    """Compare the two ways to choose tasks of a lane inside a `with` block."""
    sound = Selection._search  # noqa: SLF001 - compares two ways inside

    def search(
        self: Selection, lane: Lane, room: int
    ) -> tuple[list[Task], list[Task], list[Demand]]:
        chosen, wider, demands = sound(self, lane, room)
        if not lane.options.is_random and not self.reserved_payloads:
            found, kinds = self._search_index(lane, room)
            _require_same(lane, [task.name for task in chosen], [task.name for task in found])
            _require_same(lane, sorted(dict.fromkeys(demands)), sorted(dict.fromkeys(kinds)))
        return chosen, wider, demands

    return patched(Selection, "_search", search)


def _require_same(lane: Lane, scanned: object, indexed: object) -> None:
    if scanned != indexed:
        raise Violation("demands", f"{lane!r} by a pass {scanned!r}, by its index {indexed!r}")
