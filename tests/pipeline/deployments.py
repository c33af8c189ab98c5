"""A Spark Connect server and a cluster of two workers, as processes of this machine.

Both are made from the jars of the installed PySpark. Owns their processes and ends them. Knows
nothing of the jobs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark

from taskyard.pipeline import java

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SPARK_HOME: Final = Path(pyspark.__file__).parent
LOOPBACK: Final = "127.0.0.1"

#: Errors, and the line with the address of a server that has started.
_LOG_SETTINGS: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.server.name = org.apache.spark.sql.connect.service.SparkConnectServer
logger.server.level = info
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

_STARTED: Final = re.compile(
    r"Starting Spark (?:master at|worker) (?P<daemon>\S+)"
    r"|Spark Connect server started at: \S*?(?P<port>\d+)\s*$"
)


@contextmanager
def connect_server(
    directory: Path, java_options: str, variables: Mapping[str, str], conf: Mapping[str, str]
) -> Iterator[str]:
    """Run a Spark Connect server with two cores. Yields its URL."""
    logged = _logged(directory)
    settings = {
        "spark.master": "local[2]",
        "spark.driver.extraJavaOptions": f"{java_options} {logged}",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": "0",
        **conf,
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    main = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    command = [str(SPARK_HOME / "bin" / "spark-submit"), *main, *words, "spark-internal"]
    with _process(command, directory, {**variables, "SPARK_SUBMIT_OPTS": java_options}) as server:
        yield f"sc://{LOOPBACK}:{_place(server)['port']}"


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
        url = _place(master)["daemon"]
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


def _place(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the address that a program prints when it has started."""
    assert process.stderr is not None
    printed = []
    for line in process.stderr:
        printed.append(line)
        found = _STARTED.search(line)
        if found:
            return found.groupdict()
    raise AssertionError(f"a part of Spark did not start: {''.join(printed)}")


def _logged(directory: Path) -> str:
    path = directory / "log4j2.properties"
    path.write_text(_LOG_SETTINGS)
    return f"-Dlog4j2.configurationFile={path.as_uri()}"
