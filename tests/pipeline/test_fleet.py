"""`pipeline fleet`: workers in the executors of a real cluster, one of which is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from taskyard import Client
from taskyard.errors import UserError
from taskyard.journal import recovery
from taskyard.journal.audit import AuditCounts, Auditor
from taskyard.journal.reader import JournalReader
from taskyard.journal.witness import read as witnessed
from taskyard.pipeline import java
from taskyard.pipeline.jobs import fleet
from tests.kit.processes import Broker, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPARK_HOME = Path(pyspark.__file__).parent
TASKS = 400
TIMEOUT_SECONDS = 200
#: JVM options for short runs.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: Cores of each of two executors, with a worker on each core.
CORES = 2


@contextmanager
def _daemon(directory: Path, kind: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a daemon of a cluster."""
    main = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
    places = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    environment = os.environ | {
        "JAVA_HOME": str(java.find().home),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
    }
    with subprocess.Popen(
        [SPARK_HOME / "bin" / "spark-class", main, *places, *words],
        cwd=directory,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _place(process: subprocess.Popen[str]) -> str:
    """Return the address that a daemon prints when it has started."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"Starting Spark (?:master at|worker) (\S+)", line)
        if found:
            return found[1]
    pytest.fail("a part of the cluster did not start")


@contextmanager
def _cluster(directory: Path) -> Iterator[tuple[str, list[int]]]:
    """Run a cluster. Yields the master's URL and the processes of two Spark workers."""
    with ExitStack() as stack:
        url = _place(stack.enter_context(_daemon(directory, "Master")))
        started = [
            stack.enter_context(
                _daemon(
                    *(directory, "Worker", "--cores", str(CORES), "--memory", "600m"),
                    *("--work-dir", str(directory / f"work-{number}"), url),
                )
            )
            for number in range(2)
        ]
        assert all(map(_place, started))
        yield url, [process.pid for process in started]


def _executor_of(worker: int) -> int:
    """Return the executor process of a Spark worker, which also has short-lived children."""
    found = [
        int(child)
        for task in Path(f"/proc/{worker}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    executors = [pid for pid in found if b"ExecutorBackend" in _command(pid)]
    assert len(executors) == 1, executors
    return executors[0]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def _tally(state: Path) -> AuditCounts:
    seen = witnessed(state)
    assert seen is not None
    counting, number = Auditor(), 0
    with JournalReader(state, *seen) as reader:
        for row in reader.rows():
            counting.add(recovery.records_of(row, number))
            number = row.record_last
    return counting.tally()


def _until(is_so: Callable[[], object], what: str) -> None:
    """Wait for a condition. On a busy machine a cluster takes a minute to start."""
    ends = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < ends, f"did not happen: {what}"
        time.sleep(0.2)


def _counts(client: Client) -> dict[str, int]:
    return client.counts("c")


def test_killed_executor_loses_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = f"--executor-memory 512m --conf 'spark.executor.extraJavaOptions={SHORT_LIVED}'"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"{executor} pyspark-shell")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", SHORT_LIVED)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with (
        _cluster(tmp_path) as (master, daemons),
        Broker(tmp_path, "--listen", "dwork=tcp://127.0.0.1:0") as broker,
        Client(broker.endpoint) as client,
    ):
        client.map(lambda n: ["sh", "-c", f"sleep 0.03; echo {n}"], range(TASKS), campaign="c")
        words = ("--workers", "4", "--slots", "2", "--broker", broker.endpoints[1])
        with Running(tmp_path, "pipeline", "fleet", *words, "--master", master) as running:
            _until(lambda: _counts(client)["done"] > TASKS // 5, "a fifth is done")
            os.kill(_executor_of(daemons[0]), signal.SIGKILL)
            assert _counts(client)["done"] < TASKS
            client.wait_campaign("c", timeout=TIMEOUT_SECONDS)
            _until(lambda: len(client.workers()) == 4, "the lost workers are back")
            client.drain()
            code, out, err = running.end()
        assert (code, out) == (0, "4 workers exited\n")
        assert "4 workers of 2 slots" in err
        broker.end()
    tally = _tally(tmp_path / ".taskyard")
    assert (tally.submitted, tally.done, tally.unfinished) == (TASKS, TASKS, 0)
    assert tally.is_clean


def test_fleet_that_cannot_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"local\[2\]: 2 cores for 8 workers"):
        fleet.check(8, "local[2]", "ipc:///x")
    with pytest.raises(UserError, match="ipc:///x: not reachable"):
        fleet.check(1, "spark://head:7077", "ipc:///x")
    fleet.check(2, "local[2]", "ipc:///x")


def test_worker_with_invalid_options_ends_the_fleet(spark: Any) -> None:
    with pytest.raises(UserError, match="rejected its options or its key"):
        fleet.run(spark, 1, ["--broker", "nonsense"])
