"""Metrics: their text, their page in the docs, and a real broker's by bearer token."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec import to_builtins
from prometheus_client.parser import text_string_to_metric_families

from taskyard.core.counters import Counters, turn_histogram
from taskyard.web import metrics
from taskyard.web.metrics import DEFINITIONS, OTHER, PAGE_METRICS, exposition
from taskyard.wire.health_views import (
    BrokerMeasures,
    LeaderHealth,
    OutboxHealth,
    StandbyHealth,
    health,
)
from tests.kit.processes import Broker, Running, Worker, run_here, until
from tests.kit.requirements import need

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

NOW = 1000.0
STATES = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")
HOSTILE = 'a "quoted"\nname\\with \\xff'

Samples = dict[tuple[str, tuple[str, ...]], float]


def service(name: str, oldest_ready: float | None = None, **counts: int) -> dict[str, Any]:
    every = dict.fromkeys(STATES, 0) | counts
    return {"name": name, "counts": every, "workers": 1, "oldest_ready": oldest_ready}


def worker(name: str, dialect: str = "dwork", **fields: Any) -> dict[str, Any]:
    usual = {"slots": 4, "slots_used": 1, "resources": {}, "resources_free": {}}
    return {"name": name, "dialect": dialect, "last_seen_ago": 0.5} | usual | fields


def status(*services: dict[str, Any]) -> dict[str, Any]:
    counted = Counters(started_ns=5 * 10**9, submitted=7, retries=1, lease_expiries=2)
    for one in services:
        counted.service(one["name"].encode()).attempts[0] += 3
        counted.service(one["name"].encode()).run.add(2 * 10**9)
    measures = BrokerMeasures(turn_histogram(), turn_histogram(), malformed={"wmp": 4})
    measures.turns.add(10**6, 5)
    measures.disk_free_bytes = 99
    behind: Any = {"endpoints": [], "rows_behind": 3, "seconds_behind": 0.5, "last_seen_ago": 0.25}
    measures.leader = LeaderHealth(
        epoch=4,
        host="a",
        endpoints=[],
        lease=5.0,
        standbys=[StandbyHealth(host="b", **behind)],
    )
    measures.outbox = OutboxHealth(new=0, refused=2)
    return {"services": list(services), "health": to_builtins(health(counted.copied(), measures))}


def samples(text: bytes) -> Samples:
    """Return all values by name and the values of labels, sorted by their names."""
    return {
        (sample.name, tuple(text for _, text in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_metric_is_there_with_its_type_and_labels() -> None:
    text = exposition(
        status(service("s")),
        [worker("w", resources={"memory": 8}, resources_free={"memory": 2})],
        3,
        NOW,
    )
    found = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert len(found) == len(DEFINITIONS)
    for one in DEFINITIONS.values():
        name = one.name.removesuffix("_total") if one.kind == "counter" else one.name
        family = found[name]
        assert family.type == one.kind
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert labels == set(one.labels)


def test_backlog_is_ready_and_leased() -> None:
    found = samples(
        exposition(status(service("s", 990.0, ready=2, leased=3, delayed=9)), [], 0, NOW)
    )
    assert found["taskyard_backlog_tasks", ("s",)] == 5
    assert found["taskyard_tasks", ("s", "delayed")] == 9
    assert found["taskyard_oldest_ready_seconds", ("s",)] == 10


def test_buckets_are_cumulative() -> None:
    found = samples(exposition(status(service("s")), [], 0, NOW))
    assert found["taskyard_run_seconds_bucket", ("1.0", "s")] == 0
    assert found["taskyard_run_seconds_bucket", ("3.0", "s")] == 1
    assert found["taskyard_run_seconds_bucket", ("+Inf", "s")] == 1
    assert found["taskyard_run_seconds_count", ("s",)] == 1
    assert found["taskyard_run_seconds_sum", ("s",)] == 2
    assert found["taskyard_turn_seconds_count", ()] == 5


def test_broker_that_is_away_has_no_values() -> None:
    found = samples(exposition(None, [], 12))
    assert {name for name, _ in found} == {f"taskyard_{name}" for name in PAGE_METRICS}
    assert found["taskyard_broker_up", ()] == 0
    assert found["taskyard_page_rows_behind", ()] == 12


def test_names_are_escaped() -> None:
    text = exposition(status(service(HOSTILE)), [worker(HOSTILE, HOSTILE)], 0, NOW)
    found = samples(text)
    assert found["taskyard_attempts_total", ("finished", HOSTILE)] == 3
    assert found["taskyard_worker_slots", (HOSTILE,)] == 4
    assert found["taskyard_workers", (HOSTILE,)] == 1


def test_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SERVICES_MAX", 2)
    monkeypatch.setattr(metrics, "WORKERS_MAX", 2)
    services = [service(f"s{number}", ready=1) for number in range(5)]
    workers = [worker(f"w{number}", last_seen_ago=float(number)) for number in range(5)]
    found = samples(exposition(status(*services), workers, 0, NOW))
    assert found["taskyard_tasks", (OTHER, "ready")] == 3
    assert found["taskyard_attempts_total", ("finished", OTHER)] == 9
    assert found["taskyard_run_seconds_count", (OTHER,)] == 3
    assert found["taskyard_worker_slots", (OTHER,)] == 12
    assert found["taskyard_worker_last_message_seconds", (OTHER,)] == 4
    assert found["taskyard_slots", ()] == 20
    names = {labels[0] for name, labels in found if name == "taskyard_worker_slots"}
    assert names == {"w0", "w1", OTHER}


def test_promtool_finds_nothing() -> None:
    tool = need("prometheus")
    for given in (status(service(HOSTILE, ready=1)), None):
        text = exposition(given, [worker("w", resources={"gpu": 1})], 0, NOW)
        done = subprocess.run(
            [tool, "check", "metrics"], input=text, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_docs_list_every_metric() -> None:
    row = re.compile(r"^\| `(taskyard_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)
    listed = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in row.findall(DOCS.read_text())
    ]
    assert listed == [(one.name, one.kind, one.labels, one.text) for one in DEFINITIONS.values()]


class PageUnderTest:
    """A page beside a broker, read like a program that collects metrics reads it."""

    def __init__(self, directory: Path) -> None:
        state = str(directory / ".taskyard")
        self.process = Running(
            directory, "web", "--state", state, "--page", "127.0.0.1:0", stderr=subprocess.DEVNULL
        )
        self._address = urlsplit(self.process.line().removeprefix("page "))
        self.token = parse_qs(self._address.query)["token"][0]

    def get(self, path: str, token: str = "") -> tuple[int, str]:
        """Return the status and the body of a response."""
        connection = HTTPConnection(self._address.netloc, timeout=30)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        found = reply.status, reply.read().decode()
        connection.close()
        return found

    def samples(self) -> Samples:
        code, text = self.get("/metrics", self.token)
        assert code == 200
        return samples(text.encode())


@pytest.mark.slow
def test_real_broker_is_measured_until_it_is_gone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        running = stack.enter_context(Worker(tmp_path, "--slots", "2", "--name", "w1"))
        page = PageUnderTest(tmp_path)
        stack.enter_context(page.process)
        assert run_here(tmp_path, "submit", "--wait", "--", "true")[0] == 0
        own = run_here(tmp_path, "web", "--share", "metrics")[1].strip()
        assert (tmp_path / ".taskyard" / "metrics.token").stat().st_mode & 0o777 == 0o600
        assert page.get("/metrics")[0] == 401
        assert page.get("/metrics", "f" * 64)[0] == 401
        assert page.get("/metrics", own)[0] == 200
        assert page.get("/tasks", own)[0] == 401
        assert page.get("/healthz") == (200, "ok\n")
        until(lambda: page.get("/readyz") == (200, "ok\n"), "the page is ready")

        found = page.samples()
        assert found["taskyard_broker_up", ()] == 1
        assert found["taskyard_submitted_tasks_total", ()] == 1
        assert found["taskyard_attempts_total", ("finished", "exec")] == 1
        assert found["taskyard_run_seconds_count", ("exec",)] == 1
        assert found["taskyard_sync_seconds_count", ()] >= 3
        assert found["taskyard_worker_slots", ("w1",)] == 2
        assert found["taskyard_journal_bytes", ()] > 0
        document = json.loads(run_here(tmp_path, "status", "--json")[1])
        assert document["health"]["turns"]["longest"] > 0
        assert document["health"]["connections"] >= 1

        running.terminate()
        until(lambda: ("taskyard_worker_slots", ("w1",)) not in page.samples(), "no such series")
        broker.send(signal.SIGKILL).end()
        until(lambda: not page.samples()["taskyard_broker_up", ()], "the broker is down")
        assert ("taskyard_submitted_tasks_total", ()) not in page.samples()
        assert page.get("/readyz") == (503, "not ready: the broker does not answer\n")
