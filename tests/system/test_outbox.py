"""Tasks that users submit inside their own transactions, until a broker has run them once."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import taskyard
from taskyard.client.internal import InternalClient
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import name_of, short_name
from taskyard.postgresql import database, outbox
from taskyard.postgresql.outbox import OutboxCounts
from taskyard.process.value_access import ValueAccess
from tests.kit.processes import PATIENCE_SECONDS, Broker, Worker, run_here, until

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    # A removal that waits for a lock keeps the leader from renewing its lease.
    settings = '[blobs]\ndirectory = "files"\n[lease]\nstore = "60s"\n'
    (tmp_path / "taskyard.toml").write_text(settings)
    return Broker(tmp_path, "--store", url, *more)


def submit(connection: _Connection, arguments: str) -> str:
    ((name,),) = connection.execute(f"SELECT taskyard.submit({arguments})".encode()).fetchall()
    return str(name)


def await_counts(url: str, expected: OutboxCounts) -> None:
    with database.connect(url) as connection:
        until(lambda: outbox.count(connection) == expected, f"{expected} in the outbox")


def test_example_of_the_docs_submits_its_tasks(url: str, connection: _Connection) -> None:
    """The docs mark it by `<!-- run by tests/system/test_outbox.py -->`."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    _, _, rest = page.partition("<!-- run by tests/system/test_outbox.py -->\n```python\n")
    program = rest.partition("```")[0].replace("postgresql://app@db.example/taskyard", url)
    connection.execute("CREATE TABLE images (id integer)")
    variables: dict[str, Any] = {"scaled": scaled}
    exec(program, variables)  # noqa: S102  # our own
    assert variables["name"].startswith("thumbs/")
    with database.connect(url) as own:
        assert outbox.count(own) == OutboxCounts(new=4)


def test_committed_tasks_run_once_and_others_never(
    tmp_path: Path, url: str, connection: _Connection
) -> None:
    with connection.transaction():
        submit(connection, "'echo early', name => 'early'")
    with (
        broker_of(tmp_path, url, "--compact-after-rows", "5") as broker,
        Worker(tmp_path),
        InternalClient(state=tmp_path / ".taskyard") as client,
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
        # A feed that lost its connection makes another one.
        cut = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'taskyard outbox'"
        )
        assert cut.fetchall() == [(True,)]
        late = submit(connection, "'echo late'")
        await_counts(url, OutboxCounts())
        assert client.future(late).result(PATIENCE_SECONDS) == "late\n"
        assert broker.terminate()[0] == 0


def test_task_waits_for_one_whose_transaction_ends_later(
    tmp_path: Path, url: str, connection: _Connection
) -> None:
    with broker_of(tmp_path, url), InternalClient(state=tmp_path / ".taskyard") as client:
        submit(connection, "'true', name => 'x', after => array['later']")
        await_counts(url, OutboxCounts())
        assert "later" in client.why("x")
        submit(connection, "'true', name => 'later'")
        await_counts(url, OutboxCounts())
        assert client.show("x")["after"] == ["later"]
        with Worker(tmp_path):
            client.future("x").result(PATIENCE_SECONDS)


def test_refused_tasks_delay_no_others_and_stay(
    tmp_path: Path, url: str, connection: _Connection
) -> None:
    with broker_of(tmp_path, url) as broker, InternalClient(state=tmp_path / ".taskyard") as client:
        client.submit(["true"], name="taken", campaign="c")
        submit(connection, "'false', name => 'taken', campaign => 'c'")
        submit(connection, """'true', name => 'bad', options => '{"retries": "many"}'""")
        submit(connection, "'true', name => 'twice'")
        submit(connection, "'true', name => 'twice'")
        await_counts(url, OutboxCounts(0, 2))
        assert {view["name"] for view in client.tasks()} == {"taken", "twice"}
        until(lambda: "outbox: 2 refused (see" in run_here(tmp_path, "status")[1], "the count")
        tasks = outbox_tasks(tmp_path, url)
        assert [(one["name"], one["state"], one["code"]) for one in tasks] == [
            ("taken", "refused", "conflict"),
            ("bad", "refused", "invalid-task"),
        ]
        numbers = {one["name"]: str(one["id"]) for one in tasks}
        assert "taken" in run_here(tmp_path, "store", "init", "--outbox", url)[1]
        # The user decides.
        changed = run_here(
            tmp_path,
            "store",
            "init",
            "--outbox",
            url,
            "--drop",
            numbers["bad"],
            "--retry",
            numbers["taken"],
        )
        assert changed == (0, "1 task retried, 1 dropped\n", "")
        wrong = run_here(tmp_path, "store", "init", "--outbox", url, "--drop", numbers["bad"])
        assert (wrong[0], wrong[2]) == (2, f"taskyard: outbox: no refused task {numbers['bad']}\n")
        await_counts(url, OutboxCounts(0, 1))
        code, _, errors = broker.terminate()
    assert code == 0
    found = re.findall(r"outbox: row \d+, task (\S+): refused: (\S+ \S+)", errors)
    assert sorted(found) == [
        ("bad", '"retries" must'),
        ("c/taken", "task c/taken"),
        ("c/taken", "task c/taken"),
    ]


