"""Sessions of a Spark Connect server: `sc://HOST:PORT`.

The server is the driver. It has the JVM, the cores and its own settings, and its Python workers
import Taskyard there. This process only sends plans to it. Knows nothing of the jobs.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final, cast

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from taskyard.errors import NotInstalled, UnusableEndpoint
from taskyard.pipeline import jvm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Spark's own variable for the server of programs that name none.
VARIABLE: Final = "SPARK_REMOTE"

#: Spark's own variable that makes its functions return expressions for a server.
_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"

_SCHEME: Final = "sc://"

#: A server accepts a connection by then. Spark itself would try for minutes.
_ACCEPT_SECONDS_MAX: Final = 10

#: Settings of a session. All others belong to the server.
_SESSION_SETTINGS: Final = "spark.sql."


def is_server(master: str) -> bool:
    """Return whether a master is a Spark Connect server."""
    return master.startswith(_SCHEME)


def session(url: str, settings: Mapping[str, str]) -> SparkSession:
    """Connect to a server. Raises UserError if there is none.

    Only settings of a session are sent. A signal interrupts its queries at the server.
    """
    try:
        from pyspark.sql.connect.client import DefaultChannelBuilder  # noqa: PLC0415  # needs gRPC
        from pyspark.sql.connect.session import SparkSession as RemoteSession  # noqa: PLC0415
    except ImportError as error:
        raise NotInstalled(
            f"{url}: {error.name or error} not installed (`pip install 'pyspark[connect]'`)"
        ) from error
    try:
        channel = DefaultChannelBuilder(url)
        _require_server(url, channel.endpoint)
        own = {name: one for name, one in settings.items() if name.startswith(_SESSION_SETTINGS)}
        os.environ[_MODE] = "1"
        spark = RemoteSession.Builder().channelBuilder(channel).config(map={**own}).create()
        jvm.before_end(spark.interruptAll)
    except PySparkException as error:
        os.environ.pop(_MODE, None)
        raise UnusableEndpoint(f"{url}: {_first_line(error)}") from error
    return cast("SparkSession", spark)


def stop(spark: SparkSession) -> None:
    """Stop a session. A new one may be of another kind."""
    spark.stop()
    if is_remote(spark):
        os.environ.pop(_MODE, None)
        jvm.before_end(None)


def is_remote(spark: SparkSession) -> bool:
    """Return whether a session is one of a server."""
    return "connect" in type(spark).__module__.split(".")


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Hide Spark's variable, by which it would connect to a server in place of the master."""
    url = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if url is not None:
            os.environ[VARIABLE] = url


def _require_server(url: str, endpoint: str) -> None:
    """Raise UserError if nothing accepts connections there."""
    host, _, port = endpoint.rpartition(":")
    try:
        address = (host.strip("[]"), int(port))
        socket.create_connection(address, _ACCEPT_SECONDS_MAX).close()
    except OSError as error:
        raise UnusableEndpoint(
            f"{url}: no Spark Connect server: {error.strerror or error} (start one with "
            "`start-connect-server.sh`)"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
