"""The demo's campaign: its tasks, and the ones that will fail.

Owns the numbers that the closing table is compared with. Knows nothing of the workers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.demo.agent import DOWN, STRICT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME: Final = "demo"

#: Default, least and most tasks. With fewer than the least, a part would be empty.
TASKS: Final = 2800
TASKS_MIN: Final = 200
TASKS_MAX: Final = 20_000

#: The services of the mails, of the ping-pong workers (which have no other), and of the WMP
#: workers.
MAIL: Final = "mail"
PING_PONG: Final = "default"
WMP: Final = "text"

#: Parts of a sample.
PARTS: Final = 20

#: Percentage of tasks in the graph, and of mails.
_GRAPH_PERCENT: Final = 32
_MAIL_PERCENT: Final = 33

#: Destinations that accept mail.
HOSTS: Final = tuple(f"host-{number:02}.example" for number in range(1, 19))

#: One in this many mails goes to the destination that is down at first, one to the destination that
#: refuses, and one has a receipt that waits for it. Every refused mail has one.
_DOWN_EVERY: Final = 40
_STRICT_EVERY: Final = 80
_RECEIPT_EVERY: Final = 10
_STRICT_AT: Final = 7
_DOWN_AT: Final = 3

_MODULE: Final = "taskyard.demo.tasks"


class Campaign(Struct, frozen=True):
    """The number of tasks of each kind."""

    samples: int
    mails: int
    foreign: int

    @property
    def graph(self) -> int:
        """Each sample is fetched, counted in parts and merged. One summary follows."""
        return self.samples * (PARTS + 2) + 1

    @property
    def receipts(self) -> int:
        return _every(_RECEIPT_EVERY, _STRICT_AT, self.mails)

    @property
    def tasks(self) -> int:
        return self.graph + self.mails + self.receipts + 1 + self.foreign

    @property
    def lanes(self) -> int:
        return len(HOSTS) + 2

    @property
    def failing_count(self) -> int:
        """Mails to the destination that refuses them."""
        return _every(_STRICT_EVERY, _STRICT_AT, self.mails)

    @property
    def blocked_count(self) -> int:
        """The receipts of failing mails, and the digest of all receipts."""
        return self.failing_count + 1


def make_campaign(tasks: int) -> Campaign:
    """Return a campaign of exactly this many tasks."""
    samples = tasks * _GRAPH_PERCENT // 100 // (PARTS + 2)
    without = Campaign(samples, tasks * _MAIL_PERCENT // 100, 0)
    return Campaign(samples, without.mails, tasks - without.tasks)


def write(campaign: Campaign, path: Path) -> None:
    """Write the campaign as JSON lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(task) + "\n" for task in tasks_of(campaign))


def tasks_of(campaign: Campaign) -> Iterator[dict[str, Any]]:
    yield from _graph(campaign.samples)
    yield from _mails(campaign.mails)
    for number in range(campaign.foreign):
        service = WMP if number % 2 else PING_PONG
        payload = f"the text of number {number}\n"
        yield {"name": f"text-{number:05}", "service": service, "payload": payload}


def _graph(samples: int) -> Iterator[dict[str, Any]]:
    names = [f"sample-{number:03}" for number in range(samples)]
    for name in names:
        yield _call("fetch", f"{name}/fetch", [name])
        parts = [f"{name}/count-{part:02}" for part in range(PARTS)]
        for number, part in enumerate(parts):
            yield _call("count", part, [name, number], [f"{name}/fetch"])
        yield _call("merge", f"{name}/merge", [name, PARTS], parts)
    yield _call("summary", "summary", [samples], [f"{name}/merge" for name in names])


def _mails(mails: int) -> Iterator[dict[str, Any]]:
    receipts = []
    for number in range(mails):
        name = f"mail-{number:05}"
        mail = {"to": f"user{number}@{_host(number)}", "host": _host(number)}
        yield {"name": name, "service": MAIL, "lane": "{host}", "payload": mail}
        if number % _RECEIPT_EVERY == _STRICT_AT:
            receipts.append(f"receipt-{number:05}")
            yield _call("receipt", receipts[-1], [name], [name])
    yield _call("digest", "digest", [len(receipts)], receipts)


def _host(number: int) -> str:
    if number % _STRICT_EVERY == _STRICT_AT:
        return STRICT
    if number % _DOWN_EVERY == _DOWN_AT:
        return DOWN
    return HOSTS[number % len(HOSTS)]


def _call(function: str, name: str, args: list[object], after: list[str] | None = None) -> Any:  # noqa: ANN401
    return {"name": name, "call": f"{_MODULE}:{function}", "args": args, "after": after or []}


def _every(step: int, first: int, total: int) -> int:
    """Return how many numbers `range(first, total, step)` has."""
    return len(range(first, total, step))