@pytest.mark.parametrize("end", ["", "\\012"])
def test_row_that_names_unknown_bytes_is_refused_and_keeps_those_it_names(
    tmp_path: Path, url: str, connection: _Connection, end: str
) -> None:
    missing = name_of(b"nowhere")
    with broker_of(tmp_path, url) as broker, InternalClient(state=tmp_path / ".taskyard") as client:
        kept = ValueAccess(broker.endpoint).put(memoryview(bytes(100_000)))
        payload = f'{{"pickle":1,"values":["{kept}","{missing}"]}}'
        submit(connection, f"payload => '{payload}{end}'::bytea, name => 'lacks'")
        submit(connection, "'true', name => 'other'")
        await_counts(url, OutboxCounts(0, 1))
        assert {view["name"] for view in client.tasks()} == {"other"}
        (refused,) = outbox_tasks(tmp_path, url)
        assert (refused["name"], refused["code"]) == ("lacks", "bytes-unknown")
        assert short_name(missing) in refused["reason"]
        assert short_name(kept) not in refused["reason"]
        assert broker.terminate()[0] == 0
    file = BlobFiles(tmp_path / "files").path(kept)
    os.utime(file, (0, 0))
    with broker_of(tmp_path, url):
        until(lambda: file.stat().st_atime > 0, "bytes of a refused row in use")


def outbox_tasks(tmp_path: Path, url: str) -> list[dict[str, Any]]:
    code, listed, _ = run_here(tmp_path, "store", "init", "--outbox", url, "--json")
    assert code == 0
    found: list[dict[str, Any]] = json.loads(listed)["tasks"]
    return found


def test_sqlite_has_no_outbox(tmp_path: Path) -> None:
    code, _, errors = run_here(tmp_path, "store", "init", "--outbox")
    assert (code, "SQLite has no outbox" in errors) == (2, True)


def scaled(value: list[float], factor: float = 2.0) -> list[float]:
    return [one * factor for one in value]


def test_functions_of_an_outbox_return_values(tmp_path: Path, url: str) -> None:
    with (
        broker_of(tmp_path, url),
        Worker(tmp_path, "--allow-pickle"),
        InternalClient(state=tmp_path / ".taskyard") as client,
    ):
        client.submit(["true"], name="ready").result(PATIENCE_SECONDS)
        with psycopg.connect(url) as own:
            box = taskyard.Outbox(own)
            first = box.submit(lambda: [1.5] * 100_000, name="first")
            second = box.submit(scaled, taskyard.result(first), factor=3.0, campaign="c")
            box.submit(lambda: 1 / 0, name="undone")
            own.rollback()
            first = box.submit(lambda: [1.5] * 100_000, name="first")
            second = box.submit(scaled, taskyard.result(first), factor=3.0, campaign="c")
            others = box.map(lambda value: value**2, [2, 3])
        await_counts(url, OutboxCounts())
        until(lambda: client.show(second)["state"] == "done", "the last call is done")
        assert client.result(second) == [4.5] * 100_000
        assert [one.result(PATIENCE_SECONDS) for one in client.futures(others)] == [4, 9]
        assert tasks_total(client) == 5


def tasks_total(client: InternalClient) -> int:
    return sum(client.status()["counts"].values())


def test_store_with_an_outbox_is_not_moved_to_sqlite(
    tmp_path: Path, url: str, connection: _Connection
) -> None:
    submit(connection, "'true'")
    code, _, errors = run_here(tmp_path, "store", "move", url, "new")
    assert (code, "its outbox is not empty" in errors) == (2, True)
    await_counts(url, OutboxCounts(1))


_REMOVALS = (
    "FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
    "AND datname = current_database() AND query LIKE '%DELETE FROM taskyard.outbox%'"
)
_REMOVAL_WAITS = f"SELECT EXISTS (SELECT {_REMOVALS})"
_END_REMOVAL = f"SELECT pg_terminate_backend(pid) {_REMOVALS}"
_ARE_ARCHIVED = (
    "SELECT count(*) = 2 FROM taskyard.ended WHERE name IN ('c/done'::bytea, 'cancelled'::bytea)"
)


