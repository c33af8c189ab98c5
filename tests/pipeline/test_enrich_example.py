"""The example of rows through a flaky API, at a small size: the log agrees with the tables."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.kit.processes import Broker, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from pyspark.sql import SparkSession

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "enrich"

ROWS: Final = 2_000


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the example. Spark's workers get its functions by value, because it is not theirs."""
    monkeypatch.syspath_prepend(EXAMPLE)
    module = importlib.import_module("enrich")
    del sys.modules["enrich"]
    yield module
    del sys.modules["check"]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    words = [sys.executable, str(EXAMPLE / "server.py"), "--log", str(tmp_path / "requests.log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        monkeypatch.setenv("ENRICH_PORT", server.stdout.readline().strip())
        try:
            yield
        finally:
            server.terminate()


@pytest.mark.whole
@pytest.mark.usefixtures("api")
def test_log_of_the_api_agrees_with_the_tables(
    example: Any, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in example.COPIED:
        shutil.copy(EXAMPLE / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    with Broker(tmp_path), Worker(tmp_path):
        rows = example.table(spark, ROWS)
        killed = rows.mapInArrow(example.kill_at_end, rows.schema)
        to = {"key": "id", "campaign": "enrich", "state": str(tmp_path / ".taskyard")}
        with pytest.raises(Exception, match="Python worker exited unexpectedly"):
            example.score(killed, to)
        example.enrich(spark, tmp_path, ROWS, kill=False)
    assert violated(example.check, tmp_path) == []
    for check, spoil in SPOILED.items():
        assert check in violated(example.check, tmp_path, spoil), f"{check} did not notice"
    assert list(SPOILED) == [check.__name__ for check in example.check.CHECKS]


def violated(
    check: Any, directory: Path, spoil: Callable[[Any], object] = lambda _run: None
) -> list[str]:
    """Return the checks that a manipulated run violates."""
    run = check.Run(directory, ROWS)
    spoil(run)
    return [one.__name__ for one in check.CHECKS if not one(run).holds]


def hurry(run: Any) -> None:
    run.requests = [one._replace(time=0.0) for one in run.requests]


def repeat(run: Any) -> None:
    run.requests.append(next(one for one in run.requests if one.status == 200))


#: The manipulation that makes each check fail.
SPOILED: Final[dict[str, Callable[[Any], object]]] = {
    "within_the_limit": hurry,
    "every_row_has_an_outcome": lambda run: run.scores.pop(5),
    "failures_are_dead_letters": lambda run: run.dead.pop(0),
    "requests_are_attempts": lambda run: run.requests.pop(),
    "nothing_is_called_after_success": repeat,
    "backfill_runs_what_was_down": lambda run: run.again.pop(0),
}
