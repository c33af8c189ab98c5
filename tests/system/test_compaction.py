"""A broker that is killed at every step of a compaction: nothing is lost or done twice."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from taskyard.client.internal import InternalClient
from taskyard.core.model import Submission, Terms
from taskyard.journal import compaction
from taskyard.journal.lock import StateLock
from taskyard.journal.sqlite import SqliteStore
from tests.journal.row_files import read_rows
from tests.kit.processes import run_here, until
from tests.system import killed_compaction
from tests.system.killed_compaction import STEPS_BESIDE, STEPS_WITHIN
from tests.system.kit import Broker
from tests.system.peers import Peer, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = "20"
BATCH = 20
#: Between two batches. This tests compactions, not load.
REST_SECONDS = 0.1
TERMS = Terms(service=b"load", campaign=b"load")
#: Compactions that finish while tasks run, after the last kill.
COMPLETED = 2


class Producer(Peer):
    """Submits batches of chains until it is stopped, and resubmits after a restart."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        #: Full names.
        self.acknowledged: list[bytes] = []

    def work(self) -> None:
        with InternalClient(self._endpoint) as client:
            while not self.stopping.wait(REST_SECONDS):
                first = len(self.acknowledged)
                names = [b"task-%d" % number for number in range(first, first + BATCH)]
                after: list[list[bytes]] = [[]] + [[name] for name in names[:-1]]
                client.create(Submission(names, [b"payload"], [TERMS], after=after))
                self.acknowledged += [b"load/" + name for name in names]


def killed_at(step: str) -> tuple[str, ...]:
    return (sys.executable, killed_compaction.__file__, step)


def test_broker_killed_at_every_step_of_a_compaction_loses_and_doubles_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with ExitStack() as stack:
        kills = [*STEPS_BESIDE, *STEPS_WITHIN]
        limit = ("--compact-after-rows", ROWS)
        broker = stack.enter_context(Broker(tmp_path, *limit, program=killed_at(kills[0])))
        producer = Producer(broker.endpoint)
        workers = [Worker(broker.endpoint, b"worker-%d" % index) for index in range(2)]
        for peer in (producer, *workers):
            peer.start()
        for step in [*kills[1:], ""]:
            assert broker.end()[0] == -signal.SIGKILL
            until(lambda: not any(map(is_running, children(tmp_path))), "no child left")
            broker = stack.enter_context(Broker(tmp_path, *limit, program=killed_at(step)))
        files = len(history(tmp_path))
        until(lambda: len(history(tmp_path)) >= files + COMPLETED, "some whole compactions")
        producer.finish()
        done = len(producer.acknowledged)
        until(lambda: counts(broker)["done"] == done, "all tasks done")
        look_back(broker, producer.acknowledged)
        for peer in workers:
            peer.finish()
        assert broker.terminate()[0] == 0
    assert run_here(tmp_path, "journal", "check", "--deep")[0] == 0
    tally(tmp_path / ".taskyard", producer.acknowledged)
    record_property("system compactions killed", len(kills))


def test_stopped_broker_leaves_no_process_beside_it(tmp_path: Path) -> None:
    with Broker(tmp_path, "--compact-after-rows", "1", program=killed_at("none")) as broker:
        submit(broker, b"a", b"b")
        until(lambda: submit(broker, b"c") or children(tmp_path), "a child")
        assert broker.terminate()[0] == 0
        assert not any(map(is_running, children(tmp_path)))
    assert run_here(tmp_path, "journal", "check")[0] == 0


def test_compact_of_a_running_broker_is_refused_with_the_reason(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        submit(broker, b"a")
        code, out, err = run_here(tmp_path, "journal", "compact")
        assert (code, out) == (2, "")
        assert "a running broker compacts its journal on its own" in err


def children(directory: Path) -> list[int]:
    try:
        return [*map(int, (directory / "children").read_text().split())]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def submit(broker: Broker, *names: bytes) -> int:
    """Submit tasks. Return the number of new ones."""
    with InternalClient(broker.endpoint) as client:
        return sum(client.create(Submission([one], [b"payload"], [TERMS])) for one in names)


def counts(broker: Broker) -> dict[str, int]:
    with InternalClient(broker.endpoint) as client:
        found: dict[str, int] = client.status()["counts"]
        return found


def look_back(broker: Broker, names: list[bytes]) -> None:
    """Check that old tasks are found by name and result, though few are in memory."""
    assert submit(broker, *(name.removeprefix(b"load/") for name in names[:BATCH])) == 0
    with InternalClient(broker.endpoint) as client:
        for name in names[:: len(names) // 50]:
            assert client.output(name.decode(), "result") == b"result of " + name
        assert sum(1 for _ in client.tasks()) < len(names)


def history(directory: Path) -> list[Path]:
    return [*(directory / ".taskyard" / "history").glob("*.rows")]


def tally(state: Path, names: list[bytes]) -> None:
    """Count the history and the journal."""
    with StateLock(state), closing(SqliteStore(state)) as store:
        compaction.compact(state, store)
    rows = [row for path in (state / "history").glob("*.rows") for row in read_rows(path, "events")]
    submitted = [row["task"] for row in rows if row["kind"] == b"submitted"]
    finished = [row["task"] for row in rows if row["kind"] == b"finished"]
    assert sorted(submitted) == sorted(finished) == sorted(names)
