"""The brokers that forwarders bring tasks from, as the tasks show.

A forwarder is a client here. It submits to campaigns that end in `@` and a label of the broker
above, and marks each task by its origin. Anyone may name a campaign so. Therefore a label counts
only if the origin of one of its tasks confirms it, which the broker is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from taskyard.core.states import TaskState
from taskyard.errors import TaskyardError
from taskyard.forward.lower import FORWARDED_ORIGIN

if TYPE_CHECKING:
    from taskyard.client.broker_link import BrokerLink
    from taskyard.web.view import View

#: Brokers on one page, those with the latest tasks. Each takes a request, once.
UPPER_MAX: Final = 50

_ENDED: Final = [TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED]


class UpperBroker(Struct):
    """A broker above, and the tasks that came from it."""

    #: Its address as the forwarder has it, or the name of a WMP manager.
    label: str
    tasks: int
    tasks_open: int
    #: When the first and the last of them were submitted here.
    first_ns: int
    last_ns: int
    #: The full name of the last one, and its campaign.
    example: str
    campaign: str


def labelled(view: View) -> list[UpperBroker]:
    """Return the labels in names of campaigns, that with the latest task first."""
    labels: dict[bytes, int] = {}
    names = view.catalog["campaign"].names
    of_campaign = np.full(len(names), -1, np.int64)
    for code, name in enumerate(names):
        label = name.rpartition(b"@")[2] if b"@" in name else b""
        if label:
            of_campaign[code] = labels.setdefault(label, len(labels))
    if not labels:
        return []
    table = view.tasks
    group = of_campaign[table.codes["campaign"][: table.count]]
    rows = np.flatnonzero(group >= 0)
    rows = rows[np.argsort(table.numbers["submitted_ns"][rows], kind="stable")]
    group = group[rows]
    last = np.zeros(len(labels), np.int64)
    last[group] = rows  # of several rows, the last one stays
    first = np.zeros(len(labels), np.int64)
    first[group[::-1]] = rows[::-1]
    totals = np.bincount(group, minlength=len(labels))
    is_open = ~np.isin(table.state[rows], _ENDED)
    open_tasks = np.bincount(group[is_open], minlength=len(labels))
    found = []
    for label, number in labels.items():
        row = view.row(int(last[number]))
        found.append(
            UpperBroker(
                label.decode(errors="backslashreplace"),
                int(totals[number]),
                int(open_tasks[number]),
                int(table.numbers["submitted_ns"][first[number]]),
                row["submitted_ns"],
                row["full_name"],
                row["campaign"],
            )
        )
    return sorted(found, key=lambda one: -one.last_ns)[:UPPER_MAX]


class UpperBrokers:
    """Asks the broker which labels are those of forwarders, each once."""

    def __init__(self) -> None:
        self._confirmed: set[str] = set()
        #: Tasks that were not forwarded, by label.
        self._denied: dict[str, str] = {}

    async def confirmed(self, broker: BrokerLink, found: list[UpperBroker]) -> list[UpperBroker]:
        """Return those whose last task was forwarded, now or at an earlier call."""
        return [one for one in found if await self._is_confirmed(broker, one)]

    async def _is_confirmed(self, broker: BrokerLink, one: UpperBroker) -> bool:
        if one.label in self._confirmed:
            return True
        if self._denied.get(one.label) == one.example:
            return False
        try:
            origin = (await broker.ask("show", one.example))["origin"] or ""
        except TaskyardError:
            return False
        if origin.startswith(FORWARDED_ORIGIN):
            self._confirmed.add(one.label)
            return True
        self._denied[one.label] = one.example
        return False
