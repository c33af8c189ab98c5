"""The outbox in SQL: `taskyard.submit` checks a task, and leaves a row in its transaction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest

from taskyard.campaign.task_spec import KEYS
from taskyard.core.limits import NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, PRIORITY_MAX
from taskyard.postgresql import database, leader, outbox, outbox_schema
from taskyard.postgresql.leader import Term
from taskyard.postgresql.outbox import OutboxCounts, OutboxRow, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.postgresql.database import Connection
    from tests.kit.postgres import Cluster


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    with database.connect(url) as made:
        made.execute("DELETE FROM taskyard.outbox")
        yield made


def submit(connection: Connection, arguments: str) -> str:
    ((name,),) = connection.execute(f"SELECT taskyard.submit({arguments})".encode()).fetchall()
    return str(name)


def rows(connection: Connection) -> list[OutboxRow]:
    return outbox.read_new(connection)


def test_row_has_the_task_as_a_line_of_a_campaign_file(connection: Connection) -> None:
    arguments = (
        "'resize 17.png', name => 'a', campaign => 'thumbs', after => array['b', 'c/d'], "
        "service => 's', lane => 'l', priority => 5, due => '2031-05-04 12:00+02', "
        """options => '{"retries": 3, "env": {"A": null}}'"""
    )
    assert submit(connection, arguments) == "thumbs/a"
    (row,) = rows(connection)
    assert (row.name, row.campaign, row.payload) == ("a", "thumbs", None)
    assert row.task == (
        '{"due": "2031-05-04T10:00:00.000000Z", "env": {"A": null}, "argv": "resize 17.png", '
        '"lane": "l", "after": ["b", "c/d"], "retries": 3, "service": "s", "priority": 5}'
    )


def test_settings_of_the_user_change_nothing(connection: Connection) -> None:
    connection.execute("SET standard_conforming_strings = off")
    connection.execute("SET TimeZone = 'Asia/Kathmandu'")
    submit(connection, "'echo a', name => 'a', due => '2031-05-04T12:00:00Z'")
    submit(connection, "name => 'b', call => 'os:getcwd'")
    first, second = rows(connection)
    assert json.loads(first.task) == {"argv": "echo a", "due": "2031-05-04T12:00:00.000000Z"}
    assert json.loads(second.task) == {"call": "os:getcwd"}


def test_generated_names_are_unique(connection: Connection) -> None:
    names = [submit(connection, "'true', campaign => 'c'") for _ in range(20)]
    assert len(set(names)) == 20
    assert all(name.startswith("c/c-") for name in names)
    assert [f"c/{row.name}" for row in rows(connection)] == names


def test_rolled_back_tasks_leave_no_row(connection: Connection) -> None:
    with connection.transaction():
        submit(connection, "'true', name => 'kept'")
        with connection.transaction(force_rollback=True):
            submit(connection, "'true', name => 'undone'")
    with connection.transaction(force_rollback=True):
        submit(connection, "'true', name => 'undone too'")
    assert [row.name for row in rows(connection)] == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "give one of command, argv, call and payload"),
        ("'a', call => 'm:f'", "give one of command, argv, call and payload"),
        ("payload => 'a', options => '{\"call\": \"m:f\"}'", "give one of command, argv, call and"),
        ("'a', options => '[]'", "options must be an object"),
        ("'a', options => '{\"timeout\": 3}'", 'unknown option "timeout" .known: argv, call'),
        ("'a', options => '{\"priority\": 1}', priority => 1", "an argument is given twice"),
        ("'a', argv => array['a']", "an argument is given twice"),
        ("'a', name => ''", 'task "": a name must have 1 to 1024 bytes'),
        ("'a', name => repeat('é', 513)", "a name must have 1 to 1024 bytes"),
        ("'a', name => E'a\\nb'", r'task "a\\nb": a name must not contain control characters'),
        ("'a', campaign => 'a/b'", "the name of a campaign must not contain /"),
        ("'it''s'", "the command has an open quote"),
        ("'   '", "a command must name a program first"),
        ("argv => '{}'", "a command must name a program first"),
        ("argv => array['a', NULL]", "argv and after must not contain nulls"),
        ("'a', after => array[NULL]::text[]", "argv and after must not contain nulls"),
        ("call => 'f'", "call must be module:function"),
        ("call => 'm:f', args => '{}'", "args must be an array"),
        ("call => 'm:f', kwargs => '[]'", "kwargs must be an object"),
        ("'a', priority => -1001", "priority must be from -1000 to 1000"),
        ("'a', due => 'infinity'", "due and expiry must be finite"),
        ("payload => repeat('a', 16777216)::bytea", "at most 16777216 bytes"),
    ],
)
def test_invalid_tasks_are_refused_in_the_transaction(
    connection: Connection, arguments: str, problem: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=problem):
        submit(connection, arguments)
    assert not rows(connection)


def test_limits_in_sql_are_those_of_the_broker() -> None:
    assert (NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, PRIORITY_MAX) == (1024, 16777216, 1000)
    assert {*outbox_schema.OPTIONS} == KEYS.keys() - {"name", "recipients"}


def test_role_of_a_user_needs_the_function_only(url: str, connection: Connection) -> None:
    connection.execute("DROP ROLE IF EXISTS app")
    connection.execute("CREATE ROLE app LOGIN")
    connection.execute("GRANT USAGE ON SCHEMA taskyard TO app")
    try:
        with psycopg.connect(url, user="app", autocommit=True) as user:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                submit(user, "'true'")
            connection.execute("GRANT EXECUTE ON FUNCTION taskyard.submit TO app")
            submit(user, "'true'")
            for query in ("SELECT FROM taskyard.outbox", "SELECT FROM taskyard.journal"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    user.execute(query.encode())
        (entry,) = outbox.entries(connection, 0, 10)
        assert entry.submitted_by == "app"
    finally:
        connection.execute("DROP OWNED BY app")
        connection.execute("DROP ROLE app")


def test_batch_is_limited_in_bytes(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "BYTES_MAX", 1000)
    for size in (2000, 300, 300, 600):
        submit(connection, f"payload => repeat('a', {size})::bytea")
    sizes = []
    while found := rows(connection):
        sizes.append([len(row.payload or b"") for row in found])
        connection.execute("DELETE FROM taskyard.outbox WHERE id = ANY(%s)", ([*map(_id, found)],))
    assert sizes == [[2000], [300, 300], [600]]


def _id(row: OutboxRow) -> int:
    return row.id


def test_stale_leader_changes_no_row(connection: Connection) -> None:
    submit(connection, "'true'")
    (row,) = rows(connection)
    stale = Term(0, "nobody")
    outbox.remove(connection, stale, [row.id])
    outbox.refuse(connection, stale, [Refused(row.id, "code", "reason")])
    assert rows(connection) == [row]


def test_refused_rows_stay_until_a_user_decides(connection: Connection) -> None:
    term = leader.acquire(connection, 1)
    for _ in range(3):
        submit(connection, "'true'")
    first, second, third = [row.id for row in rows(connection)]
    refused = [Refused(first, "conflict", "taken"), Refused(second, "unknown", "no such lane")]
    outbox.refuse(connection, term, refused)
    assert outbox.count(connection) == OutboxCounts(1, 2)
    assert outbox.drop(connection, [first, third]) == [first]
    assert outbox.retry(connection, [second, third]) == [second]
    assert [row.id for row in rows(connection)] == [second, third]
    outbox.remove(connection, term, [second, third])
    assert outbox.count(connection) == OutboxCounts()
