"""One JVM with Spark for all processes of a test run.

A JVM takes seconds of CPU to start and more until it is warm. The first process of xdist that needs
Spark starts it and leaves the port of its gateway in the directory of the run. Each other process
attaches to it with a session of its own. Locks of files say which processes use it, so a killed
process is not waited for. The first process ends the JVM, after the others have released it.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from taskyard.pipeline.session import session_scope
from tests.pipeline import python_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

#: The file with the port and the secret of the gateway.
ADDRESS: Final = "gateway.json"
#: Locked while the JVM starts.
START: Final = "start.lock"
#: Locked by each process that uses the JVM.
USERS: Final = "users.lock"


class SharedJvm(NamedTuple):
    """A session in the JVM of a run."""

    session: SparkSession
    #: The variables of a JVM whose Python programs are forked from one process.
    variables: dict[str, str]


@contextmanager
def shared_jvm(directory: Path, conf: Mapping[str, str]) -> Iterator[SharedJvm]:
    """Start the JVM of a run, or attach to the one that is running."""
    with _locked(directory / START, fcntl.LOCK_EX) as start:
        path = directory / ADDRESS
        if path.exists():
            with _locked(directory / USERS, fcntl.LOCK_SH):
                _unlock(start)
                found = json.loads(path.read_text())
                yield SharedJvm(_attached(found["port"], found["secret"]), found["variables"])
            return
        with (
            python_daemon.served(directory / "python_daemon") as variables,
            _started(conf, variables) as session,
        ):
            parameters = SparkContext._gateway.gateway_parameters  # type: ignore[union-attr]  # noqa: SLF001
            found = {"port": parameters.port, "secret": parameters.auth_token}
            path.write_text(json.dumps(found | {"variables": variables}))
            _unlock(start)
            yield SharedJvm(session, variables)
            path.unlink()
            with _locked(directory / USERS, fcntl.LOCK_EX):
                pass  # no other process uses it


@contextmanager
def _started(conf: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[SparkSession]:
    is_java_chosen = "JAVA_HOME" in os.environ
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            session = stack.enter_context(session_scope("tests", "local[2]", conf=conf))
        # The session sets it. Commands that inherit it would not find the class archive.
        if not is_java_chosen:
            del os.environ["JAVA_HOME"]
        yield session


def _attached(port: int, secret: str) -> SparkSession:
    """Return a session of this process in a JVM that another one has started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_GATEWAY_PORT", str(port))
        patch.setenv("PYSPARK_GATEWAY_SECRET", secret)
        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001
    spark = gateway.jvm.org.apache.spark
    scala_context = spark.SparkContext.getOrCreate()
    java_context = spark.api.java.JavaSparkContext.fromSparkContext(scala_context)
    conf = SparkConf(_jconf=scala_context.conf())
    context = SparkContext(gateway=gateway, jsc=java_context, conf=conf)
    own = spark.sql.SparkSession.getDefaultSession().get().newSession()
    return SparkSession(context, jsparkSession=own)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    """Hold a lock. It ends with this process at the latest."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)
