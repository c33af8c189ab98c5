"""Spark's Python programs, forked from one process that has imported what they use.

Spark starts a daemon for each kind of worker, and the daemon forks the workers. Each of them
imports Spark, pandas and Taskyard: a second of CPU for a few rows. Here a program that Spark starts
passes its pipes to a server, which forks it. The program's part is `python_start/sitecustomize.py`,
because Spark has no setting for the daemons of its planner. Knows no job.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
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
#: The directory from which each Python program of a JVM imports `sitecustomize`.
START: Final = Path(__file__).parent / "python_start"

REQUEST_BYTES_MAX: Final = 1 << 20

PACKAGES: Final = ("pyspark.sql.worker", "taskyard", "pyspark_taskyard")
#: The package `deltalake` starts a thread, so the modules that import it are left out.
THREADED: Final = "taskyard.pipeline.store."
MODULES: Final = ("pandas", "pyarrow.parquet", "pyspark.worker")


@contextmanager
def served(path: Path) -> Iterator[dict[str, str]]:
    """Run the server. Yields the variables by which a JVM's Python programs find it."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.bind(str(path))
        ours.listen()
        words = [sys.executable, "-m", MODULE, str(ours.fileno())]
        paths = list(filter(None, sys.path))
        process = subprocess.Popen(
            words,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | NO_THREADS,
            pass_fds=[ours.fileno()],
            stdin=subprocess.DEVNULL,
        )
    try:
        yield {"PYTHONPATH": os.pathsep.join([str(START), *paths]), SOCKET: str(path)}
    finally:
        process.terminate()
        process.wait()


def serve(listening: socket.socket) -> NoReturn:
    """Fork a process for each request."""
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
    """Run a module with the pipes, directory and variables of the program that requests it."""
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
    runpy.run_module(request["module"], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
