"""Spark's Python daemons, forked from one process that has imported what their workers use.

Spark starts a daemon for each kind of worker, and the daemon forks the workers. Each of them
imports Spark, pandas and Taskyard: a second of CPU for a few rows. Here the program that Spark
starts as a daemon passes its pipes to a server, which forks the daemon. Knows no job.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A process with threads can't be forked safely: one for numpy, no background thread for Arrow.
NO_THREADS: Final = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

#: The variable with the path of the server's socket.
SOCKET: Final = "TASKYARD_TESTS_PYTHON_DAEMON"
MODULE: Final = "tests.pipeline.python_daemon"

REQUEST_BYTES_MAX: Final = 1 << 20

PACKAGES: Final = ("pyspark.sql.worker", "taskyard", "pyspark_taskyard")
#: The package `deltalake` starts a thread, so the modules that import it are left out.
THREADED: Final = "taskyard.pipeline.store."
MODULES: Final = ("pandas", "pyarrow.parquet", "pyspark.daemon", "pyspark.worker")


@contextmanager
def served(path: Path) -> Iterator[dict[str, str]]:
    """Run the server. Yields the variables by which a JVM's Python programs find it."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.bind(str(path))
        ours.listen()
        words = [sys.executable, "-m", MODULE, "--serve", str(ours.fileno())]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            words,
            env=os.environ | variables | NO_THREADS,
            pass_fds=[ours.fileno()],
            stdin=subprocess.DEVNULL,
        )
    try:
        yield variables | {SOCKET: str(path)}
    finally:
        process.terminate()
        process.wait()


def serve(listening: socket.socket) -> NoReturn:
    """Fork a daemon for each request."""
    for name in [*MODULES, *(one for package in PACKAGES for one in modules_of(package))]:
        importlib.import_module(name)
    threads = [*Path("/proc/self/task").glob("*")]
    assert len(threads) <= 1, "a child would wait for missing threads"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            become(connection)
        connection.close()


def modules_of(package: str) -> Iterator[str]:
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        if not module.name.endswith("__main__") and not module.name.startswith(THREADED):
            yield module.name


def become(connection: socket.socket) -> NoReturn:
    """Run a daemon with the pipes of the program that requests it."""
    from pyspark import daemon  # noqa: PLC0415  # not in the program that requests it

    message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 3)
    request = json.loads(message)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["words"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    daemon.manager()
    sys.exit()


def pass_on() -> None:
    """Pass our pipes to the server, and wait for the end of the daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[SOCKET])
        request = {
            "words": sys.argv[1:],
            "directory": os.getcwd(),  # noqa: PTH109  # as text
            "environment": dict(os.environ),
        }
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        for standard in (0, 1):
            os.close(standard)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    pass_on()
