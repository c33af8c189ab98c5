"""The comparison of stores runs with tiny numbers, and refuses a store in use."""

import json
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from bench.broker import stores
from bench.broker.host import STORE_VARIABLE
from bench.cli import main
from taskyard.postgresql import database
from taskyard.postgresql.lease import Lease
from taskyard.postgresql.store import PostgresStore
from tests.kit.postgres import Cluster


def test_stores_are_compared(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(stores, "BATCHES", (100,))
    monkeypatch.setenv(STORE_VARIABLE, "")  # restored after the test
    url, figures = cluster.database(with_store=False), tmp_path / "figures.json"
    server = SimpleNamespace(url=lambda: url)
    monkeypatch.setattr(stores, "ThrowawayCluster", lambda _programs: nullcontext(server))
    words = ["broker", "--store", "postgresql", "--quick", "--repeats", "1"]
    words += ["--json", str(figures)]
    made = CliRunner().invoke(main, words, catch_exceptions=False)
    assert made.exit_code == 0, made.output
    lines = {
        line["what"].strip(): line["best"] for line in json.loads(figures.read_bytes())["lines"]
    }
    assert list(lines) == [
        "batch 100, SQLite",
        "batch 100, PostgreSQL",
        "of it the broker",
        "of it the server",
        "PostgreSQL over SQLite",
    ]
    assert all(lines.values())
    with database.connect(url) as connection:
        rows = connection.execute("SELECT count(*) FROM taskyard.journal").fetchall()
    assert rows == [(0,)]


def test_store_in_use_is_refused(tmp_path: Path, cluster: Cluster) -> None:
    url = cluster.database()
    with Lease(url) as lease, closing(PostgresStore(url, tmp_path, lease.term)) as store:
        store.commit(b"x", 1)
    refused = CliRunner().invoke(main, ["broker", "--store", url])
    assert refused.exit_code == 2
    assert "--store: has a journal" in refused.output
