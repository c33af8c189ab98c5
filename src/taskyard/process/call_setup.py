"""The setup of a process before its first call of an executor, as in the standard library's pool.

The process takes over the key of `multiprocessing`, so that proxies of its managers work, and calls
the executor's initializer. An executor with its own processes writes both into a file that only its
user can read, and the header of each call has the path. Else the header has the initializer.

The processes are not started by `multiprocessing`. So its queues and locks among the arguments of
the initializer are pickled as for a process that it starts, except for descriptors: the process
opens those of this one, by /proc.
"""

import copyreg
import fcntl
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context, current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from taskyard.wire import pickled
from taskyard.wire.pickled import CallHeader, Pickled

#: Where the standard library reports an initializer that raised.
_logger = logging.getLogger("concurrent.futures")

# Without a reducer, a pickle would have the number of its descriptor, which is another process's.
copyreg.pickle(Connection, ForkingPickler._extra_reducers[Connection])  # type: ignore[attr-defined]  # noqa: SLF001


class InitializerFailed(Exception):
    """The initializer of an executor raised an exception. The text names that."""


class ParentDescriptor:
    """A descriptor of another process of the same user, for `multiprocessing`'s objects."""

    def __init__(self, descriptor: int) -> None:
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE

    def detach(self) -> int:
        """Return a descriptor of this process for the same pipe."""
        return os.open(self._path, self._mode | os.O_CLOEXEC)


#: Stands for the process that `multiprocessing` starts, while it pickles arguments.
_SPAWNING: Final[Any] = SimpleNamespace(DupFd=ParentDescriptor, duplicate_for_child=int)


@contextmanager
def inheritance() -> Iterator[None]:
    """Let `multiprocessing`'s queues and locks be pickled, for processes of this machine."""
    before = context.get_spawning_popen()
    context.set_spawning_popen(_SPAWNING)
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def write_setup(path: Path, initializer: bytes) -> None:
    """Write a file with the key of `multiprocessing` and the payload of the initializer's call."""
    content = pickle.dumps((bytes(current_process().authkey), initializer), pickled.PROTOCOL)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


class Setups:
    """The setups that were made in this process, each once."""

    def __init__(
        self, load: Callable[[Pickled], tuple[Any, Any, Any]], on_failed: Callable[[], object]
    ) -> None:
        """`load` returns the function and the arguments of a call.

        `on_failed` is called after an initializer has raised, and before the error is returned.
        """
        self._load = load
        self._on_failed = on_failed
        #: By the token of the executor, the error that its calls raise.
        self._errors: dict[str, str] = {}

    def ensure(self, header: CallHeader) -> None:
        """Make a call's setup, unless that was done. Raises `InitializerFailed`, then and later."""
        token = header.token
        if token not in self._errors:
            self._errors[token] = self._set_up(header)
        if self._errors[token]:
            raise InitializerFailed(self._errors[token])

    def _set_up(self, header: CallHeader) -> str:
        """Return the error, or ""."""
        try:
            initializer = header.setup
            if header.setup_file:
                key, initializer = pickled.unpickle(Path(header.setup_file).read_bytes())
                current_process().authkey = key
            if initializer:
                function, args, kwargs = self._load(pickled.decode_pickled_call(initializer))
                function(*args, **kwargs)
        except BaseException as error:
            _logger.critical("Exception in initializer:", exc_info=True)
            self._on_failed()
            return f"its initializer raised {type(error).__name__}: {error}"
        return ""
