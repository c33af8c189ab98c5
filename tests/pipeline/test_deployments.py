"""Every verb on every deployment: one machine, a Spark Connect server, a cluster of two workers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.client.internal import InternalClient
from taskyard.pipeline import connect
from taskyard.pipeline.session import session_scope
from tests.kit.processes import Broker, Running
from tests.pipeline import deployments, verbs
from tests.pipeline.scenarios import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

#: The same everywhere.
RESULTS = {
    "first worker": "started",
    "load": [2, 0, 0],
    "map_rows": [[1, "done", "x\n"], [2, "done", "y\n"]],
    "data source": [9, ["1", "2"]],
    "fleet": 1,
    "history": [99, 1, 1],
    "report": [True, 5_000_000_000, 2],
    "sweep": [[1, 2], [2, 2]],
}

#: The first test of a deployment runs all of its verbs.
TIMEOUT_SECONDS = 900

#: Spark's defaults. The shared session, whose JVM is the server, has settings for few rows.
SERVER_DEFAULTS = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}

#: All other tests use classic Spark.
DEPLOYMENTS = (pytest.param("classic", marks=pytest.mark.whole), "connect", "cluster")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    verbs.write_inputs(directory)
    return directory


@pytest.fixture(scope="module")
def classic(inputs: Path, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with _broker(tmp_path_factory) as broker:
        place = verbs.Place(inputs, spark, "local[2]", "classic", broker.endpoints)
        return verbs.run_all(place)


@pytest.fixture(scope="module")
def remote(inputs: Path, connect_url: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with _broker(tmp_path_factory) as broker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # hides the shared session
        with session_scope("tests", connect_url, conf=SERVER_DEFAULTS) as spark:
            assert connect.is_remote(spark)
            assert SERVER_DEFAULTS.keys() == SMALL.keys()
            place = verbs.Place(inputs, spark, connect_url, "connect", broker.endpoints)
            return verbs.run_all(place)


@pytest.fixture(scope="module")
def cluster(
    inputs: Path,
    spark: SparkSession,
    short_lived: str,
    python_daemons: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    directory = tmp_path_factory.mktemp("cluster")
    with (
        _broker(tmp_path_factory) as broker,
        deployments.cluster(spark, directory) as master,
    ):
        conf = {
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": short_lived,
        }
        words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        variables = {
            "PYSPARK_SUBMIT_ARGS": f"{shlex.join(words)} pyspark-shell",
            "SPARK_LOCAL_IP": deployments.LOOPBACK,
            "SPARK_SUBMIT_OPTS": short_lived,
        }
        done = subprocess.run(
            [sys.executable, "-m", verbs.__name__, master, str(inputs), *broker.endpoints],
            env=os.environ | python_daemons | variables,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def _broker(factory: pytest.TempPathFactory) -> Broker:
    return Broker(factory.mktemp("broker"), "--listen", "dwork=tcp://127.0.0.1:0")


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize("verb", verbs.VERBS)
@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_verb_runs(deployment: str, verb: str, request: pytest.FixtureRequest) -> None:
    fixture = {"connect": "remote"}.get(deployment, deployment)
    found = request.getfixturevalue(fixture)[verb]
    assert found == RESULTS[verb], found


@pytest.mark.whole
@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_terminated_command_ends_its_workers_at_the_server(
    connect_url: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with _broker(tmp_path_factory) as broker, InternalClient(broker.endpoint) as client:
        words = ("--workers", "1", "--broker", broker.endpoints[1], "--master", connect_url)
        with Running(tmp_path, "pipeline", "fleet", *words) as running:
            _until(lambda: len(client.workers()) == 1)
            code, _, err = running.terminate()
        _until(lambda: not client.workers())
    assert code == 128 + signal.SIGTERM
    assert err.splitlines()[0] == f"starting Spark on {connect_url}"
    assert err.splitlines()[-1] == "taskyard: terminated"


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)
