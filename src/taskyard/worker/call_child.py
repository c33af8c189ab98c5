"""The program of a Python child process: calls functions for its worker in turn.

Started as `python -P -m taskyard.worker.call_child SOCKET PIPE LOG MODULE...` with a socket to the
worker, a pipe from it, the descriptor of the task's output and the allowed modules, or forked from
a worker at its start. It exits when the worker closes the socket. The result of a call goes over
the socket. Tracebacks go to the task's output. Prints do, too, unless they go to the stdout and
stderr of the worker.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import os
import resource
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from taskyard.calls import current_task, pickled
from taskyard.calls.inputs import available, fill
from taskyard.calls.payloads import Call, decode_call, encode_value
from taskyard.calls.pickled import CallHeader, Pickled
from taskyard.calls.plain_pickles import PlainLoader
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.runs import Run
from taskyard.errors import (
    BytesDamaged,
    BytesMissing,
    BytesNotStored,
    NotEncodable,
    UserError,
    is_final,
)
from taskyard.process.value_access import CallValues
from taskyard.worker import allow_list, call_frames
from taskyard.worker.allow_list import AllowList
from taskyard.worker.call_frames import CallFrame, ResultFrame
from taskyard.worker.jobs import PICKLED_BYTES_MAX, READ_BYTES_MAX, RESULT_BYTES_MAX, cut_reason
from taskyard.worker.processes import task_env

if TYPE_CHECKING:
    from taskyard.calls.environments import Setups
    from taskyard.process.value_access import ValueAccess

#: Resets the high-water mark of memory (Linux).
_RESET: Final = b"5"

_STATUS_BYTES_MAX: Final = 4096


class UsageMeter:
    """Measures the time and memory of one call after the other.

    Peak memory is the kernel's high-water mark, which is reset before each call. 0 where that is
    not possible.
    """

    def __init__(self) -> None:
        self._reset = self._status = -1
        with contextlib.suppress(OSError):
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._started_ns = self._began_ns = self._cpu_ns = 0

    def start(self) -> None:
        """Begin to measure a call."""
        if self._reset >= 0:
            try:
                os.pwrite(self._reset, _RESET, 0)
            except OSError:
                self._reset = -1
        self._cpu_ns = _cpu_ns()
        self._started_ns, self._began_ns = time.time_ns(), time.monotonic_ns()

    def stop(self) -> Run:
        """Return the time and memory that the call used."""
        run_ns = time.monotonic_ns() - self._began_ns
        cpu_ns = max(1, _cpu_ns() - self._cpu_ns)
        return Run(self._started_ns, run_ns, None, cpu_ns, self._peak_bytes())

    def _peak_bytes(self) -> int:
        try:
            status = os.pread(self._status, _STATUS_BYTES_MAX, 0)
        except OSError:
            return 0
        peak = status.partition(b"VmHWM:")[2].split(maxsplit=1)
        return int(peak[0]) * 1024 if peak else 0


def _cpu_ns() -> int:
    """Return the CPU time of this process and of the child processes that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round((children.ru_utime + children.ru_stime) * SECOND_NS)


#: The descriptors of stdout and stderr.
_STANDARD_FILES: Final = (1, 2)

#: How long to wait for the worker to read output, and how often to check.
_READ_SECONDS_MAX: Final = 0.1
_READ_STEP_SECONDS: Final = 0.0002

_TCP: Final = "tcp://"

#: Files whose frames are cut from tracebacks.
_OWN_FILES = (__file__, allow_list.__file__, pickled.__file__)


class _CallRefused(Exception):
    """A call that would fail again at every attempt."""


class _NoRoom(Exception):
    """There is no room for the result of a call."""


