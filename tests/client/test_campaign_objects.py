"""Campaigns as objects, of both clients."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest

from taskyard.client.client import AsyncClient, Client
from taskyard.core import limits
from taskyard.errors import TimedOut
from tests.cli.yard import Yard, running
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard") / "state") as running_yard:
        yield running_yard


@pytest.fixture
def client(yard: Yard) -> Iterator[Client]:
    with Client(state=yard.state) as connected:
        yield connected


def some(counts: dict[str, int]) -> dict[str, int]:
    """Return the counts that are not zero."""
    assert len(counts) == 7
    return {state: count for state, count in counts.items() if count}


def test_campaign_has_all_tasks_submitted_with_its_name(client: Client) -> None:
    campaign = client.campaign("thumbs")
    assert some(campaign.status()) == {}
    with pytest.raises(TimedOut, match=r"^campaign thumbs: not settled after 0.05 s"):
        campaign.wait(0.05)
    client.submit(["echo", "a"], name="a", campaign="thumbs")
    client.submit(["false"], name="b", campaign="thumbs")
    client.submit(["true"], name="c", campaign="thumbs", after=["b"])
    client.submit(["true"], name="of-another", campaign="other")
    campaign.wait(PATIENCE_SECONDS)
    assert some(campaign.status()) == {"done": 1, "failed": 1, "blocked": 1}
    assert [task["name"] for task in campaign.tasks()] == ["a", "b", "c"]
    assert [task["name"] for task in campaign.tasks("b")] == ["b"]
    assert campaign.name == "thumbs"
    assert repr(campaign) == f"<Campaign 'thumbs' of {client.broker}>"
    first = campaign.futures()[0]
    assert (first.name, first.result(PATIENCE_SECONDS)) == ("a", "a\n")
    assert campaign.retry() == 1
    campaign.wait(PATIENCE_SECONDS)


def test_campaign_is_cancelled_as_a_whole(client: Client) -> None:
    campaign = client.campaign("waits")
    for item in "abc":
        client.submit(["echo", item], campaign="waits", service=UNSERVED)
    with pytest.raises(TimedOut, match=r"^campaign waits: not settled after 0.05 s"):
        campaign.wait(0.05)
    futures = campaign.futures()
    assert campaign.cancel() == 3
    assert some(campaign.status()) == {"cancelled": 3}
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("progress", [False, True])
def test_campaign_without_tasks_is_named_as_such_after_the_timeout(
    client: Client, *, progress: bool
) -> None:
    with pytest.raises(TimedOut, match=r"not settled after 0.05 s \(it has no tasks\)"):
        client.campaign("nosuch").wait(0.05, progress=progress)


def test_old_campaign_is_counted_by_the_client(client: Client) -> None:
    client.submit(b"", campaign="old", service=UNSERVED)
    rows = limits.STATS_ROWS_MAX
    for number in range(rows):
        client.submit(b"", campaign=f"newer-{number}", service=UNSERVED)
    counted = client.status()["campaigns"]
    assert len(counted) == rows
    assert "old" not in [one["name"] for one in counted]
    assert some(client.campaign("old").status()) == {"ready": 1}
    assert client.cancel(service=UNSERVED) == rows + 1


def test_async_campaign_works_alike(yard: Yard) -> None:
    async def scenario() -> None:
        async with AsyncClient(state=yard.state) as client:
            campaign = client.campaign("awaited")
            for item in "abc":
                client.submit(["echo", item], campaign="awaited")
            await campaign.wait(PATIENCE_SECONDS)
            assert some(await campaign.status()) == {"done": 3}
            names = [task["name"] async for task in campaign.tasks()]
            futures = await campaign.futures()
            assert [future.name for future in futures] == names
            assert await asyncio.gather(*futures) == ["a\n", "b\n", "c\n"]
            assert (await campaign.retry(), await campaign.cancel()) == (0, 0)
            assert repr(campaign) == f"<Campaign 'awaited' of {client.broker}>"

    asyncio.run(scenario())
