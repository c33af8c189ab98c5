"""`./yard demo --pair`: two brokers of one journal in PostgreSQL, and the leader is killed.

The cluster, the brokers and the workers are processes of this machine, and end with the demo. A
client submits all the time, also while no broker leads. Then the journal is read from the database,
verified by its chain, and counted.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from pair_demo.postgresql import ThrowawayCluster, find_programs
from taskyard.client.internal import InternalClient
from taskyard.demo import tasks
from taskyard.demo.campaign import AuditCounts, Auditor, ProofLine
from taskyard.demo.cluster import LOGS, DemoProcess, end_processes, stop_processes
from taskyard.errors import ExitCode, TaskFailed, TaskyardError, TimedOut
from taskyard.journal.chain import Head
from taskyard.journal.recovery import records_of
from taskyard.postgresql import database, leader
from taskyard.postgresql.store import PostgresReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from taskyard.client.futures import Future
    from taskyard.demo.walkthrough import DemoReporter

NAME: Final = "pair"

_WORKERS: Final = ("worker-1", "worker-2")
_SLOTS: Final = 4

#: This part of the tasks is submitted at the beginning, all others in portions with a pause.
_FIRST_SHARE: Final = 0.5
_PORTIONS: Final = 20
_PAUSE_SECONDS: Final = 0.4

#: The leader is killed when this share of the tasks has settled.
KILLED_AT: Final = 0.2

_POLL_SECONDS: Final = 0.1

#: How often the processes are checked while no broker answers.
_ANSWER_SECONDS: Final = 1.0

#: Time limit of the campaign, even on a busy machine.
_SETTLED_SECONDS: Final = 240.0
_SETTLED_SECONDS_A_TASK: Final = 0.1

#: Time for a client to disconnect. Without a broker, nothing more is acknowledged.
_CLOSE_SECONDS: Final = 1.0

_SETTLED: Final = ("done", "failed", "cancelled")

_NEWEST: Final = (
    "SELECT sequence, record_last, chain FROM taskyard.journal ORDER BY sequence DESC LIMIT 1"
)
_EPOCHS: Final = "SELECT epoch, count(*) FROM taskyard.journal GROUP BY epoch ORDER BY epoch"


class Takeover(Struct, frozen=True):
    """How the leader was killed, and when the other broker answered."""

    status: int
    settled: int
    tasks: int
    #: The name of the new leader.
    leader: str
    epoch_before: int
    epoch_after: int
    #: From the kill to the first answer.
    seconds: float
    #: Tasks that the client submitted meanwhile.
    submitted_meanwhile: int


class PairCounts(Struct, frozen=True):
    """The counts of the journal in PostgreSQL."""

    audit_counts: AuditCounts
    rows: int
    #: Rows by the epoch of their writer.
    rows_by_epoch: dict[int, int]
    #: Results that the client received, and that are right.
    results_right: int


class PairResult(Struct, frozen=True):
    """The result of the demo."""

    counts: PairCounts
    takeover: Takeover
    lines: list[ProofLine]
    seconds: float


def run_pair(tasks_total: int, postgresql: Path | None, reporter: DemoReporter) -> PairResult:
    """Run the demo. Raises TaskyardError if a part of it fails. Logs are kept then."""
    began = time.monotonic()
    programs = find_programs(postgresql)
    directory = Path(tempfile.mkdtemp(prefix="taskyard-pair-"))
    try:
        with _no_variables_of_postgresql():
            result = _run(tasks_total, programs, directory, reporter, began)
    except TaskyardError:
        reporter.step(f"failed (see the logs in {directory / LOGS})")
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    return result


@contextmanager
def _no_variables_of_postgresql() -> Iterator[None]:
    """Remove variables such as PGHOST, which are meant for another database."""
    removed = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("PG")}
    try:
        yield
    finally:
        os.environ.update(removed)


def _run(
    tasks_total: int, programs: Path, directory: Path, reporter: DemoReporter, began: float
) -> PairResult:
    (directory / LOGS).mkdir()
    reporter.step(f"starting a throw-away PostgreSQL ({programs})")
    with ThrowawayCluster(programs) as cluster:
        url = cluster.url()
        with database.open_database(url) as connection:
            database.init(connection)
        reporter.step("starting two brokers")
        with Pair(directory, cluster) as pair:
            reporter.step(f"{pair.leader} leads, {pair.standby} follows")
            reporter.step(f"starting {len(_WORKERS)} workers of {pair.places}")
            pair.start_workers()
            feed = Feed(pair.places, tasks_total, reporter.step)
            try:
                takeover = _kill_halfway(pair, feed, url, reporter)
                results = feed.results()
            finally:
                feed.close()
            pair.stop()
        reporter.step("all tasks have settled, counting the journal")
        counts = count(url, results)
    lines = proof(counts, takeover)
    return PairResult(counts, takeover, lines, time.monotonic() - began)


class Pair:
    """Two brokers and their workers. As a context manager it ends them."""

    def __init__(self, directory: Path, cluster: ThrowawayCluster) -> None:
        self._directory = directory
        self._cluster = cluster
        self._ports = dict(zip(("broker-1", "broker-2"), free_ports(2), strict=True))
        self.leader, self.standby = self._ports
        self._brokers: dict[str, DemoProcess] = {}
        self._workers: list[DemoProcess] = []
        # Settings of a directory above are not meant for these.
        (directory / "taskyard.toml").write_text("# The brokers of the demo use the defaults.\n")
        try:
            self._start_broker(self.leader).listening(2)
            self._start_broker(self.standby)
            self.wait_for_standby()
        except BaseException:
            self._end()
            raise

    @property
    def places(self) -> str:
        """The endpoint of both brokers, for their peers."""
        return "+".join(f"tcp://127.0.0.1:{port}" for port in self._ports.values())

    def _start_broker(self, name: str) -> DemoProcess:
        state = str(self._directory / name)
        listen = f"dwork=tcp://127.0.0.1:{self._ports[name]}"
        arguments = ["broker", "--standby", "--store", self._cluster.url(), "--state", state]
        arguments += ["--listen", listen]
        started = DemoProcess(name, arguments, self._directory, reads_endpoints=True)
        self._brokers[name] = started
        return started

    def wait_for_standby(self) -> str:
        """Wait until the standby has applied all rows, and return its line."""
        process = self._brokers[self.standby]
        while line := process.read_line():
            if line.startswith("standby: "):
                return line.removeprefix("standby: ")
        process.wait()
        process.check()
        raise TimedOut(f"{self.standby}: does not follow (see {process.log})")

    def start_workers(self) -> None:
        for name in _WORKERS:
            options = ["--slots", str(_SLOTS), "--allow", tasks.__name__, "--broker", self.places]
            arguments = ["worker", "--name", name, *options]
            self._workers.append(
                DemoProcess(name, arguments, self._directory, reads_endpoints=False)
            )

    def kill_leader(self) -> int:
        """Kill the leader by SIGKILL. The standby is the leader from here on."""
        self.leader, self.standby = self.standby, self.leader
        return self._brokers[self.standby].kill()

    def restart_killed(self) -> str:
        """Start the broker that was killed. Return the line that it follows."""
        self._start_broker(self.standby)
        return self.wait_for_standby()

    def check(self) -> None:
        """Raise `ProcessEnded` if a process has ended, except a standby."""
        self._cluster.check()
        for process in (*self._workers, self._brokers[self.leader]):
            process.check()

    def stop(self) -> None:
        """Stop the workers, then the standby, which must not take over, then the leader."""
        stop_processes(self._workers)
        for name in (self.standby, self.leader):
            stop_processes([self._brokers[name]])

    def _end(self) -> None:
        end_processes((*self._workers, *self._brokers.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. Peers name the standby's before it listens."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Feed:
    """A client that submits the campaign, in a thread of its own, and collects the results."""

    def __init__(self, places: str, total: int, report: Callable[[str], None]) -> None:
        """`report` is called when no broker answers, and when one does again."""
        self.total = total
        self.futures: dict[int, Future[int]] = {}
        self.client = InternalClient(places, report=report)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            first = int(self.total * _FIRST_SHARE)
            self._submit(first)
            for portion in range(1, _PORTIONS + 1):
                if self._stopping.wait(_PAUSE_SECONDS):
                    return
                self._submit(first + (self.total - first) * portion // _PORTIONS)
        except BaseException as failure:  # noqa: BLE001 - raised by `join`
            self._failure = failure

    def _submit(self, end: int) -> None:
        for number in range(len(self.futures), end):
            self.futures[number] = self.client.submit(
                f"{tasks.__name__}:square", number, name=f"square-{number:04}", campaign=NAME
            )

    def counts(self, check: Callable[[], None]) -> Mapping[str, int]:
        """Wait until a broker answers, and return its counts. `check` is called meanwhile."""
        while True:
            check()
            with suppress(TimedOut):
                return self.client.counts(NAME, _ANSWER_SECONDS)

    def results(self) -> list[int | None]:
        """Wait for all results, and return them in the order of submission. None: it failed."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return [_result(future) for future in self.futures.values()]

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(_CLOSE_SECONDS)
        self.client.close(_CLOSE_SECONDS)


