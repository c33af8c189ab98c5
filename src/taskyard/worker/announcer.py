"""Lines for the user of a worker process: its connection to the broker, and its shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskyard.core.model import counted

if TYPE_CHECKING:
    from collections.abc import Callable


class Announcer:
    """Announces to the user whether a broker answers, and the steps of a shutdown."""

    def __init__(self, name: str, announce: Callable[[str], None], *, peer: str = "broker") -> None:
        self._name = name
        self._announce = announce
        self._peer = peer
        #: The last announcement for each endpoint: the place that answers, or that none does.
        self._answering: dict[str, str] = {}

    def connection(self, endpoint: str, *, connected: bool, missing: bool, place: str = "") -> None:
        """Announce once that a broker answers, and once that it is `missing`.

        A broker may be neither: it has not answered yet, and it is too early to miss it. One of
        several places is announced again at another `place`.
        """
        found = (place or self._answering.get(endpoint) or endpoint) if connected else ""
        if found == self._answering.get(endpoint) or not (connected or missing):
            return
        self._answering[endpoint] = found
        if connected:
            self._announce(f"worker {self._name} works for the {self._peer} at {found}")
        else:
            self._announce(f"no {self._peer} answers at {endpoint}, worker {self._name} waits")

    def finishing(self, tasks: int) -> None:
        """Announce that the worker exits after its running tasks, if there are any."""
        if tasks:
            self._announce(
                f"worker {self._name} exits after {counted(tasks, 'task')} (a second signal stops "
                f"{'it' if tasks == 1 else 'them'})"
            )

    def stopping(self) -> None:
        """Announce that running tasks are stopped and returned."""
        self._announce(f"worker {self._name} stops its running tasks and returns them")

    def unreported(self, tasks: int) -> None:
        """Announce that the worker exits though it could not report tasks."""
        self._announce(
            f"worker {self._name} exits without a {self._peer} to report to: "
            f"{counted(tasks, 'task')} will run again"
        )