def is_true(connection: _Connection, query: str) -> bool:
    return connection.execute(query.encode()).fetchall() == [(True,)]


def test_broker_killed_before_it_removes_rows_repeats_nothing(
    tmp_path: Path, url: str, connection: _Connection
) -> None:
    """The removal waits for a lock, and the tasks end meanwhile in each way."""
    state = tmp_path / ".taskyard"
    submit(connection, "'echo done', name => 'done', campaign => 'c'")
    submit(connection, "'false', name => 'failed'")
    submit(connection, "'true', name => 'cancelled', due => now() + interval '1 hour'")
    submit(connection, "'sleep 3600', name => 'leased', after => array['c/done']")
    names = ["c/done", "failed", "cancelled", "leased"]

    def states(client: InternalClient) -> list[tuple[str, int]]:
        views = client.existing(names)
        return [(views[name]["state"], views[name]["attempt"]) for name in names if name in views]

    expected = [("done", 1), ("failed", 1), ("cancelled", 0), ("leased", 1)]
    options = ("--compact-after-rows", "3")
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM taskyard.outbox FOR UPDATE")
        broker = broker_of(tmp_path, url, *options)
        with broker, Worker(tmp_path, "--slots", "2"), InternalClient(state=state) as client:
            until(lambda: states(client), "the tasks")
            client.cancel(["cancelled"])
            until(lambda: states(client) == expected, "their ends")
            until(lambda: is_true(connection, _REMOVAL_WAITS), "the removal")
            while not is_true(connection, _ARE_ARCHIVED):  # rows lead to a compaction
                client.submit(["true"]).result(PATIENCE_SECONDS)
            broker.kill()
            assert is_true(connection, _END_REMOVAL)  # the server would still do it
            until(lambda: not is_true(connection, _REMOVAL_WAITS), "its end")
            other.rollback()
            await_counts(url, OutboxCounts(4))
            with broker_of(tmp_path, url):
                await_counts(url, OutboxCounts())
                assert states(client) == expected


class Writer(threading.Thread):
    """Submits tasks in transactions of 1 to 10, of which every third is rolled back."""

    def __init__(self, url: str, number: int, tasks: int) -> None:
        super().__init__()
        self.url, self.number, self.tasks = url, number, tasks
        self.committed: list[str] = []

    def run(self) -> None:
        random = Random(self.number)
        count = itertools.count()
        with psycopg.connect(self.url) as own:
            box = taskyard.Outbox(own)
            left = self.tasks
            for transaction in itertools.count():
                names = [
                    f"{self.number}.{next(count)}" for _ in range(min(left, random.randint(1, 10)))
                ]
                if not names:
                    return
                for name in names:
                    box.submit(["sh", "-c", 'echo "$0" >> marks', name], name=name, campaign="c")
                left -= len(names)
                if transaction % 3:
                    own.commit()
                    self.committed += names
                else:
                    own.rollback()
                time.sleep(random.random() / 10)  # there are rows in each term


@pytest.mark.parametrize(
    ("tasks", "kills"), [(120, 2), pytest.param(10_000, 10, marks=pytest.mark.whole)]
)
def test_killed_brokers_run_each_committed_task_once(
    tmp_path: Path, url: str, tasks: int, kills: int
) -> None:
    (tmp_path / "taskyard.toml").write_text('[lease]\nstore = "1s"\n')
    writers = [Writer(url, number, tasks // 4) for number in range(4)]
    with ExitStack() as stack:
        broker = stack.enter_context(broker_of(tmp_path, url))
        stack.enter_context(Worker(tmp_path, "--slots", "4"))
        for writer in writers:
            writer.start()
        random = Random(1)
        for _ in range(kills):
            await_progress(tmp_path)
            time.sleep(random.random() / 10)
            broker.kill()
            broker = stack.enter_context(broker_of(tmp_path, url))
        for writer in writers:
            writer.join()
        committed = sorted(name for writer in writers for name in writer.committed)
        await_counts(url, OutboxCounts())
        until(lambda: run_marks(tmp_path) >= len(committed), "the rest")
        with InternalClient(state=tmp_path / ".taskyard") as client:
            client.wait_campaign("c", timeout=PATIENCE_SECONDS)
            assert client.counts(campaign="c")["done"] == tasks_total(client) == len(committed)
    assert sorted((tmp_path / "marks").read_text().splitlines()) == committed
    assert len(committed) < tasks


def await_progress(tmp_path: Path) -> None:
    before = run_marks(tmp_path)
    until(lambda: run_marks(tmp_path) > before, "progress")


def run_marks(tmp_path: Path) -> int:
    marks = tmp_path / "marks"
    return len(marks.read_bytes().splitlines()) if marks.exists() else 0
