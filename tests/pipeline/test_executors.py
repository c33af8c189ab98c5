"""The probe of the executors: a missing Taskyard and paths that they do not see are errors."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import cloudpickle

from pyspark_taskyard.options import SourceOptions
from pyspark_taskyard.reader import TablePartition, TableReader
from pyspark_taskyard.record_ranges import RecordRange, shared_file
from taskyard.cli import spark_load as load_command
from taskyard.cli.entry import run, taskyard
from taskyard.errors import NotInstalled, UnusableFile
from taskyard.pipeline import executors
from taskyard.pipeline.executors import SharedPaths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A master that has its executors elsewhere. The session here is another one.
MASTER = "spark://head:7077"

#: Runs a pickled function where Taskyard can't be imported, and prints the row that it yields.
WITHOUT_TASKYARD = """
import sys
sys.modules["taskyard"] = None
import pyarrow
from pyspark import cloudpickle
probe = cloudpickle.loads(sys.stdin.buffer.read())
(found,) = probe([pyarrow.RecordBatch.from_pydict({"id": [1]})])
print(found["version"].to_pylist(), found["missing"].to_pylist())
"""


def test_cores_are_the_partitions_of_a_range(spark: SparkSession) -> None:
    assert executors.cores_of(spark) == 2


def test_shared_paths_pass(spark: SparkSession, tmp_path: Path) -> None:
    file, out = tmp_path / "history" / "1.parquet", tmp_path / "out"
    file.parent.mkdir()
    file.write_text("x")
    executors.check(spark, MASTER, SharedPaths([file], [out], [tmp_path]))
    assert list(out.iterdir()) == []


def test_file_that_an_executor_does_not_see_is_named_with_its_host(
    spark: SparkSession, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as own:  # no other process has this descriptor
        path = Path(f"/proc/self/fd/{own.fileno()}")
        text = f"{path}: not the same file at \\S+ "
        with pytest.raises(UnusableFile, match=text):
            executors.check(spark, MASTER, SharedPaths([path]))
        executors.check(spark, "local[2]", SharedPaths([path]))


def test_directory_of_the_same_name_elsewhere_is_not_shared(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # executors have another one
    own = Path("/proc/self/cwd")
    with pytest.raises(UnusableFile, match=r"^/proc/self/cwd: not shared with \S+ "):
        executors.check(spark, MASTER, SharedPaths((), [own]))


def test_probe_runs_without_taskyard() -> None:
    function = executors._probe_function([("/missing", 1)])  # noqa: SLF001
    probe = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    command = [sys.executable, "-c", WITHOUT_TASKYARD]
    done = subprocess.run(command, input=probe, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"[None] [['/missing']]\n"


@pytest.mark.parametrize(
    ("version", "text"),
    [(None, "can't import taskyard: /usr/bin/python3 ("), ("0.0.1", "taskyard 0.0.1 at node7, ")],
)
def test_other_taskyard_is_an_error(version: str | None, text: str) -> None:
    with pytest.raises(NotInstalled, match=re.escape(text)):
        executors._check_machine(MASTER, "node7", "/usr/bin/python3", version)  # noqa: SLF001


def test_load_checks_the_machines_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_spark: object, master: str) -> None:
        raise NotInstalled(f"{master}: Python at node7 can't import taskyard")

    monkeypatch.setattr(executors, "check", refuse)
    monkeypatch.setattr(load_command, "started_session", lambda *_, **_named: nullcontext())
    file = tmp_path / "c.jsonl"
    file.write_text('{"argv": ["true"]}\n')
    words = ["load", str(file), "--dry-run", "--spark", MASTER]
    assert run(taskyard, words) == NotInstalled.exit_code
    assert "node7 can't import taskyard" in capfd.readouterr().err


def test_data_source_names_a_file_that_a_machine_lacks(tmp_path: Path) -> None:
    file = tmp_path / "000000000001-000000000009.rows"
    reader = TableReader(SourceOptions(table="events"))
    part = TablePartition(str(file), state=str(tmp_path), broker="b")
    for batches in (reader.read(part), RecordRange(0, 9, str(file)).batches()):
        with pytest.raises(UnusableFile, match=rf"^{file}: not found on \S+, which runs a Spark "):
            next(batches)
    file.touch()
    assert shared_file(str(file)) == file