def _values_of_calls(environment: Mapping[str, str]) -> CallValues:
    """Return large arguments and results of this process, at the broker of its worker.

    The variables are read once: a call may change them. Without them there are no large values.
    """
    endpoint = environment.get(current_task.BROKER_VARIABLE, "")
    key_file = environment.get(current_task.KEY_VARIABLE, "")
    worker = environment.get(current_task.WORKER_VARIABLE, "").encode()

    @cache
    def access() -> "ValueAccess":
        # ZeroMQ, which most calls do not need.
        from taskyard.net.keys import read_peer_key  # noqa: PLC0415
        from taskyard.process.value_access import ValueAccess  # noqa: PLC0415

        key = read_peer_key(Path(key_file)) if key_file and _TCP in endpoint else None
        return ValueAccess(endpoint, key, worker=worker)

    return CallValues(access if endpoint else None)


class CallRunner:
    """Calls functions. Writes tracebacks to the descriptor `log`."""

    def __init__(self, allow: Sequence[str], log: int) -> None:
        self._allowed = AllowList(allow)
        self._allowed.watch_imports()
        #: Loads the calls of senders that are not trusted. None: all are.
        self._loader: PlainLoader | None = None
        if allow_list.ANY_PICKLE not in allow:
            self._loader = PlainLoader(self._allowed.find_pickled)
        self._log = log
        self._setups: Setups | None = None
        self._values = _values_of_calls(os.environ)
        #: The task whose values the current call may read.
        self._task = ""
        self._directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)

    def run(self, call: CallFrame) -> ResultFrame:
        """Call a function. An exception becomes a result, unless the function ends the process."""
        work = decode_call(call.payload)
        self._task = call.name.decode()
        for name, text in task_env(call.name, call.attempt, call.campaign).items():
            os.environ[name] = text
        try:
            if not call.env and not call.inputs:
                return self._run_work(work, call)
            with _extra_environment(call.env), available(call.inputs):
                return self._run_work(work, call)
        finally:
            # The next call begins in the worker's directory.
            os.fchdir(self._directory)
            _flush()

    def _run_work(self, work: Call | Pickled, call: CallFrame) -> ResultFrame:
        if isinstance(work, Pickled):
            return self._run_pickled(work)
        return self._run_call(work, call.env)

    def _run_call(self, call: Call, env: Mapping[str, str]) -> ResultFrame:
        """Call a function by its name. Variables of the worker replace equal names of the call."""
        try:
            # First: an import must not see the directory and the variables that a sender chose.
            function = self._function(call.call)
            if not call.env:
                return ResultFrame(Outcome.DONE, self._result(call, function))
            own = {name: text for name, text in call.env.items() if name not in env}
            with _extra_environment(own):
                return ResultFrame(Outcome.DONE, self._result(call, function))
        except SystemExit as error:
            _exit_process(error)
        except _CallRefused as error:
            return _refusal(error)
        except BaseException as error:  # noqa: BLE001 - no exception may end the process
            _print_traceback(error, self._log)
            return _failure(error)

    def _run_pickled(self, call: Pickled) -> ResultFrame:
        """Call a pickled function. Exceptions of any kind go back to the caller."""
        try:
            return ResultFrame(Outcome.DONE, self._pickled_result(call))
        except _NoRoom as error:
            return ResultFrame(Outcome.RETRY_AT, cut_reason(str(error).encode(errors="replace")))
        except _CallRefused as error:
            return _refusal(error, _encoded_cause(error, call.header.token))
        except BaseException as error:  # noqa: BLE001 - no exception may end the process
            printed = _print_traceback(error, self._log)
            return _failure(error, pickled.encode_exception(error, printed, call.header.token))

    def _result(self, call: Call, function: Callable[..., Any]) -> bytes:
        if call.cwd is not None:
            os.chdir(call.cwd)
        args, kwargs = call.args, call.kwargs
        if call.results:
            try:
                with self._guard():
                    args, kwargs = fill(args), fill({**kwargs})
            except (UserError, OSError) as error:
                raise _CallRefused(str(error)) from error
        value = function(*args, **kwargs)
        try:
            return _check_size(encode_value(value, "result"), RESULT_BYTES_MAX)
        except UserError as error:
            raise _CallRefused(str(error)) from error

    def _pickled_result(self, call: Pickled) -> bytes:
        is_set_up = bool(call.header.setup_file or call.header.setup)
        if is_set_up and self._loader is None:
            self._set_up(call.header)
        try:
            function, args, kwargs = (
                self._load(call) if self._loader is None else self._load_plain(call, self._loader)
            )
        except (UserError, BytesMissing, BytesDamaged) as error:
            raise _CallRefused(str(error)) from error
        except BaseException as error:  # even an exit: the function was not called
            raise _CallRefused(f"can't unpickle the call: {_exception_text(error)}") from error
        value = function(*args, **kwargs)
        try:
            return _check_size(self._values.encode_result(value), PICKLED_BYTES_MAX)
        except BytesNotStored as error:
            raise _NoRoom(str(error)) from error
        except UserError as error:
            raise _CallRefused(str(error)) from error

    def _load(self, call: Pickled) -> tuple[Any, Any, Any]:
        """Return the function, the arguments and the named arguments of a pickled call."""
        sys.path[:0] = [place for place in call.header.path if place not in sys.path]
        function, args, kwargs = self._values.load_call(call, self._task)
        return function, args, kwargs

    def _load_plain(self, call: Pickled, loader: PlainLoader) -> tuple[Any, Any, Any]:
        """Like `_load`, for a sender that is not trusted. The search path is not used."""
        header = call.header
        if header.setup_file or header.setup:
            raise UserError(allow_list.PICKLE_REFUSAL)
        with self._guard():
            return loader.load_call(lambda: self._values.load_call(call, self._task))

    def _guard(self) -> AbstractContextManager[None]:
        return nullcontext() if self._loader is None else pickled.guarded(self._loader.loads)

    def load_result(self, result: bytes) -> Any:  # noqa: ANN401  # any value of a user
        """Load the result of another task whose large parts are values."""
        return self._values.load_result(result, self._task)

    def _set_up(self, header: CallHeader) -> None:
        """Prepare this process for the calls of an executor."""
        if self._setups is None:
            from taskyard.calls.environments import Setups  # noqa: PLC0415  # multiprocessing

            self._setups = Setups(self._load, _run_exit_functions)
        self._setups.ensure(header)

    def _function(self, call: str) -> Callable[..., Any]:
        try:
            return self._allowed.find(call)
        except UserError as error:
            raise _CallRefused(str(error)) from error


