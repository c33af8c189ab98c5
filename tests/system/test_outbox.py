"""Tasks that users submit inside their own transactions, until a broker has run them once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from taskyard.client.client import Client
from taskyard.journal.postgres import database, outbox
from taskyard.journal.postgres.outbox import OutboxCounts
from tests.kit.processes import PATIENCE_SECONDS, Broker, Worker, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kit.postgres import Cluster

_Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def connection(url: str) -> Iterator[_Connection]:
    with psycopg.connect(url, autocommit=True) as made:
        yield made


def broker_of(tmp_path: Path, url: str, *more: str) -> Broker:
    return Broker(tmp_path, "--store", url, "--files", str(tmp_path / "files"), *more)


def submit(connection: _Connection, arguments: str) -> str:
    ((name,),) = connection.execute(f"SELECT taskyard.submit({arguments})".encode()).fetchall()
    return str(name)


def await_counts(url: str, expected: OutboxCounts) -> None:
    with database.connect(url) as connection:
        until(lambda: outbox.count(connection) == expected, f"{expected} in the outbox")


def test_committed_tasks_run_once_and_others_never(
    tmp_path: Path, url: str, connection: _Connection
) -> None:
    with connection.transaction():
        submit(connection, "'echo early', name => 'early'")
    with (
        broker_of(tmp_path, url, "--compact-after-rows", "5") as broker,
        Worker(tmp_path),
        Client(state=tmp_path / ".taskyard") as client,
    ):
        with connection.transaction():
            names = [submit(connection, f"'echo {i}', campaign => 'c'") for i in range(20)]
            submit(connection, "'cat', name => 'last', campaign => 'c', after => array['early']")
            with connection.transaction(force_rollback=True):
                submit(connection, "'echo undone', name => 'undone', campaign => 'c'")
        await_counts(url, OutboxCounts())
        futures = client.futures([*names, "c/last", "early"])
        texts = [future.result(PATIENCE_SECONDS) for future in futures]
        assert texts == [*[f"{i}\n" for i in range(20)], "", "early\n"]
        assert client.counts(campaign="c")["done"] == 21
        # A broker that was killed before it removed a row submits it again.
        before = client.show("early")["attempt"]
        submit(connection, "'echo early', name => 'early'")
        await_counts(url, OutboxCounts())
        assert client.show("early")["attempt"] == before
        assert broker.terminate()[0] == 0
