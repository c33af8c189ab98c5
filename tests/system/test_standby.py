"""A pair of brokers on PostgreSQL: the standby follows, and takes over when the leader ends."""

from __future__ import annotations

import re
import signal
import socket
from contextlib import closing
from http import HTTPStatus
from socket import gethostname
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from taskyard.client.internal import InternalClient
from taskyard.journal.archive import Archive
from tests.kit.postgres import Cluster
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, Worker, run_here, until

if TYPE_CHECKING:
    from pathlib import Path

#: Short, because each takeover after a kill waits for it.
LEASE_SECONDS = 1


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


class Machine:
    """A state directory of its own, and the files that both machines share."""

    def __init__(self, tmp_path: Path, name: str, url: str) -> None:
        self.directory = tmp_path / name
        self.directory.mkdir()
        (self.directory / "taskyard.toml").write_text(
            f'[lease]\nstore = "{LEASE_SECONDS}s"\n[blobs]\ndirectory = "{tmp_path}/files"\n'
        )
        self.state = self.directory / ".taskyard"
        self.options = ("--standby", "--store", url)

    def leader(self, *more: str) -> Broker:
        """Start a broker that finds the journal free."""
        return Broker(self.directory, *self.options, *more)

    def standby(self, *more: str) -> Running:
        """Start a broker, and wait until it has all rows of the leader."""
        running = Running(self.directory, "broker", "--until-eof", *self.options, *more)
        line = running.line()
        assert line.startswith("standby: following epoch "), (line, running.end())
        return running


def leads(running: Running) -> None:
    """Wait until a standby has taken over."""
    line = running.line()
    assert line.startswith("listening native "), (line, running.end())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_standby_takes_over(tmp_path: Path, url: str, number: signal.Signals) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    with first.leader() as leader, second.standby() as standby:
        with InternalClient(state=first.state) as client, Worker(first.directory):
            for place in range(5):
                client.submit(["echo", str(place)], name=f"t{place}").result(PATIENCE_SECONDS)
            client.submit(["true"], name="waits", service="none")
        leader.send(number)
        leads(standby)
        with InternalClient(state=second.state) as client:
            assert client.status()["counts"] == {
                **dict.fromkeys(("blocked", "delayed", "leased", "failed", "cancelled"), 0),
                "ready": 1,
                "done": 5,
            }
            assert [client.result(f"t{place}") for place in range(5)] == [
                f"{place}\n" for place in range(5)
            ]
            with Worker(second.directory):
                assert client.submit(["echo", "more"]).result(PATIENCE_SECONDS) == "more\n"
        if number == signal.SIGSTOP:
            leader.send(signal.SIGCONT)
            assert leader.line().startswith("standby: following epoch 2 ")
            standby.kill()
            leads(leader)
            with InternalClient(state=first.state) as client:
                assert client.result("t4") == "4\n"
            code, _, errors = leader.terminate()
            assert (code, "answers nothing more" in errors) == (0, True)
        else:
            assert standby.terminate()[0] == 0


def test_leader_comes_back_when_its_database_does(tmp_path: Path) -> None:
    """The database is away for longer than the lease."""
    with closing(Cluster()) as own:
        machine = Machine(tmp_path, "one", own.database())
        with machine.leader() as leader:
            with InternalClient(state=machine.state) as client:
                client.submit(["true"], name="waits", service="none")
            own.stop()
            for text in ("following from now on", "trying again until the database is there"):
                while text not in (line := leader.error_line()):
                    assert line, leader.end()
            own.start()
            leads(leader)
            with InternalClient(state=machine.state) as client:
                assert client.status()["counts"]["ready"] == 1
            assert leader.terminate()[0] == 0


