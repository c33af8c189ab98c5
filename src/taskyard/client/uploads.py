"""Uploads: large arguments of refused tasks, which are stored again before these are sent again.

A broker refuses a task that names bytes which it does not have: they were removed while the task
waited for the broker, or an older state was restored. Tasks keep what stores their bytes until they
are accepted. Storing blocks, so each refused batch has a thread of its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.client.pending_tasks import Batch, PendingTask

#: How often the bytes of one task are stored again. Each time sends them.
UPLOADS_MAX: Final = 3


class Upload(Struct, eq=False):
    """A batch whose bytes are being stored again."""

    batch: Batch
    #: The tasks whose bytes the broker lacks. Others may wait for these.
    lacking: Sequence[PendingTask]
    #: Why tasks have no bytes, by their places in `lacking`. None: it has not ended.
    errors: dict[int, Exception] | None = None


class Uploads:
    """Batches whose bytes are being stored again. The session calls all methods."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Call `wake` from another thread when a batch is ready."""
        self._wake = wake
        self.open: list[Upload] = []

    def start(self, batch: Batch, lacking: Sequence[PendingTask]) -> None:
        """Store the bytes of some tasks of a batch."""
        upload = Upload(batch, lacking)
        for task in lacking:
            task.uploads += 1
        self.open.append(upload)
        self._run(upload)

    def take(self) -> list[tuple[Batch, list[tuple[PendingTask, Exception]]]]:
        """Return the batches that are ready, each with the tasks that have no bytes, and why."""
        found: list[tuple[Batch, list[tuple[PendingTask, Exception]]]] = []
        for upload in [*self.open]:
            if (errors := upload.errors) is not None:
                self.open.remove(upload)
                found.append((upload.batch, [(upload.lacking[at], errors[at]) for at in errors]))
        return found

    def _run(self, upload: Upload) -> None:
        """Store the bytes of an upload in a thread."""
        thread = threading.Thread(
            target=self._store, args=(upload,), name="taskyard-upload", daemon=True
        )
        thread.start()

    def _store(self, upload: Upload) -> None:
        errors: dict[int, Exception] = {}
        for place, task in enumerate(upload.lacking):
            try:
                if task.restore is not None:
                    task.restore()
            except Exception as error:  # noqa: BLE001  # raised by the future of the task
                errors[place] = error
        self._end(upload, errors)

    def _end(self, upload: Upload, errors: dict[int, Exception]) -> None:
        upload.errors = errors
        self._wake()
