"""`Client.outbox`: tasks in a user's transaction, by psycopg and SQLAlchemy, without a broker."""

from __future__ import annotations

import asyncio
import json
import operator
import sqlite3
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import taskyard
from taskyard.calls import payloads
from taskyard.client.outbox import Outbox
from taskyard.errors import UserError
from taskyard.postgresql import database, outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.postgresql.outbox import OutboxRow
    from tests.kit.postgres import Cluster

_Connection = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def connection(url: str) -> Iterator[_Connection]:
    with psycopg.connect(url) as made:
        made.execute("DELETE FROM taskyard.outbox")
        made.commit()
        yield made


@pytest.fixture
def engine(url: str, connection: _Connection) -> Iterator[sqlalchemy.Engine]:
    del connection  # an empty outbox
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))
    yield engine
    engine.dispose()


def rows(url: str) -> list[OutboxRow]:
    with database.connect(url) as connection:
        return outbox.read_new(connection)


def names(url: str) -> list[str]:
    return [row.name for row in rows(url)]


def add(left: int, right: int = 1) -> int:
    return left + right


def test_task_exists_once_the_transaction_commits(url: str, connection: _Connection) -> None:
    box = taskyard.Outbox(connection)
    assert box.submit(["echo", "hi"], name="a", campaign="c") == "c/a"
    assert not rows(url)
    connection.commit()
    assert names(url) == ["a"]


def test_rolled_back_tasks_never_exist(url: str, connection: _Connection) -> None:
    box = taskyard.Outbox(connection)
    box.submit(["true"], name="undone")
    connection.rollback()
    with connection.transaction():
        box.submit(["true"], name="kept")
        with connection.transaction(force_rollback=True):
            box.submit(["true"], name="undone too")
    assert names(url) == ["kept"]


def test_options_are_those_of_a_submission(url: str, connection: _Connection) -> None:
    due = datetime(2031, 5, 4, 12, tzinfo=UTC)
    taskyard.Outbox(connection).submit(
        *(["convert", "{result:a}"],),
        name="b",
        campaign="c",
        after=["d/e"],
        lane="{0}",
        priority=3,
        due=due,
        expiry="10m",
        retries=2,
        time_limit="30s",
        cpus=0.5,
        memory="1G",
        env={"A": "1"},
        cwd="/srv",
    )
    connection.commit()
    (row,) = rows(url)
    assert json.loads(row.task) == {
        "after": ["d/e", "a"],
        "backoff": "1s",
        "cpus": 0.5,
        "due": "2031-05-04T12:00:00+00:00",
        "expiry": "600s",
        "lane": "convert",
        "memory": 2**30,
        "priority": 3,
        "retries": [1, 1],
        "service": "exec",
        "time_limit": "30s",
    }
    argv = ["convert", "{result:a}"]
    assert row.payload == payloads.encode_command(argv, {"A": "1"}, "/srv", results=["a"])


def test_functions_are_pickled(url: str, connection: _Connection) -> None:
    box = taskyard.Outbox(connection)
    by_value = box.submit(lambda value: value + 1, 41, campaign="c", priority=2)
    by_path = box.submit("operator:add", 1, 2, name="path")
    plain = box.map(operator.add, [1, 2], [3, 4], lane="l")
    shared = box.map(lambda value: value * 2, [1, 2], priority=2)
    named = box.submit(add, 1, right=2, name="named")
    connection.commit()
    found = {(f"{row.campaign}/" if row.campaign else "") + row.name: row for row in rows(url)}
    assert [*found] == [by_value, by_path, *plain, *shared, named]
    services = [json.loads(row.task)["service"] for row in found.values()]
    assert services == ["pickle", "call", "call", "call", "pickle", "pickle", "call"]
    assert by_value.startswith("c/lambda-")
    assert all(one.startswith("add-") for one in plain)
    assert all(one.startswith("lambda-") for one in shared)
    assert {json.loads(found[one].task)["priority"] for one in shared} == {2}


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        ((42,), {}, "neither a function"),
        ((["true"],), {"name": ""}, "must not be empty"),
        ((["true"],), {"nmae": "x"}, "unknown key"),
        ((["true"],), {"campaign": "a/b"}, "must not contain /"),
        ((add, 1), {"wrong": 2}, "unexpected argument"),
        ((add, 1), {"key": "content"}, "names by content"),
        ((b"x" * (16 * 1024 * 1024 + 1),), {}, "too large"),
    ],
)
def test_invalid_tasks_raise_at_once(
    connection: _Connection, arguments: Any, options: Any, problem: str
) -> None:
    box = taskyard.Outbox(connection)
    with pytest.raises((UserError, psycopg.errors.InvalidParameterValue), match=problem):
        box.submit(*arguments, **options)


def test_rows_of_another_kind_change_nothing(url: str, connection: _Connection) -> None:
    connection.row_factory = dict_row
    taskyard.Outbox(connection).map("operator:neg", range(3), campaign="c")
    connection.commit()
    assert len(rows(url)) == 3


def test_session_of_sqlalchemy(url: str, engine: sqlalchemy.Engine) -> None:
    with Session(engine) as session:
        box = taskyard.Outbox(session)
        box.submit(["true"], name="a")
        with session.begin_nested() as nested:
            box.submit(["true"], name="undone")
            nested.rollback()
        box.submit(add, 1, name="b")
        session.commit()
        box.submit(["true"], name="undone too")
        session.rollback()
        box.map("operator:neg", [1, 2], campaign="c")
        session.commit()
    assert [name for name in names(url) if not name.startswith("c-")] == ["a", "b"]
    assert len(rows(url)) == 4


def test_connection_of_sqlalchemy(url: str, engine: sqlalchemy.Engine) -> None:
    with engine.begin() as connection:
        taskyard.Outbox(connection).submit(b"\x00\xff", name="a")
    (row,) = rows(url)
    assert row.payload == b"\x00\xff"


def test_asynchronous_connections(url: str, connection: _Connection) -> None:
    del connection  # an empty outbox

    async def submit() -> None:
        async with await psycopg.AsyncConnection.connect(url) as direct:
            box = taskyard.AsyncOutbox(direct)
            await box.submit(["true"], name="a")
            await box.map("operator:neg", [1, 2], campaign="c")
            await direct.commit()
            await box.submit(["true"], name="undone")
            await direct.rollback()
            with pytest.raises(UserError, match=r"is for `taskyard.AsyncOutbox`"):
                taskyard.Outbox(direct)
        creator = psycopg.AsyncConnection.connect
        engine = create_async_engine(
            "postgresql+psycopg://", async_creator=lambda: creator(url, autocommit=False)
        )
        async with AsyncSession(engine) as session:
            await taskyard.AsyncOutbox(session).submit(add, 1, name="b")
            await session.commit()
        await engine.dispose()

    asyncio.run(submit())
    assert [name for name in names(url) if not name.startswith("c-")] == ["a", "b"]


def test_other_objects_are_refused(connection: _Connection, engine: sqlalchemy.Engine) -> None:
    for other in ("postgresql://localhost", engine):
        with pytest.raises(UserError, match="neither a connection to PostgreSQL"):
            Outbox(other)
    with pytest.raises(UserError, match=r"is for `taskyard.Outbox`"):
        taskyard.AsyncOutbox(connection)
    with pytest.raises(UserError, match="SQLite has no outbox"):
        taskyard.Outbox(sqlite3.connect(":memory:"))
