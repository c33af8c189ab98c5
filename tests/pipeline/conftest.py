"""One JVM with Spark for all tests of the pipeline, because it takes longer to start than to use.

With `-n`, each process of xdist has a session of its own in it. Without Spark (an install without
the extra), the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser
    from pyspark.sql import SparkSession

    from tests.pipeline.shared_jvm import SharedJvm

_HAS_SPARK = find_spec("pyspark") is not None

collect_ignore_glob = [] if _HAS_SPARK else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [] if _HAS_SPARK else ["tests/pipeline is left out: taskyard[spark] is not installed"]


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests of a file in one process of xdist: they share reports and browsers.

    In the order of their names, in which the longest files are not the last ones.
    """
    if config.getoption("dist", "no") == "load":  # the default of `-n`
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


@pytest.fixture(scope="session")
def class_archive(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have one JVM store its classes, unless there is an archive, before others start."""
    from taskyard.pipeline import java  # noqa: PLC0415  # not without Spark

    if not any(java.cache_directory().glob("classes-*.jsa")):
        directory = tmp_path_factory.mktemp("class_archive")
        subprocess.run(
            [sys.executable, "-m", "tests.pipeline.class_archive", directory],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
        )


@pytest.fixture(scope="session")
def shared_jvm(
    class_archive: None,  # noqa: ARG001  # only before it
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharedJvm]:
    from tests.pipeline import shared_jvm  # noqa: PLC0415  # not without Spark
    from tests.pipeline.deployments import CONNECT  # noqa: PLC0415
    from tests.pipeline.scenarios import SMALL  # noqa: PLC0415

    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all processes
    conf = {
        **SMALL,
        **CONNECT,
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    with shared_jvm.shared_jvm(directory, conf) as found:
        yield found


@pytest.fixture(scope="session")
def spark(shared_jvm: SharedJvm) -> SparkSession:
    return shared_jvm.session


@pytest.fixture(scope="session")
def python_daemons(shared_jvm: SharedJvm) -> dict[str, str]:
    """Return the variables for a JVM that uses the server of Spark's Python programs."""
    return shared_jvm.variables


@pytest.fixture(scope="session")
def short_lived(class_archive: None) -> str:  # noqa: ARG001  # only before it
    """Return the JVM options of the shared session that make short runs fast."""
    from taskyard.pipeline import java  # noqa: PLC0415  # not without Spark
    from taskyard.pipeline.driver import archived_program  # noqa: PLC0415

    archive = java.archive_options(java.find(), archived_program(), stores=False)
    return " ".join(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *archive])


@pytest.fixture(scope="session")
def connect_url(spark: SparkSession) -> Iterator[str]:
    """Run a Spark Connect server. Yields its URL."""
    from tests.pipeline.deployments import connect_server  # noqa: PLC0415  # not without Spark

    with connect_server(spark) as url:
        yield url


@pytest.fixture(scope="session")
def small_spark(spark: SparkSession) -> SparkSession:
    """Return the session that commands use for a small history: no code is generated."""
    from taskyard.pipeline.session import tune_session  # noqa: PLC0415  # not without Spark

    return tune_session(spark, 0)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from tests.pipeline.browser import launched  # noqa: PLC0415  # most tests need none

    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    from tests.pipeline.s3_server import served  # noqa: PLC0415  # most tests need none

    with served() as variables:
        yield variables


@pytest.fixture
def bucket(s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a directory in S3."""
    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    return "s3://tables/history"