def _result(future: Future[int]) -> int | None:
    try:
        return future.result(_SETTLED_SECONDS)
    except TaskFailed:
        return None


def _kill_halfway(pair: Pair, feed: Feed, url: str, reporter: DemoReporter) -> Takeover:
    """Wait until all tasks have settled, and kill the leader on the way."""
    reporter.step(f"submitting {feed.total:,} tasks, in portions")
    ends = time.monotonic() + _SETTLED_SECONDS + _SETTLED_SECONDS_A_TASK * feed.total
    takeover = None
    with reporter.running():
        while True:
            counts = feed.counts(pair.check)
            reporter.count(counts, feed.total)
            settled = sum(counts[state] for state in _SETTLED)
            if takeover is None and settled >= KILLED_AT * feed.total:
                takeover = _kill(pair, feed, url, settled, reporter)
            if settled >= feed.total or (feed.is_over and settled >= len(feed.futures)):
                break
            if time.monotonic() > ends:
                raise TimedOut(f"{feed.total - settled:,} tasks have not settled")
            time.sleep(_POLL_SECONDS)
    if takeover is None:
        raise TimedOut("all tasks settled before the leader could be killed (use more --tasks)")
    return takeover


def _kill(pair: Pair, feed: Feed, url: str, settled: int, reporter: DemoReporter) -> Takeover:
    """Kill the leader as a power cut would, and wait for an answer of the other."""
    before = _epoch(url)
    submitted = len(feed.futures)
    reporter.step(
        f"killing {pair.leader} by SIGKILL, with {settled:,} of {feed.total:,} tasks settled"
    )
    began = time.monotonic()
    status = pair.kill_leader()
    feed.counts(pair.check)
    seconds = time.monotonic() - began
    takeover = Takeover(
        status=status,
        settled=settled,
        tasks=feed.total,
        leader=pair.leader,
        epoch_before=before,
        epoch_after=_epoch(url),
        seconds=seconds,
        submitted_meanwhile=len(feed.futures) - submitted,
    )
    reporter.step(
        f"{pair.leader} has taken over: epoch {before} -> {takeover.epoch_after}, served again "
        f"after {seconds:.1f} s"
    )
    line = pair.restart_killed()
    reporter.step(f"started {pair.standby} again: {line}")
    return takeover


