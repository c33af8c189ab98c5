"""A broker on PostgreSQL: nothing that it acknowledged ends with its machine."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from pair_demo.postgresql import ROLE
from taskyard.client.client import Client
from taskyard.errors import BytesMissing, Refused
from taskyard.journal import history, snapshot
from taskyard.pipeline.jobs import history as history_job
from taskyard.web.follower import EventFeed
from tests.kit.postgres import name_in
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, Worker, run, run_here, until

if TYPE_CHECKING:
    from tests.kit.postgres import Cluster

TASKS = 60

#: Longer than the part of an output that is in the journal.
LINES = 200_000


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


class Machine:
    """A state directory of its own."""

    def __init__(self, tmp_path: Path, name: str, url: str) -> None:
        self.directory = tmp_path / name
        self.directory.mkdir()
        self.state = self.directory / ".taskyard"
        self.options: tuple[str, ...] = ("--store", url)

    def share(self, files: Path) -> None:
        """Have output and values in a directory that all machines share."""
        (self.directory / "taskyard.toml").write_text(f'[blobs]\ndirectory = "{files}"\n')

    def broker(self, *more: str) -> Broker:
        return Broker(self.directory, *self.options, *more)

    def refused(self, *more: str, code: int = 2) -> str:
        """Start a broker that ends at once, and return the last line of its errors."""
        with Running(self.directory, "broker", *self.options, *more) as running:
            found, _, errors = running.end()
        assert found == code
        return errors.splitlines()[-1]


def with_documented_rights(url: str) -> str:
    """Return the URL of a user who has the rights that the docs give to a broker."""
    page = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text()
    rights = re.findall(r"^ *(GRANT .* TO) broker;$", page, re.MULTILINE)
    assert len(rights) == 2
    name = f"broker_{name_in(url)}"
    with psycopg.connect(url) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        for right in rights:
            connection.execute(f"{right} {name}")
    return url.replace(f"{ROLE}@", f"{name}@")


def anchor_moved(url: str) -> bool:
    """Return whether a compaction has published its files and trimmed rows."""
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT (SELECT min(sequence) FROM taskyard.journal) > 1, "
            "(SELECT count(*) FROM taskyard.blobs WHERE kind = 'file') > 0"
        )
        return found.fetchall() == [(True, True)]


def claimed_files(url: str) -> set[str]:
    """Return the files that compactions have published. A killed broker may have more."""
    with psycopg.connect(url) as connection:
        query = "SELECT name FROM taskyard.blobs WHERE kind = 'file'"
        return {name.decode() for (name,) in connection.execute(query)}


def files_in(state: Path, folder: str) -> set[str]:
    return {path.relative_to(state).as_posix() for path in (state / folder).iterdir()}


def tasks_total(client: Client) -> int:
    return sum(client.status()["counts"].values())


def events_of(state: Path) -> int:
    return sum(batch.events.rows for batch in EventFeed(state).read())


@pytest.mark.parametrize("shares", [False, True])
def test_another_machine_continues_with_everything(
    tmp_path: Path, url: str, *, shares: bool
) -> None:
    own = with_documented_rights(url)
    first, second = (Machine(tmp_path, name, own) for name in ("first", "second"))
    for machine in (first, second) if shares else ():
        machine.share(tmp_path / "files")
    with (
        first.broker("--compact-after-rows", "20") as broker,
        Worker(first.directory, "--allow-pickle"),
    ):
        with Client(state=first.state) as client:
            for number in range(TASKS):
                client.submit(["echo", str(number)], name=f"t{number}").result(PATIENCE_SECONDS)
            expected = client.submit(["seq", str(LINES)], name="long").result(PATIENCE_SECONDS)
            client.submit(bytes, 2 << 20, name="value").result(PATIENCE_SECONDS)
            client.submit(len, bytes(3 << 20), name="argument", service="later")
        until(lambda: anchor_moved(url), "a compaction")
        events = events_of(first.state)
        broker.kill()
    shutil.rmtree(first.state)
    with second.broker(), Client(state=second.state) as client:
        assert tasks_total(client) == TASKS + 3
        assert client.result("value") == bytes(2 << 20)
        assert [client.result(f"t{number}") for number in range(TASKS)] == [
            f"{number}\n" for number in range(TASKS)
        ]
        assert client.result("long") == expected
        assert len(expected.splitlines()) == LINES
        until(lambda: events_of(second.state) >= events, "the history")
        with Worker(second.directory, "--allow-pickle", "--service", "later"):
            answer = client.future("argument").result(PATIENCE_SECONDS)
            assert pickle.loads(answer) == 3 << 20  # noqa: S301  # our own
    published = claimed_files(url)
    assert files_in(second.state, history.FOLDER) == {
        name for name in published if name.startswith(history.FOLDER)
    }
    assert files_in(second.state, snapshot.FOLDER) < published


def test_store_in_use_is_an_exit_status_of_its_own(tmp_path: Path, url: str) -> None:
    """A unit starts a broker again that found the store in use, also one that `up` started."""
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    (second.directory / "taskyard.toml").write_text(f'[broker]\nstore = "{url}"\n')
    (second.directory / "tasks").write_text("true\n")
    with first.broker():
        assert "in use by process" in first.refused()
        for command in ("up", "--workers", "1", "--page", "none"), ("run", "tasks"):
            code, _, errors = run(second.directory, *command)
            assert (code, second.state.exists()) == (7, False), errors
            assert "the store is in use by a broker, in epoch 1" in errors


def test_stopped_leader_answers_nothing_after_a_takeover(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    with first.broker() as broker:
        with Client(state=first.state) as client:
            client.submit(["true"], name="before")
        assert "in use by a broker, in epoch 1" in second.refused(code=7)
        broker.send(signal.SIGSTOP)
        with second.broker(), Client(state=second.state) as client:
            client.submit(["true"], name="after")
            broker.send(signal.SIGCONT)
            code, _, errors = broker.end()
            assert code == 6
            assert "answers nothing more" in errors
            assert tasks_total(client) == 2


def test_lease_is_a_setting(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, "one", url)
    (machine.directory / "taskyard.toml").write_text('[lease]\nstore = "1.5s"\n')
    with machine.broker() as broker:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT lease_ns FROM taskyard.leader").fetchall()
        assert row == [(1_500_000_000,)]
        broker.send(signal.SIGSTOP)
        with machine.broker("--state", "other"):
            broker.send(signal.SIGCONT)
            code, _, errors = broker.end()
    assert code == 6
    assert "answers nothing more" in errors, errors


def test_broker_that_stops_is_replaced_at_once(tmp_path: Path, url: str) -> None:
    for name in ("first", "second"):
        machine = Machine(tmp_path, name, url)
        with machine.broker() as broker:
            code, _, errors = broker.terminate()
        assert (code, errors) == (0, "")


def test_killed_broker_continues_at_once_in_its_own_state_directory(
    tmp_path: Path, url: str
) -> None:
    machine = Machine(tmp_path, "one", url)
    (machine.directory / "taskyard.toml").write_text('[lease]\nstore = "1h"\n')
    with machine.broker() as broker:
        broker.kill()
    with machine.broker() as broker:
        code, _, errors = broker.terminate()
    assert (code, errors) == (0, "")


def test_restarted_server_is_survived_within_the_lease(tmp_path: Path) -> None:
    from tests.kit.postgres import Cluster  # noqa: PLC0415  # as in conftest

    with closing(Cluster()) as own:
        machine = Machine(tmp_path, "one", own.database())
        with machine.broker() as broker, Client(state=machine.state) as client:
            client.submit(["true"], name="before")
            own.stop(signal.SIGQUIT)
            own.start()
            client.submit(["true"], name="after")
            assert tasks_total(client) == 2
            own.stop()
            code, _, errors = broker.end()
        assert code == 6
        assert "has ended without a renewal, so this broker answers nothing more" in errors


def test_state_is_read_without_a_broker(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, "one", url)
    with machine.broker("--compact-after-rows", "20"), Worker(machine.directory):
        with Client(state=machine.state) as client:
            for number in range(TASKS):
                client.submit(["echo", str(number)], name=f"t{number}").result(PATIENCE_SECONDS)
            client.submit(["seq", str(LINES)], name="long").result(PATIENCE_SECONDS)
            client.submit(["true"], name="waiting", service="later")
        until(lambda: anchor_moved(url), "a compaction")
        assert not history_job.export(machine.state)
    assert history_job.export(machine.state)

    def run(*command: str, code: int = 0) -> str:
        found, text, errors = run_here(machine.directory, *command)
        assert found == code, errors
        return text + errors

    assert "journal in" not in run("status")
    assert "waiting" in run("list")
    assert "later" in run("why", "waiting")
    assert "7\n" in run("results", "t7")
    assert f"\n{LINES}\n" in run("log", "long")
    assert "sound" in run("journal", "check", "--deep")
    assert "trimmed" in run("journal", "compact")
    assert "sound" in run("journal", "check", "--deep")
    assert "7\n" in run("results", "t7")
    assert f"its journal is in {url}" in run("broker", code=2)
    with psycopg.connect(url) as connection:
        # As by a statement over a lost connection that is executed very late.
        connection.execute("INSERT INTO taskyard.journal VALUES (1, 1, 1, 1, 'x', 'x')")
        connection.commit()
        assert "sound" in run("journal", "check")
        connection.execute("UPDATE taskyard.meta SET value = 'x' WHERE key = 'anchor'")
    assert "damaged" in run("journal", "check", code=6)


def test_state_moves_to_a_database_and_back(tmp_path: Path, url: str) -> None:
    machine, content = Machine(tmp_path, "one", url), bytes(2 << 20)
    options = ("--compact-after-rows", "10")

    def check(*broker_options: str) -> int:
        """Read everything with a new broker, and return the number of events."""
        with Broker(machine.directory, *broker_options), Client(state=machine.state) as client:
            assert [client.result(f"t{number}") for number in range(20)] == [
                f"{number}\n" for number in range(20)
            ]
            assert len(client.result("long").splitlines()) == LINES
            assert client.result("value") == content
            with Worker(machine.directory):
                assert client.submit(["echo", "more"]).result(PATIENCE_SECONDS) == "more\n"
            return events_of(machine.state)

    with Broker(machine.directory, *options), Worker(machine.directory, "--allow-pickle"):
        with Client(state=machine.state) as client:
            for number in range(20):
                client.submit(["echo", str(number)], name=f"t{number}").result(PATIENCE_SECONDS)
            client.submit(["seq", str(LINES)], name="long").result(PATIENCE_SECONDS)
            client.submit(bytes, 2 << 20, name="value").result(PATIENCE_SECONDS)
        until(lambda: bool(snapshot.sequences(machine.state)), "a compaction")
        code, _, errors = run_here(machine.directory, "store", "move", ".taskyard", url)
        assert (code, "in use by process" in errors) == (2, True)
        events = events_of(machine.state)
    code, out, errors = run_here(machine.directory, "store", "move", ".taskyard", url)
    assert (code, errors) == (0, "")
    assert "has the journal up to row" in out
    assert not (machine.state / "blobs").exists()
    moved = check(*machine.options)
    assert moved > events
    code, out, errors = run_here(machine.directory, "store", "move", url, ".taskyard")
    assert (code, errors) == (0, "")
    assert check() > moved


def test_keys_outlive_the_machine(tmp_path: Path, url: str) -> None:
    """One key file fits each broker, and is refused by each one after it was revoked."""
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    secure = ("--secure", "--listen", "dwork=tcp://127.0.0.1:0")
    (first.directory / "taskyard.toml").write_text(f'[broker]\nstore = "{url}"\n')
    for name in ("one", "two"):
        code, _, errors = run_here(first.directory, "keys", "new", name, "--role", "admin")
        assert (code, errors) == (0, "")
    files = [first.directory / f"{name}.key" for name in ("one", "two")]
    with first.broker(*secure) as broker:
        with Client(broker.endpoints[1], key=files[0]) as client:
            client.submit(["true"], name="a")
        broker.kill()
    shutil.rmtree(first.state)
    with (
        second.broker(*secure) as broker,
        Client(broker.endpoints[1], key=files[0]) as one,
        Client(broker.endpoints[1], key=files[1]) as two,
    ):
        assert tasks_total(one) == tasks_total(two) == 1
        code, _, errors = run_here(first.directory, "keys", "revoke", "one")
        assert (code, errors) == (0, "")
        code, out, _ = run_here(second.directory, "keys", "list", "--json")
        assert [key["revoked"] is None for key in json.loads(out)["keys"]] == [False, True]
        until(lambda: is_refused(one), "the broker to refuse the key")
        assert tasks_total(two) == 1


def is_refused(client: Client) -> bool:
    try:
        client.status()
    except Refused as refused:
        return "was revoked" in str(refused)
    return False


def test_clean_removes_from_the_database(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, "one", url)
    with machine.broker(), Worker(machine.directory), Client(state=machine.state) as client:
        client.submit(["seq", str(LINES)], name="long", campaign="a").result(PATIENCE_SECONDS)
        client.submit(["seq", "2", str(LINES)], name="long", campaign="b").result(PATIENCE_SECONDS)
        with psycopg.connect(url) as connection:  # they are not in use
            connection.execute("UPDATE taskyard.blobs SET used_ns = 0")
        code, out, errors = run_here(machine.directory, "clean", "--campaign", "a")
        assert (code, out, errors) == (0, "removed 1 file of 1 task, 1.2 MiB\n", "")
        assert len(client.result("b/long")) > LINES
        with pytest.raises(BytesMissing, match="bytes of result are missing"):
            client.result("a/long")


def test_move_needs_a_url_and_a_directory(tmp_path: Path, url: str) -> None:
    found = {
        (".", "elsewhere"): "must be a URL",
        (url, url): "must be a URL",
        (".", url): "has no journal in SQLite",
        ("missing", url): "does not exist",
    }
    for words, text in found.items():
        code, _, errors = run_here(tmp_path, "store", "move", *words)
        assert code == 2
        assert text in errors


def test_files_of_another_journal_are_refused_and_kept(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, "one", url)
    kept = machine.state / history.FOLDER / "000000000001-000000000022.rows"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"of a journal in SQLite")
    assert "has files of a journal in SQLite" in machine.refused()
    assert kept.exists()


def test_store_that_can_not_be_used_is_refused(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, "one", url)
    found = {
        ("--store", "postgresql://me:secret@localhost/x"): "--store: must not have a password",
        ("--store", "mysql://localhost"): "--store: must be sqlite or postgresql://",
        ("--store", "postgresql://test@127.0.0.1:1/x"): "connection to server",
    }
    for options, text in found.items():
        error = machine.refused(*options)
        assert text in error
        assert "secret" not in error
    plain = Machine(tmp_path, "plain", "sqlite")
    assert "--standby: needs a store in PostgreSQL" in plain.refused("--standby")
    error = machine.refused("--in-memory")
    assert "--in-memory: excludes a store in PostgreSQL" in error
