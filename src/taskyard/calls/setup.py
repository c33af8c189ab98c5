"""The setup of a process before its first call of an executor, as in the standard library's pool.

The process calls the executor's initializer. An executor with its own processes writes it into a
file that only its user can read, and the header of each call has the path. Else the header has the
initializer.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskyard.calls import pickled
from taskyard.calls.pickled import CallHeader, Pickled

#: Where the standard library reports an initializer that raised.
_logger = logging.getLogger("concurrent.futures")


class InitializerFailed(Exception):
    """The initializer of an executor raised an exception. The text names that."""


def write_setup(path: Path, initializer: bytes) -> None:
    """Write a file with the payload of the initializer's call."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(initializer)


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
                initializer = Path(header.setup_file).read_bytes()
            if initializer:
                function, args, kwargs = self._load(pickled.decode_pickled_call(initializer))
                function(*args, **kwargs)
        except BaseException as error:
            _logger.critical("Exception in initializer:", exc_info=True)
            self._on_failed()
            return f"its initializer raised {type(error).__name__}: {error}"
        return ""