def _epoch(url: str) -> int:
    with database.open_database(url) as connection:
        return leader.read(connection).epoch


# When it is over.


def count(url: str, results: list[int | None]) -> PairCounts:
    """Read the journal of stopped brokers, verified by its chain, and count it and the results."""
    with database.open_database(url) as connection:
        identity, _ = database.read_anchor(connection)
        (newest,) = connection.execute(_NEWEST, binary=True).fetchall()
        by_epoch: dict[int, int] = dict(connection.execute(_EPOCHS).fetchall())
    auditor, rows = Auditor(), 0
    with closing(PostgresReader(url, identity, Head(*newest))) as store:
        for row in store.rows():
            rows += 1
            auditor.add(records_of(row, row.record_first - 1))
    right = sum(value == number * number for number, value in enumerate(results))
    return PairCounts(auditor.tally(), rows, by_epoch, right)


def proof(counts: PairCounts, takeover: Takeover) -> list[ProofLine]:
    """Return the closing table."""
    audit_counts, total = counts.audit_counts, takeover.tasks
    is_done = audit_counts.submitted == audit_counts.done == total
    return [
        ProofLine(
            "submitted",
            f"{audit_counts.submitted:,} = {audit_counts.done:,} done + {audit_counts.failed:,} "
            f"failed; {takeover.submitted_meanwhile:,} of them while no broker led",
            is_done,
            ExitCode.TASK_FAILED,
        ),
        ProofLine("lost", f"{audit_counts.unfinished:,}", audit_counts.unfinished == 0),
        ProofLine(
            "completed twice",
            f"{audit_counts.completed_twice:,}",
            audit_counts.completed_twice == 0,
        ),
        ProofLine(
            "results",
            f"{counts.results_right:,} of {total:,} are right, at the client",
            counts.results_right == total,
            ExitCode.TASK_FAILED,
        ),
        ProofLine("stale results refused", f"{audit_counts.stale:,}", passed=True),
        ProofLine(
            "leader killed",
            f"1, by signal {-takeover.status} with {takeover.settled:,} of {total:,} tasks settled",
            takeover.status < 0,
            ExitCode.TASK_FAILED,
        ),
        ProofLine(
            "takeover",
            f"{takeover.leader}, epoch {takeover.epoch_before} -> {takeover.epoch_after}, served "
            f"again after {takeover.seconds:.1f} s",
            takeover.epoch_after == takeover.epoch_before + 1,
        ),
        _rows_line(counts, takeover),
    ]


def _rows_line(counts: PairCounts, takeover: Takeover) -> ProofLine:
    parts = [f"{rows:,} of epoch {epoch}" for epoch, rows in counts.rows_by_epoch.items()]
    expected = {takeover.epoch_before, takeover.epoch_after}
    passed = {*counts.rows_by_epoch} == expected and not counts.audit_counts.unknown
    figures = f"{counts.rows:,} verified by the chain: {', '.join(parts)}"
    return ProofLine("rows of the journal", figures, passed)
