"""A real Prometheus reads a real page, with the files of deploy/, and runs all of their queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]  # stubs would be one more package

from taskyard.client.internal import InternalClient
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, Worker, run_here, until
from tests.test_deploy import DEPLOY, queries

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("prometheus"),
]

#: Instead of Grafana's variables.
VARIABLES = {"$instance": ".*", "$service": ".*", "$__rate_interval": "30s"}


class Prometheus:
    """A Prometheus that listens on a port of its own."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **fields: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urlencode(fields)}"
        with urlopen(url, timeout=PATIENCE_SECONDS) as reply:
            return json.load(reply)["data"]

    def values(self, query: str) -> list[float]:
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        return [float(one["value"][1]) for one in self.get("query", query=query)["result"]]


@contextmanager
def prometheus(directory: Path, page: str, token: str) -> Iterator[Prometheus]:
    """Run one in a directory with the files of deploy/, but at the page's address, every 2 s.

    A page that takes longer to answer counts as one that is down. A busy machine may take 0.5 s.
    """
    for path in (DEPLOY / "prometheus").iterdir():
        shutil.copy(path, directory)
    file = directory / "prometheus.yml"
    config = yaml.safe_load(file.read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "500ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [page]}]
    file.write_text(yaml.safe_dump(config))
    (directory / "metrics.token").write_text(token)
    words = [
        *("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
        "--web.listen-address=127.0.0.1:0",
    ]
    with subprocess.Popen(words, cwd=directory, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            found = (re.search(r'"Listening on" address=(\S+)', line) for line in lines)
            address = next(one[1] for one in found if one)
            next(line for line in lines if "Server is ready" in line)  # until then, 503
            yield Prometheus(address)
        finally:
            process.kill()


def test_every_query_of_dashboard_and_rules_has_an_answer(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(Broker(tmp_path))
        stack.enter_context(Worker(tmp_path, "--slots", "2"))
        page = stack.enter_context(Running(tmp_path, "web", "--until-eof", "--page", "127.0.0.1:0"))
        place = urlsplit(page.line().split()[1]).netloc
        token = run_here(tmp_path, "web", "--share", "metrics")[1]
        client = stack.enter_context(InternalClient(state=tmp_path / ".taskyard"))
        server = stack.enter_context(prometheus(tmp_path, place, token))

        def work() -> None:
            tasks = [client.submit(["sh", "-c", code]) for code in ("exit 0", "exit 1")]
            names = [task.name for task in tasks]
            client.wait_names(names, PATIENCE_SECONDS)

        work()
        until(lambda: sum(server.values('taskyard_attempts_total{outcome="failed"}')) == 1)
        work()
        until(lambda: sum(server.values('taskyard_attempts_total{outcome="failed"}')) == 2)
        alerts = {rule["name"] for rule in server.get("rules")["groups"][0]["rules"]}
        panels = [(title, query) for title, query in queries() if title not in alerts]
        until(lambda: are_evaluated(server))
        until(lambda: server.values('up{job="taskyard"}') == [1], "the page is up")
        answers = [answer_of(server, title, query) for title, query in panels]
        for query, value in (("workers", 1), ("slots", 2), ("submitted_tasks_total", 4)):
            assert answer_of(server, query, f"sum(taskyard_{query})") == [value]
    assert all(value >= 0 for values in answers for value in values)


def answer_of(server: Prometheus, title: str, query: str) -> list[float]:
    """Return the answer to a query. It is empty for a moment if the page was too slow to answer."""
    found: list[float] = []

    def has_answer() -> bool:
        found.extend(server.values(query))
        return bool(found)

    until(has_answer, f"an answer to {title}")
    return found


def are_evaluated(server: Prometheus) -> bool:
    """Return whether each rule was evaluated. Fail if one has an error."""
    rules = server.get("rules")["groups"][0]["rules"]
    assert not [rule.get("lastError") for rule in rules if rule["health"] == "err"]
    return all(rule["health"] == "ok" for rule in rules)
