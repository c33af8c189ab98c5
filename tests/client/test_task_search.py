"""A search finds what `taskyard list` lists, one bounded request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard import testing
from taskyard.client import task_filters
from taskyard.client.task_filters import TaskSearch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.client.client import Client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Return a client of a broker with ten done tasks, three failed ones and one that waits."""
    with testing.broker() as broker, broker.client() as client:
        for number in range(10):
            client.submit(["true"], name=f"good-{number}", campaign="a", priority=number)
        for number in range(3):
            client.submit(["false"], name=f"bad-{number}", campaign="b", retries=0)
        broker.run_all()
        client.submit(["true"], name="late", campaign="b").done()
        yield client


def found(client: Client, text: str, count: int = 100, place: int = 0) -> TaskSearch:
    search = TaskSearch(task_filters.parse(text), count, place)
    while not search.step(client):
        pass
    return search


def names(client: Client, text: str, count: int = 100, place: int = 0) -> list[str]:
    return [view["name"] for view in found(client, text, count, place).rows]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--campaign a --match good-3", ["good-3"]),
        ("--failed", ["bad-0", "bad-1", "bad-2"]),
        ("--reason nothing-of-that-kind", []),
        ("--reason exit", ["bad-0", "bad-1", "bad-2"]),
        ("--worker nobody", []),
        ("--worker nobody --only done", []),
        ("--campaign b --reverse", ["late", "bad-2", "bad-1", "bad-0"]),
        ("--campaign b --sort name", ["bad-0", "bad-1", "bad-2", "late"]),
        ("--campaign a --sort priority --match -9", ["good-9"]),
    ],
)
def test_filter_finds_its_tasks(client: Client, text: str, expected: list[str]) -> None:
    assert names(client, text) == expected


@pytest.mark.parametrize("order", ["", "--sort priority", "--sort name --reverse"])
def test_pages_have_every_task_once(client: Client, order: str) -> None:
    pages, place = [], 0
    while True:
        page = found(client, f"--campaign a {order}", 4, place)
        pages.append([view["name"] for view in page.rows])
        place = page.next_offset
        if not place:
            break
    assert [len(page) for page in pages] == [4, 4, 2]
    together = [name for page in pages for name in page]
    numbers = range(10) if not order else range(9, -1, -1)
    assert together == [f"good-{number}" for number in numbers]


def test_measured_order_has_tasks_without_a_measurement_last(client: Client) -> None:
    assert names(client, "--campaign b --sort duration")[-1] == "late"