def test_standby_has_tasks_that_a_compaction_archived(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    names = [f"t{number}" for number in range(30)]
    with first.leader("--compact-after-rows", "10") as leader, second.standby() as standby:
        with InternalClient(state=first.state) as client, Worker(first.directory):
            for name in names:
                client.submit(["echo", name], name=name).result(PATIENCE_SECONDS)
            until(lambda: Archive(second.state).covered(), "the index of a compaction")
            client.submit(["echo", "more"], name="more").result(PATIENCE_SECONDS)
        leader.kill()
        leads(standby)
        with InternalClient(state=second.state) as client:
            assert client.status()["counts"]["done"] == len(names) + 1
            assert [client.result(name) for name in (*names, "more")] == [
                f"{name}\n" for name in (*names, "more")
            ]
            client.submit(["echo", names[0]], name=names[0])  # the same task, which is done
            assert client.status()["counts"]["done"] == len(names) + 1


def test_standby_stops_at_once_and_reloads(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    with first.leader():
        with second.standby() as standby:
            standby.send(signal.SIGHUP)
            assert "settings reloaded" in standby.error_line()
            code, _, errors = standby.terminate()
            assert (code, errors) == (0, "")
        with second.standby() as standby:
            assert standby.send(signal.SIGINT).end()[0] in (0, 130)
        with second.standby() as standby:
            standby.hang_up()
            assert standby.end()[0] == 0


def test_port_of_a_standby_is_reserved_and_refuses_peers(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    listen = ("--listen", f"dwork=tcp://127.0.0.1:{port}")
    with first.leader() as leader, second.standby(*listen) as standby:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        leader.kill()
        leads(standby)
        assert standby.line() == f"listening dwork tcp://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_status_shows_leader_and_standby(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    listen = ("--listen", "dwork=tcp://127.0.0.1:0")
    with first.leader(*listen) as leader, second.standby(*listen) as standby:
        with InternalClient(state=first.state) as client:
            client.submit(["true"], name="a")

            def pair() -> Any:
                return client.status()["health"]["leader"]

            until(lambda: [one["rows_behind"] for one in pair()["standbys"]] == [0], "the standby")
            found = pair()
        assert (found["epoch"], found["lease"]) == (1, LEASE_SECONDS)
        assert found["endpoints"] == [leader.endpoints[1]]
        assert found["standbys"][0]["seconds_behind"] < PATIENCE_SECONDS
        code, out, _ = run_here(first.directory, "status")
        host = gethostname()
        assert f"leader {host} {leader.endpoints[1]}: epoch 1\n" in out
        assert re.search(rf"standby {host} tcp://127.0.0.1:\d+: 0 rows and .* behind\n", out)
        for command in ("status", "submit -- true"):
            code, _, errors = run_here(second.directory, *command.split())
            assert code == 3
            assert f"a standby that follows the broker of epoch 1 on {host} at" in errors
        standby.terminate()
        code, _, errors = run_here(second.directory, "submit", "--", "true")
        assert (code, "standby" in errors) == (3, False)
        with InternalClient(state=first.state) as client:
            until(lambda: not client.status()["health"]["leader"]["standbys"], "its end")


def test_page_of_a_standby_names_the_leader_until_it_leads(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    with (
        first.leader() as leader,
        second.standby() as standby,
        Running(second.directory, "web", "--page", "127.0.0.1:0") as page,
    ):
        address = page.line().removeprefix("page ")
        browser = build_opener(HTTPCookieProcessor())

        def shown() -> tuple[int, str]:
            try:
                with browser.open(address) as reply:
                    return reply.status, reply.read().decode()
            except HTTPError as error:
                return error.code, error.read().decode()

        code, text = shown()
        assert code == HTTPStatus.SERVICE_UNAVAILABLE
        assert "the broker here is a standby that follows the broker of epoch 1" in text
        assert "No broker is running" not in text
        leader.kill()
        leads(standby)
        until(lambda: shown()[0] == HTTPStatus.OK, "the page of the new leader")
        assert "Traceback" not in page.terminate()[2]


def test_failover_exchanges_both(tmp_path: Path, url: str) -> None:
    first, second = (Machine(tmp_path, name, url) for name in ("first", "second"))
    with first.leader() as leader:
        code, _, errors = run_here(first.directory, "failover")
        assert (code, "no standby has reported" in errors) == (2, True)
        with second.standby() as standby:
            with InternalClient(state=first.state) as client:
                client.submit(["true"], name="a")
                until(lambda: client.status()["health"]["leader"]["standbys"], "the standby")
                assert client.failover() == 1
            leads(standby)
            assert leader.line().startswith("standby: following epoch 2 at row ")
            with InternalClient(state=second.state) as client:
                assert sum(client.status()["counts"].values()) == 1
                client.submit(["true"], name="b")
            standby.terminate()
        leads(leader)
        code, out, _ = run_here(first.directory, "failover", "--force")
        assert (code, out) == (0, "epoch 3 ends, the standby takes over\n")
        leads(leader)
        with InternalClient(state=first.state) as client:
            assert sum(client.status()["counts"].values()) == 2
            assert client.status()["health"]["leader"]["epoch"] == 4


def test_standby_needs_a_store(tmp_path: Path) -> None:
    for options in ((), ("--in-memory",)):
        code, _, errors = run_here(tmp_path, "broker", "--standby", *options)
        assert code == 2
        assert "--standby: needs a store in PostgreSQL" in errors
