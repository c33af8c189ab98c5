"""PostgreSQL itself fails under load: nothing that a broker acknowledged is lost or doubled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg
import pytest

from taskyard.client.internal import InternalClient
from taskyard.core.limits import BLOB_BYTES_MIN
from taskyard.core.model import Submission, Terms
from taskyard.errors import TaskyardError
from taskyard.journal import chain
from taskyard.journal.chain import Row
from taskyard.journal.recovery import records_of
from taskyard.postgresql import database
from tests.kit.postgres import Cluster, Standby
from tests.kit.processes import PATIENCE_SECONDS, Broker, is_alive, until
from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tasks that are acknowledged between two faults.
TASKS = 20

#: A server that recovers on a busy machine takes less than this.
LEASE = "30s"

#: The disk of a small server: a cluster takes about 40 MB, and 40 MB of log are kept.
DISK_BYTES = 60 * 1024 * 1024
PAYLOAD_BYTES = BLOB_BYTES_MIN - 1  # in records

pytestmark = pytest.mark.slow


class Load(threading.Thread):
    """Submits tasks one after the other, and notes which were acknowledged."""

    def __init__(
        self, endpoint: str, payload: bytes = b"", seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Give up when the broker is silent for some seconds."""
        super().__init__(daemon=True)
        self._seconds = seconds
        self._endpoint = endpoint
        self._payload = payload
        self._stopping = threading.Event()
        #: Names in the order of their acknowledgements, and the one that is under way.
        self.acknowledged: list[bytes] = []
        self.pending = b""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> None:
        client = InternalClient(self._endpoint, timeout=self._seconds, report=lambda _line: None)
        with client, suppress(TaskyardError):
            while not self._stopping.is_set():
                self.pending = b"t%d" % len(self.acknowledged)
                terms = [Terms(service=b"load")]
                client.create(Submission([self.pending], [self._payload], terms))
                self.acknowledged.append(self.pending)

    def go_on(self) -> None:
        """Wait until more tasks were acknowledged."""
        enough = len(self.acknowledged) + TASKS
        until(lambda: len(self.acknowledged) >= enough, "tasks are acknowledged")

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class Machine:
    """A state directory, and the command of a broker."""

    def __init__(self, tmp_path: Path, name: str, url: str, lease: str = LEASE) -> None:
        self.directory = tmp_path / name
        self.directory.mkdir()
        (self.directory / "taskyard.toml").write_text(
            f'[lease]\nstore = "{lease}"\n[blobs]\ndirectory = "{tmp_path}/files"\n'
        )
        self._options = ("--store", url)

    def broker(self) -> Broker:
        return Broker(self.directory, *self._options)


def check(url: str, load: Load) -> int:
    """Verify the chain and compare the journal with what was acknowledged. Return the epoch.

    The one task that was under way may be there, too.
    """
    names: list[bytes] = []
    with database.connect(url) as connection:
        _, anchor = database.read_anchor(connection)
        found = connection.execute(
            "SELECT sequence, record_first, record_last, chain, body, epoch "
            "FROM taskyard.journal ORDER BY sequence",
            binary=True,
        ).fetchall()
    epochs: list[int] = [row[-1] for row in found]
    for row in chain.verify((Row(*row[:-1]) for row in found), anchor):
        for record in records_of(row, row.record_first - 1):
            names += getattr(getattr(record, "submission", None), "names", [])
    assert [name for name in names if name != load.pending] == [
        name for name in load.acknowledged if name != load.pending
    ]
    assert len(set(names)) == len(names)
    assert epochs == sorted(epochs)
    return epochs[-1]


def sessions(cluster: Cluster) -> list[int]:
    """Return the server's processes for the broker's sessions. It may still recover."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'taskyard'"

    def found() -> list[int]:
        with suppress(psycopg.OperationalError), psycopg.connect(cluster.url()) as connection:
            return [pid for (pid,) in connection.execute(query).fetchall()]
        return []

    until(found, "the broker has sessions")
    return found()


def kill_session(cluster: Cluster) -> None:
    """Kill the process of a session. The server ends all others then, and recovers."""
    os.kill(sessions(cluster)[0], signal.SIGKILL)


def kill_server(cluster: Cluster) -> None:
    """Kill the server's first process, and start it again when the others have noticed."""
    children = sessions(cluster)
    cluster.stop(signal.SIGKILL)
    until(lambda: not any(map(is_alive, children)), "the sessions have ended")
    cluster.start()