@contextmanager
def _extra_environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set variables for one call."""
    before = {name: os.environ.get(name) for name in added}
    try:
        # It may fail at any of them: with text that this process can't encode.
        os.environ.update(added)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_size(result: bytes, bytes_max: int) -> bytes:
    if len(result) > bytes_max:
        raise _CallRefused(
            f"result too large: {len(result)} bytes, at most {bytes_max} (write it to a file and "
            "return the file's name)"
        )
    return result


def _refusal(error: _CallRefused, line: bytes = b"") -> ResultFrame:
    reason = cut_reason(str(error).encode(errors="replace"))
    return ResultFrame(Outcome.FAILED_FINAL, reason, line)


def _encoded_cause(error: _CallRefused, token: str) -> bytes:
    """Return a line with the exception of a result that can't be pickled, else none."""
    cause = error.__cause__
    if not isinstance(cause, NotEncodable):
        return b""
    return pickled.encode_exception(cause, f"{_exception_text(cause)}\n", token)


def _failure(error: BaseException, line: bytes = b"") -> ResultFrame:
    outcome = Outcome.FAILED_FINAL if is_final(error) else Outcome.FAILED
    return ResultFrame(outcome, cut_reason(_exception_text(error).encode(errors="replace")), line)


def _flush() -> None:
    """Flush stdout and stderr, so that all output is in the pipe before the result is sent."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S112 - a function may have closed or replaced them
            continue


def _exit_process(error: SystemExit) -> NoReturn:
    """Exit as `sys.exit` asks, at once, without waiting for threads that the function left."""
    status = error.code
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)  # noqa: T201 - as Python itself does
        status = 1
    _flush()
    os._exit((status or 0) & 0xFF)


def _print_traceback(error: BaseException, log: int) -> str:
    """Print a traceback from the function on, and return the text."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in _OWN_FILES:
        frame = frame.tb_next
    _flush()
    text = "".join(traceback.format_exception(type(error), error, frame))
    _write(log, text.encode(errors="backslashreplace"))
    return text


