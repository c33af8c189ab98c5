"""The skills of clients and workers, and their base classes.

A skill is a word. A driver has all skills of its side except those in its `cannot`, each with the
reason shown when a scenario is skipped.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from msgspec import Struct

from tests.conformance.raw_sockets import Deadline

#: Heartbeat interval of an idle worker.
NUDGE_SECONDS: Final = 0.4

#: Skills of clients: send any bytes, receive results and failures, get an acknowledgement, set
#: names, retry schedules, priorities and lanes, submit batches, set dependencies.
CLIENT_SKILLS: Final = (
    *("bytes", "results", "failures", "taken", "names", "retries", "terms", "batches"),
    "dependencies",
)

#: Skills of workers: receive any bytes, send results, failures and final failures, return a task,
#: leave, send progress. Have a limit of tasks, or choose it. Wait at the broker. Lose tasks by
#: expiry, keep them by heartbeats, list them there. Receive cancellations and dismissals. Keep a
#: task over a broker's restart. Report on a task that it no longer holds.
WORKER_SKILLS: Final = (
    *("bytes", "results", "failures", "final failures", "return", "leave", "progress"),
    *("limit", "slots", "wait", "expiry", "heartbeat", "lists", "cancel", "dismissal", "restart"),
    "late reports",
)


class Job(Struct):
    """A task that a worker holds."""

    payload: bytes
    #: The dialect's data for the report.
    mark: Any = None


class SubmittedTask(Struct):
    """A task that a client has submitted."""

    payload: bytes
    mark: Any = None
    #: The other arguments of `submit`, for a resubmission.
    more: dict[str, Any] = {}


class Answer(Struct):
    """A client's answer to a task."""

    is_done: bool
    #: The result or the reason. None: the dialect does not send it.
    text: bytes | None = None


class Peer:
    """A client or a worker. Close it."""

    kind: ClassVar[str]
    cannot: ClassVar[dict[str, str]] = {}

    def close(self) -> None:
        raise NotImplementedError


class Client(Peer):
    def submit(self, payload: bytes, **more: Any) -> SubmittedTask:
        """Submit a task. Return when it is acknowledged, if the dialect does that."""
        raise NotImplementedError

    def answer(self, submitted: SubmittedTask, seconds: float) -> Answer | None:
        """Return the answer to a task; None: none has come yet."""
        raise NotImplementedError

    def again(self, submitted: SubmittedTask) -> SubmittedTask:
        """Submit a task again after a restart, as the dialect's page describes."""
        raise NotImplementedError

    def malform(self) -> None:
        """Send a malformed message on the current connection."""
        raise NotImplementedError


class Worker(Peer):
    """A worker that is ready for tasks when made."""

    #: The broker has dismissed it.
    is_dismissed = False

    def take(self, seconds: float) -> Job | None:
        """Return the next task. Send heartbeats meanwhile."""
        deadline = Deadline(seconds)
        while (job := self.take_soon(min(deadline.left, NUDGE_SECONDS))) is None:
            if not deadline or self.is_dismissed:
                return None
            self.nudge()
        return job

    def take_soon(self, seconds: float) -> Job | None:
        """Return the next task if one comes in time."""
        raise NotImplementedError

    def nudge(self) -> None:
        """Send a heartbeat while idle, if the dialect needs it."""

    def done(self, job: Job, result: bytes) -> None:
        raise NotImplementedError

    def malform(self) -> None:
        """Send a malformed message on the current connection."""
        raise NotImplementedError

    def leave(self) -> None:
        """Leave, and wait for the acknowledgement if the dialect has one."""
        raise NotImplementedError

    def vanish(self) -> None:
        """End without any message."""
        raise NotImplementedError

    def reregister(self) -> None:
        """Register again, in case the broker was restarted."""

    def fail(self, job: Job, reason: bytes) -> None:
        raise NotImplementedError

    def fail_final(self, job: Job, reason: bytes) -> None:
        raise NotImplementedError

    def return_task(self, job: Job) -> None:
        raise NotImplementedError

    def progress(self, job: Job, percent: int, text: bytes) -> None:
        raise NotImplementedError

    def send_heartbeat(self, *jobs: Job) -> None:
        """Send a heartbeat, with the held tasks if the dialect lists them."""
        raise NotImplementedError

    def stopped(self, seconds: float) -> bool:
        """Wait for a cancellation, and return whether it came."""
        raise NotImplementedError

    def dismissed(self, seconds: float) -> bool:
        """Wait for a dismissal, and return whether it came."""
        assert self.take(seconds) is None
        return self.is_dismissed
