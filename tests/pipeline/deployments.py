"""A Spark Connect server in the JVM of a session, and a cluster of two workers.

The server is started as Spark's own plugin starts one in a driver. The cluster's processes are made
from the jars of the installed PySpark. Owns them and ends them. Knows nothing of the jobs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyspark

from taskyard.pipeline import java

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

SPARK_HOME: Final = Path(pyspark.__file__).parent
LOOPBACK: Final = "127.0.0.1"

#: Settings of a session whose JVM can be a Spark Connect server, at any free port.
CONNECT: Final = {
    "spark.connect.grpc.binding.address": LOOPBACK,
    "spark.connect.grpc.binding.port": "0",
}

#: Errors, and the line with the address of a daemon that has started.
_LOG_SETTINGS: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.master.name = org.apache.spark.deploy.master.Master
logger.master.level = info
logger.worker.name = org.apache.spark.deploy.worker.Worker
logger.worker.level = info
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c{1}: %m%n%ex
"""

_STARTED: Final = re.compile(r"Starting Spark (?:master at|worker) (\S+)")


@contextmanager
def connect_server(spark: SparkSession) -> Iterator[str]:
    """Run a Spark Connect server in the JVM of a session with the settings above."""
    package: Any = spark._jvm.org.apache.spark.sql.connect.service  # type: ignore[union-attr]  # noqa: SLF001
    package.SparkConnectService.start(spark.sparkContext._jsc.sc())  # noqa: SLF001
    server = getattr(getattr(package, "SparkConnectService$"), "MODULE$")  # the Scala object
    yield f"sc://{LOOPBACK}:{server.localPort()}"
    server.stop(getattr(server, "stop$default$1")(), getattr(server, "stop$default$2")())


@contextmanager
def cluster(
    directory: Path,
    java_options: str,
    variables: Mapping[str, str],
    *,
    workers: int = 2,
    size: tuple[str, ...] = ("--cores", "1", "--memory", "600m"),
) -> Iterator[tuple[str, list[int]]]:
    """Run a standalone cluster. Yields the master's URL and the processes of its workers."""
    with ExitStack() as stack:
        start = stack.enter_context
        master = start(_daemon(directory, java_options, variables, "Master"))
        url = _place(master)
        found = []
        for number in range(workers):
            words = (*size, "--work-dir", str(directory / f"work-{number}"), url)
            found.append(start(_daemon(directory, java_options, variables, "Worker", *words)))
        for one in found:
            _place(one)
        yield url, [one.pid for one in found]


@contextmanager
def _daemon(
    directory: Path, java_options: str, variables: Mapping[str, str], kind: str, *words: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a daemon of a cluster."""
    main = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
    places = ["--host", LOOPBACK, "--port", "0", "--webui-port", "0"]
    more = {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{java_options} {_logged(directory)}",
    }
    command = [str(SPARK_HOME / "bin" / "spark-class"), main, *places, *words]
    with _process(command, directory, {**variables, **more}) as process:
        yield process


@contextmanager
def _process(
    command: list[str], directory: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a JVM in a process group of its own. Kills the group at the end."""
    environment = os.environ | {
        "JAVA_HOME": str(java.find().home),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **variables,
    }
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _place(process: subprocess.Popen[str]) -> str:
    """Return the address that a daemon prints when it has started."""
    assert process.stderr is not None
    printed = []
    for line in process.stderr:
        printed.append(line)
        found = _STARTED.search(line)
        if found:
            return found[1]
    raise AssertionError(f"a part of Spark did not start: {''.join(printed)}")


def _logged(directory: Path) -> str:
    path = directory / "log4j2.properties"
    path.write_text(_LOG_SETTINGS)
    return f"-Dlog4j2.configurationFile={path.as_uri()}"
