"""Large arguments and results in a process that runs calls: at the broker of its worker.

The worker passes the broker's endpoint, its key file and its own name as variables. They are read
once: a call may change the environment. Without them there are no large values.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from taskyard.process.call_values import CallValues
from taskyard.process.current_task import BROKER_VARIABLE, KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskyard.process.value_access import ValueAccess

#: The worker's name.
WORKER_VARIABLE: Final = "TASKYARD_WORKER"

_TCP: Final = "tcp://"


class ChildValues:
    """The values of the calls in this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._endpoint = environment.get(BROKER_VARIABLE, "")
        self._key_file = environment.get(KEY_VARIABLE, "")
        self._worker = environment.get(WORKER_VARIABLE, "").encode()
        self._access: ValueAccess | None = None
        self.calls = CallValues(self._open if self._endpoint else None)

    def _open(self) -> ValueAccess:
        if self._access is None:
            # ZeroMQ, which most calls do not need.
            from taskyard.net.keys import read_peer_key  # noqa: PLC0415
            from taskyard.process.value_access import ValueAccess  # noqa: PLC0415

            uses_key = self._key_file and _TCP in self._endpoint
            key = read_peer_key(Path(self._key_file)) if uses_key else None
            self._access = ValueAccess(self._endpoint, key, worker=self._worker)
        return self._access
