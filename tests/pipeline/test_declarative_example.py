"""The example of a declarative pipeline: tasks from files, and a table of results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow.dataset as ds
import pytest

from tests.kit.processes import Broker, Worker, run_here, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "inbox"

pytestmark = [pytest.mark.whole, pytest.mark.timeout(600)]


def copy_example(directory: Path) -> None:
    """Copy the example, with another place for Spark's own files."""
    shutil.copytree(EXAMPLE, directory / "inbox")
    settings = directory / "inbox" / "spark-pipeline.yml"
    text = settings.read_text()
    assert "file:///tmp/inbox-pipeline" in text
    settings.write_text(text.replace("file:///tmp/inbox-pipeline", (directory / "own").as_uri()))
    (directory / "files").mkdir()


def run_pipeline(directory: Path, server: str, broker: Broker) -> None:
    variables = {
        "SPARK_REMOTE": server,
        "INBOX_BROKER": broker.endpoint,
        "INBOX_STATE": str(directory / ".taskyard"),
        "INBOX_FILES": str(directory / "files"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pyspark.pipelines.cli", "run"],
        cwd=directory / "inbox",
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def add_file(directory: Path, name: str, *commands: str) -> None:
    lines = [json.dumps({"argv": ["sh", "-c", command]}) for command in commands]
    (directory / "files" / name).write_text("\n".join(lines) + "\n")


def outcomes(warehouse: Path) -> dict[str, int]:
    """Return the rows of the table that the pipeline makes."""
    rows = ds.dataset(warehouse / "outcomes", format="parquet").to_table()
    return {row["state"]: row["count"] for row in rows.to_pylist() if row["campaign"] == "inbox"}


def has_ended(directory: Path, tasks: int) -> bool:
    _, out, _ = run_here(directory, "list", "--campaign", "inbox", "--json")
    found = [task["state"] for task in json.loads(out)["tasks"]]
    return len(found) == tasks and {*found} <= {"done", "failed"}


def test_each_line_is_one_task_and_the_table_has_all_results(
    tmp_path: Path, spark: SparkSession, connect_url: str
) -> None:
    copy_example(tmp_path)
    with Broker(tmp_path) as broker, Worker(tmp_path):
        add_file(tmp_path, "first.jsonl", "true", "echo hello", "exit 3")
        run_pipeline(tmp_path, connect_url, broker)
        until(lambda: has_ended(tmp_path, 3), "the tasks of the first file end")
        add_file(tmp_path, "second.jsonl", "echo again")
        run_pipeline(tmp_path, connect_url, broker)
        until(lambda: has_ended(tmp_path, 4), "the task of the second file ends")
        run_pipeline(tmp_path, connect_url, broker)
    warehouse = Path(urlsplit(spark.conf.get("spark.sql.warehouse.dir") or "").path)
    assert outcomes(warehouse) == {"done": 3, "failed": 1}