def _exception_text(error: BaseException) -> str:
    """Return the last line of a traceback: type and message."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - `__str__` of a user's class
        text = "(its message can't be shown)"
    return f"{name}: {text}" if text else name


def _write(descriptor: int, content: bytes) -> None:
    while content:
        packet = content[: call_frames.PACKET_BYTES_MAX]
        content = content[os.write(descriptor, packet) :]


class OutputPipe:
    """The pipe of the task's output."""

    def __init__(self, log: int) -> None:
        # A function may redirect the standard files.
        self._descriptor = os.dup(log) if log in _STANDARD_FILES else log
        self._count = bytearray(4)

    def has_bytes(self) -> bool:
        """Return whether there is output that the worker has not read."""
        try:
            fcntl.ioctl(self._descriptor, termios.FIONREAD, self._count)
        except OSError:  # no pipe
            return False
        return any(self._count)

    def wait_until_read(self) -> None:
        """Wait until the worker has read the output of a call, before the next call prints.

        Not for long: a thread that a call left behind may print all the time.
        """
        until = time.monotonic() + _READ_SECONDS_MAX
        while self.has_bytes() and time.monotonic() < until:
            time.sleep(_READ_STEP_SECONDS)


class WorkerSlot:
    """The slot of the current call, which its worker gives to other tasks while the call waits."""

    def __init__(self, descriptor: int, resumed: int) -> None:
        self._descriptor, self._resumed = descriptor, resumed

    def give_back(self) -> None:
        _flush()
        _write(self._descriptor, call_frames.pack(call_frames.WAIT))

    def retake(self) -> None:
        _write(self._descriptor, call_frames.pack(call_frames.RESUME))
        if not os.read(self._resumed, 1):
            os._exit(1)  # the worker has ended


def _run_exit_functions() -> None:
    """Do what is left at exit. Queues of `multiprocessing` are sent by threads, for example."""
    atexit._run_exitfuncs()  # noqa: SLF001 - no other function does it in a forked process


def serve(descriptor: int, log: int, allow: Sequence[str]) -> None:
    """Serve calls until the worker closes the socket. `log` is the task's output.

    Receives one call at a time, so that the worker can take back calls that wait.
    """
    caller, output = CallRunner(allow, log), OutputPipe(log)
    inbox, meter = call_frames.FrameBuffer(), UsageMeter()
    _write(descriptor, call_frames.READY)
    with pickled.large_results(caller.load_result):
        while received := os.read(descriptor, READ_BYTES_MAX):
            for frame in inbox.add(received):
                meter.start()
                result = caller.run(call_frames.decode_call(frame))
                result.printed, result.run = output.has_bytes(), meter.stop()
                _write(descriptor, call_frames.pack(result))
                if result.printed:
                    output.wait_until_read()


def run(
    descriptor: int,
    resumed: int,
    log: int,
    allow: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> None:
    """Prepare this process, and serve calls until the worker closes the socket.

    A byte from `resumed` lets a call go on that has waited for other tasks. `log` is the descriptor
    of the task's output, 2 if stdout and stderr are that. `env` has variables that a forked process
    does not have yet.
    """
    os.environ.update(env or {})
    # Processes that a function starts must not inherit them.
    for own in (descriptor, resumed):
        os.set_inheritable(own, False)  # noqa: FBT003 - positional only
    current_task.install_slot(WorkerSlot(descriptor, resumed))
    # Show Python frames after a crash, and keep the output printed before it.
    faulthandler.enable(log)
    if log not in _STANDARD_FILES:
        os.set_inheritable(log, False)  # noqa: FBT003 - positional only
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # Only now, after our own imports: a user's `json.py` must not replace Python's.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a string is needed
    serve(descriptor, log, allow)
    _run_exit_functions()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
