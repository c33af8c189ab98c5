"""The start of each Python program of a JVM, before it imports anything of Spark.

The programs named here are passed to the server of `tests.pipeline.python_daemon`, which has the
imports already. Others start as usual. Imports little, because every program waits for it.
"""

import json
import os
import socket
import sys

#: As Spark starts them: `python -m MODULE WORDS…`.
SERVED = ("pyspark.daemon", "pyspark.sql.streaming.python_streaming_source_runner")


def pass_on(path: str, module: str, words: list[str]) -> None:
    """Pass our pipes to the server, and wait for the end of the program there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        request = {
            "module": module,
            "words": words,
            "directory": os.getcwd(),  # noqa: PTH109  # as text
            "environment": dict(os.environ),
        }
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        for standard in (0, 1):
            os.close(standard)
        connection.recv(1)


server = os.environ.get("TASKYARD_TESTS_PYTHON_DAEMON")
if server and sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in SERVED:
    pass_on(server, sys.orig_argv[2], sys.orig_argv[3:])
    os._exit(0)
