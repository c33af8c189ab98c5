"""Where a worker runs commands: in its own directory, or in that of their submitter.

Owns the decision by host, the variables of a command, and the note on an attempt that ran elsewhere
than its submitter asked. Starts no processes.
"""

import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct, structs

from taskyard.calls.environments import decode_environment, merged_variables
from taskyard.calls.payloads import Command
from taskyard.core.limits import NOTE_BYTES_MAX

logger = logging.getLogger("taskyard.worker")

#: Environments that are kept prepared. Tasks of few submissions run at once.
_KEPT_MAX: Final = 64


class Workplace(Struct, frozen=True):
    """Directory and variables of some commands."""

    env: Mapping[str, str]
    #: None: the worker's own.
    cwd: str | None = None
    #: For users. b"": the commands run where their submitter asked.
    note: bytes = b""

    def place(self, command: Command) -> Command:
        """Return a command with the directory that it runs in. None: the worker's own."""
        if self.cwd is None:
            return command
        # A command's own directory is relative to the submitter's, or absolute.
        cwd = os.path.join(self.cwd, command.cwd or "").rstrip("/") or "/"  # noqa: PTH118 - faster
        return structs.replace(command, cwd=cwd)


class Workplaces:
    """The workplaces of a worker, by the environments of submissions."""

    def __init__(self, host: str, env: Mapping[str, str]) -> None:
        self._host = host
        self._own = Workplace(env)
        self._prepared = lru_cache(_KEPT_MAX)(self._prepare)

    def of(self, environment: bytes) -> Workplace:
        """Return the workplace of a submission's commands. b"": the worker's own.

        Raises `PeerError` for an environment that is not valid.
        """
        return self._prepared(environment) if environment else self._own

    def _prepare(self, raw: bytes) -> Workplace:
        environment = decode_environment(raw)
        if environment.host == self._host:
            return Workplace(merged_variables(environment, self._own.env), environment.cwd)
        # The directory may be private, so neither the note nor the log names it.
        host = environment.host.encode(errors="backslashreplace").decode()
        text = f"ran in the worker's own directory and environment: submitted on host {host}"
        logger.warning("commands submitted on host %s run in the worker's own directory", host)
        return Workplace(self._own.env, note=text.encode()[:NOTE_BYTES_MAX])
