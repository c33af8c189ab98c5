"""A Spark Connect server and a cluster of two workers, in the JVM of a session.

The server is started as Spark's own plugin starts one in a driver, the master and the workers as
their own programs do. So they need no JVM of their own. Ends them. Knows nothing of the jobs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

LOOPBACK: Final = "127.0.0.1"

#: Settings of a session whose JVM can be a Spark Connect server, at any free port.
CONNECT: Final = {
    "spark.connect.grpc.binding.address": LOOPBACK,
    "spark.connect.grpc.binding.port": "0",
}

#: The workers of a cluster, and the size of each.
_WORKERS: Final = 2
_WORKER_CORES: Final = 1
_WORKER_MEGABYTES: Final = 600


@contextmanager
def connect_server(spark: SparkSession) -> Iterator[str]:
    """Run a Spark Connect server in the JVM of a session with the settings above."""
    package: Any = spark._jvm.org.apache.spark.sql.connect.service  # type: ignore[union-attr]  # noqa: SLF001
    package.SparkConnectService.start(spark.sparkContext._jsc.sc())  # noqa: SLF001
    server = getattr(getattr(package, "SparkConnectService$"), "MODULE$")  # the Scala object
    yield f"sc://{LOOPBACK}:{server.localPort()}"
    server.stop(getattr(server, "stop$default$1")(), getattr(server, "stop$default$2")())


@contextmanager
def cluster(spark: SparkSession, directory: Path) -> Iterator[str]:
    """Run the master and two workers of a cluster in the JVM of a session. Yields its URL.

    A worker starts its executors as processes, as everywhere.
    """
    java: Any = spark._jvm  # noqa: SLF001  # Spark has no other way
    deploy, option = java.org.apache.spark.deploy, java.scala.Option
    conf = java.org.apache.spark.SparkConf()
    master = deploy.master.Master.startRpcEnvAndEndpoint(LOOPBACK, 0, 0, conf)._1()  # noqa: SLF001
    url = master.address().toSparkURL()
    urls = spark.sparkContext._gateway.new_array(java.java.lang.String, 1)  # type: ignore[union-attr]  # noqa: SLF001
    urls[0] = url
    workers = [
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            LOOPBACK,
            0,
            0,
            _WORKER_CORES,
            _WORKER_MEGABYTES,
            urls,
            str(directory / f"work-{number}"),
            option.apply(number),
            conf,
            option.empty(),
        )
        for number in range(_WORKERS)
    ]
    yield url
    for one in [*workers, master]:
        one.shutdown()
        one.awaitTermination()
