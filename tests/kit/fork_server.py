"""Start `taskyard` commands by forking an interpreter that has imported them: 0.3 s less for each.

The tests start a thousand commands. A process of its own, without threads, imports the package
once. `subprocess` then gets each command from it by `clone` with CLONE_PARENT: a child of the
calling process, with its own pid, pipes, group, directory and environment, to be signalled, killed
and reaped like any other. Its imports and `/proc/PID/cmdline` are those of the server, and it exits
without deleting its modules.

A command that depends on how its interpreter starts is still executed: another program than
`python -m taskyard.cli`, other variables of Python or of the locale, a terminal as stdin or stdout.
So are commands that a command starts, and all of them where `clone` has an unknown number.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, NoReturn

#: The number of the system call.
CLONE: Final = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT: Final = 0x8000

#: Imported by a command that needs them: they may be missing, or start threads.
NOT_IMPORTED: Final = (
    *("taskyard.pipeline", "taskyard.spark", "taskyard.cli.pipeline", "taskyard.demo"),
    *(
        "taskyard.journal.history_arrow",
        "taskyard.postgresql",
        "taskyard.joblib",
        "taskyard.web",
    ),
)

MODULE: Final = ("-m", "taskyard.cli")
#: A command with a longer line or environment is executed.
REQUEST_BYTES_MAX: Final = 1 << 16

_execute: Final[Any] = subprocess._fork_exec  # type: ignore[attr-defined]  # noqa: SLF001


def install() -> None:
    """Let `subprocess` in this process get its commands from a server."""
    if platform.machine() in CLONE:
        subprocess._fork_exec = ForkServer().fork_exec  # type: ignore[attr-defined]  # noqa: SLF001


class ForkServer:
    """The server as its clients see it. It is started by the first command, and ends with us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._variables = _of_interpreter(dict(os.environ))

    def fork_exec(self, *how: Any) -> int:
        """Start a command, as `_posixsubprocess.fork_exec` does, and return its pid."""
        request, descriptors = request_of(*how)
        message = json.dumps(request).encode()
        if (
            request is None
            or len(message) > REQUEST_BYTES_MAX
            or _of_interpreter(request["environment"]) != self._variables
        ):
            return int(_execute(*how))
        with self._lock:
            if self._socket is None:
                self._socket = start_server()
                atexit.register(self._socket.close)  # else Python warns of it
            socket.send_fds(self._socket, [message], descriptors)
            return int(self._socket.recv(REQUEST_BYTES_MAX))


def start_server() -> socket.socket:
    """Start the server, and return the socket for requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-P", __file__, str(theirs.fileno())]
    with theirs:
        # Python warns of a process that is never waited for.
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        ).returncode = 0
    return ours


def request_of(  # noqa: PLR0913, PLR0917  # the arguments are those of `fork_exec`
    words: list[Any],
    _programs: Any,
    close_fds: bool,  # noqa: FBT001
    passed: tuple[int, ...],
    directory: Any,
    environment: list[bytes] | None,
    stdin: int,
    _1: int,
    _2: int,
    stdout: int,
    _3: int,
    stderr: int,
    _4: int,
    _5: int,
    restore_signals: bool,  # noqa: FBT001
    new_session: bool,  # noqa: FBT001
    group: int,
    gid: Any,
    gids: Any,
    uid: Any,
    umask: int,
    preexec: Any,
    *_: Any,
) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the request for a command, and its stdin, stdout and stderr. None: execute it."""
    python, *rest = map(os.fsdecode, words)
    is_safe = rest[:1] == ["-P"]
    rest = rest[is_safe:]
    variables = _variables(environment)
    descriptors = [
        standard if given == -1 else given for standard, given in enumerate((stdin, stdout, stderr))
    ]
    if (
        python != sys.executable
        or tuple(rest[: len(MODULE)]) != MODULE
        or not (close_fds and restore_signals)
        or len(passed) != 1  # the pipe for a failure to execute
        or any(one is not None for one in (gid, gids, uid, preexec))
        or umask >= 0
        or any(map(os.isatty, descriptors))
        or not Path(directory or ".").is_dir()
    ):
        return None, []
    return {
        "words": rest[len(MODULE) :],
        "is_safe": is_safe,
        "directory": os.fsdecode(directory or Path.cwd()),
        "environment": variables,
        "new_session": new_session,
        "group": group,
    }, descriptors


def _variables(environment: list[bytes] | None) -> dict[str, str]:
    """Return the variables of a command as a mapping. None: those of this process."""
    if environment is None:
        return dict(os.environ)
    pairs = (os.fsdecode(one).split("=", 1) for one in environment)
    return {name: value for name, value in pairs}  # noqa: C416  # typed as pairs


def _of_interpreter(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables that the start of an interpreter depends on."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(("PYTHON", "LC_", "LANG", "COVERAGE", "COV_", "LD_"))
    }


# The server.


def serve(requests: socket.socket) -> None:
    """Fork a command for each request, until the client has ended."""
    for module in pkgutil.walk_packages(_package_path(), "taskyard."):
        if not module.name.startswith(NOT_IMPORTED) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.freeze()
    (_only_thread,) = Path("/proc/self/task").iterdir()  # a child would wait for missing threads
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 3)
        if not request:
            return
        pid = fork_sibling()
        if pid == 0:
            os.close(requests.detach())  # else its end would close a descriptor of the command's
            become(json.loads(request), descriptors)
        requests.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _package_path() -> list[str]:
    import taskyard  # noqa: PLC0415  # clients need no product

    return list(taskyard.__path__)


def fork_sibling() -> int:
    """Fork a child of our parent. Return its pid, or 0 in the child."""
    ctypes.pythonapi.PyOS_BeforeFork()
    flags = CLONE_PARENT | signal.SIGCHLD
    # PyDLL: the child needs the lock of the interpreter, as after `os.fork`.
    pid: int = ctypes.PyDLL(None).syscall(CLONE[platform.machine()], flags, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def become(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run a command in this process, and exit as it does."""
    if request["new_session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if not request["is_safe"]:
        sys.path.insert(0, request["directory"])
    sys.argv[1:] = request["words"]
    try:
        runpy.run_module(MODULE[1], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, int):
            end(ending.code)
        raise
    sys.exit(0)


def end(status: int) -> NoReturn:
    """Exit as the interpreter does, without deleting its modules, which would copy their memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
