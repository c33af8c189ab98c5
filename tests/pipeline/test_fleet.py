"""`pipeline fleet`: workers in the executors of a real cluster, one of which is killed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from taskyard.client.internal import InternalClient
from taskyard.demo.campaign import AuditCounts, Auditor
from taskyard.errors import UserError
from taskyard.journal import recovery
from taskyard.journal.sqlite import JournalReader
from taskyard.journal.witness import read as witnessed
from taskyard.pipeline import java
from taskyard.pipeline.jobs import fleet
from tests.kit.processes import Broker, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPARK_HOME = Path(pyspark.__file__).parent
TASKS = 100
#: The first tasks end at once, the others when the test opens their gate.
TASKS_BEFORE_GATE = 20
TIMEOUT_SECONDS = 200
#: Two executors of two cores, with a worker on each core.
CORES = 4
EXECUTORS = ("spark.executor.cores=2", "spark.executor.memory=512m")


@contextmanager
def _daemon(
    directory: Path, java_options: str, kind: str, *words: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a daemon of a cluster."""
    main = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
    places = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    environment = os.environ | {
        "JAVA_HOME": str(java.find().home),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": java_options,
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
def _cluster(directory: Path, java_options: str) -> Iterator[tuple[str, int]]:
    """Run a cluster. Yields the master's URL and the process of its Spark worker."""
    with _daemon(directory, java_options, "Master") as master:
        url = _place(master)
        size = ("--cores", str(CORES), "--memory", "1200m", "--work-dir", str(directory / "work"))
        with _daemon(directory, java_options, "Worker", *size, url) as worker:
            assert _place(worker)
            yield url, worker.pid


def _executors(worker: int) -> list[int]:
    """Return the executor processes of a Spark worker, which also has short-lived children."""
    found = [
        int(child)
        for task in Path(f"/proc/{worker}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid for pid in found if b"ExecutorBackend" in _command(pid)]


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


def _counts(client: InternalClient) -> dict[str, int]:
    return client.counts("c")


@pytest.mark.whole  # three JVMs of a cluster; `test_signals` ends a local fleet in every run
def test_killed_executor_loses_no_task(
    short_lived: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = (*EXECUTORS, f"spark.executor.extraJavaOptions={short_lived}")
    options = shlex.join(word for one in conf for word in ("--conf", one))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"{options} pyspark-shell")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", short_lived)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with (
        _cluster(tmp_path, short_lived) as (master, worker),
        Broker(tmp_path, "--listen", "dwork=tcp://127.0.0.1:0") as broker,
        InternalClient(broker.endpoint) as client,
    ):
        gate = tmp_path / "gate"

        def command(n: int) -> list[str]:
            wait = "" if n < TASKS_BEFORE_GATE else f"until [ -e {gate} ]; do sleep 0.2; done;"
            return ["sh", "-c", f"{wait} echo {n}"]

        for number in range(TASKS):
            client.submit(command(number), campaign="c")
        words = ("--workers", "4", "--slots", "2", "--broker", broker.endpoints[1])
        with Running(tmp_path, "pipeline", "fleet", *words, "--master", master) as running:
            _until(lambda: len(client.workers()) == 4, "all workers are there")
            _until(lambda: _counts(client)["done"] == TASKS_BEFORE_GATE, "the first tasks are done")
            one, other = _executors(worker)
            os.kill(one, signal.SIGKILL)
            gate.touch()
            client.wait_campaign("c", timeout=TIMEOUT_SECONDS)
            _until(lambda: len(client.workers()) == 4, "the lost workers are back")
            assert other in _executors(worker)
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