def restart(cluster: Cluster) -> None:
    cluster.stop()
    cluster.start()


def test_killed_server_loses_nothing(tmp_path: Path) -> None:
    with closing(Cluster()) as own:
        url = own.database()
        with Machine(tmp_path, "one", url).broker() as broker, Load(broker.endpoint) as load:
            for fault in (kill_session, kill_server, restart, kill_session):
                load.go_on()
                fault(own)
            load.go_on()
            load.stop()
            assert broker.terminate()[0] == 0
        assert check(url, load) == 1


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a small disk where PostgreSQL's user can write."""
    need("mounts")
    with tempfile.TemporaryDirectory(prefix="taskyard-disk-", dir="/tmp") as place:
        Path(place).chmod(0o711)
        options = f"size={DISK_BYTES},mode=777"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
        subprocess.run(mount, check=True, capture_output=True)
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True)  # noqa: S607  # as root


def enlarge(disk: Path) -> None:
    subprocess.run(["mount", "-o", f"remount,size={4 * DISK_BYTES}", str(disk)], check=True)  # noqa: S607


def test_full_disk_of_the_log_stops_the_server_and_loses_nothing(tmp_path: Path) -> None:
    """The server can't even start. With room it does, and the broker goes on."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk())
        own = stack.enter_context(closing(Cluster(parent=disk)))
        url = own.database()
        broker = stack.enter_context(Machine(tmp_path, "one", url).broker())
        load = stack.enter_context(Load(broker.endpoint, os.urandom(PAYLOAD_BYTES)))
        until(lambda: not own.is_running(), "the server has ended")
        assert "No space left on device" in own.log.read_text()
        enlarge(disk)
        own.start()
        load.go_on()
        load.stop()
        assert broker.terminate()[0] == 0
        assert check(url, load) == 1


def test_full_disk_of_the_tables_ends_the_broker_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk() as disk, closing(Cluster()) as own:
        space = disk / "tables"
        space.mkdir()
        shutil.chown(space, own.data.owner(), own.data.group())
        own.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        url = own.database("TABLESPACE small")
        machine = Machine(tmp_path, "one", url, "1s")
        with machine.broker() as broker:
            load = Load(broker.endpoint, os.urandom(PAYLOAD_BYTES))
            load.start()
            code, _, errors = broker.end()
        assert code == 6
        assert "nothing more is acknowledged: the disk of the database is full" in errors
        enlarge(disk)
        with machine.broker():
            load.go_on()
            load.stop()
        assert check(url, load) == 2


def test_promoted_standby_has_everything_that_was_acknowledged(tmp_path: Path) -> None:
    """The primary is killed while a turn waits for the standby. The broker goes on."""
    with closing(Cluster()) as primary, closing(Standby(primary)) as standby:
        url = standby.url_of_both(primary.database())
        with Machine(tmp_path, "one", url).broker() as broker, Load(broker.endpoint) as load:
            load.go_on()
            with stopped(standby.receiver()):
                wait_for_a_turn(primary)
                primary.stop(signal.SIGKILL)
            standby.promote()
            load.go_on()
            load.stop()
            assert broker.terminate()[0] == 0
        assert check(url, load) == 1


def test_broker_that_slept_through_a_promotion_is_fenced(tmp_path: Path) -> None:
    with closing(Cluster()) as primary, closing(Standby(primary)) as standby:
        url = standby.url_of_both(primary.database())
        first, second = (Machine(tmp_path, name, url, "1s") for name in ("one", "two"))
        with first.broker() as broker:
            load = Load(broker.endpoint, seconds=1)
            load.start()
            load.go_on()
            with stopped(broker.pid):
                primary.stop(signal.SIGKILL)
                standby.promote()
                replacement = second.broker()
            with replacement:
                code, _, errors = broker.end()
                assert (code, "answers nothing more" in errors) == (6, True)
                load.stop()
                with InternalClient(replacement.endpoint) as client:
                    client.create(Submission([b"last"], [b""], [Terms()]))
                load.acknowledged.append(b"last")
        assert check(url, load) == 2


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for_a_turn(primary: Cluster) -> None:
    """Wait until an append waits for a standby."""
    query = (
        "SELECT FROM pg_stat_activity "
        "WHERE wait_event = 'SyncRep' AND query LIKE '%journal SELECT%'"
    )
    with psycopg.connect(primary.url(), autocommit=True) as connection:
        until(lambda: connection.execute(query).fetchall(), "a turn waits for the standby")
