"""Lanes by the clients: listed, moved, expired; waited for and awaited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from taskyard import testing
from taskyard.client import requests
from taskyard.client.client import AsyncClient
from taskyard.errors import Refused
from tests.kit.clients import internal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.client.internal import InternalClient


@pytest.fixture
def client() -> Iterator[InternalClient]:
    """With tasks in three lanes of two services."""
    with testing.broker() as broker, internal(broker.client()) as client:
        for name, service, lane in (("a", "s", "x"), ("b", "s", "y"), ("c", "t", "x")):
            client.submit(b"", name=name, service=service, lane=lane, due="1h")
        yield client


def places(client: InternalClient, *what: str | None) -> list[tuple[str, str]]:
    return [(one["service"], one["lane"]) for one in client.lanes(*what)]


def test_lanes_are_listed_by_service_and_by_pattern(client: InternalClient) -> None:
    assert places(client) == [("s", "x"), ("s", "y"), ("t", "x")]
    assert places(client, "s") == [("s", "x"), ("s", "y")]
    assert places(client, None, "x") == [("s", "x"), ("t", "x")]
    assert places(client, "s", "[!x]") == [("s", "y")]


def test_lanes_are_the_same_page_by_page(
    client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [*client.lanes()]
    monkeypatch.setattr(requests, "PAGE_TASKS", 1)
    assert [*client.lanes()] == whole


def test_tasks_are_moved_by_name_or_by_scope(client: InternalClient) -> None:
    assert client.move(["a"], to_lane="z") == 1
    assert client.move(service="s", to_service="t") == 2
    assert places(client) == [("t", "x"), ("t", "y"), ("t", "z")]
    with pytest.raises(Refused, match="a Move needs a target"):
        client.move(["a"])


def test_expired_tasks_have_failed_for_a_reason(client: InternalClient) -> None:
    assert client.expire(lane="x", service="s") == 1
    assert client.expire(["b", "unserved"]) == 1
    assert (client.show("a")["state"], client.show("c")["state"]) == ("failed", "delayed")
    assert client.show("a")["reason"]


def test_all_of_it_can_be_awaited(client: InternalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PAGE_TASKS", 2)

    async def scenario() -> None:
        async with AsyncClient(client.broker) as awaited:
            assert await awaited.move(["a"], to_lane="z") == 1
            assert await awaited.cancel(lane="z") == 1

    asyncio.run(scenario())
