"""What a peer may be able to do, and how a driver says what its dialect can't.

A skill is a word. A driver can do all of its side's skills but those in its `cannot`, each with the
sentence that is shown where a scenario is skipped for it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from msgspec import Struct

from tests.conformance.raw_sockets import Until

#: An idle worker shows life so often.
NUDGE_SECONDS: Final = 0.4

#: Of clients: to send any bytes, to be told results and failures, to know that a task was taken, to
#: give names, schedules of retries, priorities and lanes, several tasks at once, dependencies.
CLIENT_SKILLS: Final = (
    *("bytes", "results", "failures", "taken", "names", "retries", "terms", "batches"),
    "dependencies",
)

#: Of workers: to see any bytes, to give results, to say that a task failed, or failed for good, to
#: give a task back, to leave, to tell how far it is; to have a limit of tasks, or one that it
#: chooses; to wait at the broker; to lose its tasks by silence, keep them by signs of life, list
#: them in those; to be told to stop a task, or to go home; to keep a task over a broker's restart;
#: to report on a task that it holds no longer.
WORKER_SKILLS: Final = (
    *("bytes", "results", "failures", "failures for good", "give back", "leave", "progress"),
    *("limit", "slots", "wait", "silence", "heartbeat", "lists", "cancel", "goodbye", "restart"),
    "late reports",
)


class Job(Struct):
    """A task in a worker's hands."""

    payload: bytes
    #: What its dialect needs to report on it.
    mark: Any = None


class Asked(Struct):
    """A task that a client has asked for."""

    payload: bytes
    mark: Any = None
    #: What was asked for beside the payload, to ask for it again.
    more: dict[str, Any] = {}


class Answer(Struct):
    """What a client was told of a task."""

    is_done: bool
    #: The result or the reason; None: its dialect does not tell.
    text: bytes | None = None


class Peer:
    """Either side. Close it."""

    kind: ClassVar[str]
    cannot: ClassVar[dict[str, str]] = {}

    def close(self) -> None:
        raise NotImplementedError


class Client(Peer):
    def submit(self, payload: bytes, **more: Any) -> Asked:
        """Ask for a task. Returns when it is taken, where the dialect says so."""
        raise NotImplementedError

    def answer(self, asked: Asked, seconds: float) -> Answer | None:
        """What became of it; None: nothing is heard yet."""
        raise NotImplementedError

    def again(self, asked: Asked) -> Asked:
        """Ask again after a restart of the broker, as the dialect's page has it."""
        raise NotImplementedError

    def malform(self) -> None:
        """Say something that makes no sense, by the connection that is used."""
        raise NotImplementedError


class Worker(Peer):
    """Ready for tasks when it is made."""

    #: It was told to go away.
    is_sent_home = False

    def take(self, seconds: float) -> Job | None:
        """The next task. Meanwhile it shows life."""
        ends = Until(seconds)
        while (job := self.take_soon(min(ends.left, NUDGE_SECONDS))) is None:
            if not ends or self.is_sent_home:
                return None
            self.nudge()
        return job

    def take_soon(self, seconds: float) -> Job | None:
        """The next task, if there is one within a moment."""
        raise NotImplementedError

    def nudge(self) -> None:
        """Show life while nothing happens, where that is of use."""

    def done(self, job: Job, result: bytes) -> None:
        raise NotImplementedError

    def malform(self) -> None:
        """Say something that makes no sense, by the connection that is used."""
        raise NotImplementedError

    def leave(self) -> None:
        """Say goodbye, and wait until it was heard where that can be known."""
        raise NotImplementedError

    def vanish(self) -> None:
        """End without a word."""
        raise NotImplementedError

    def remind(self) -> None:
        """Say again what a broker that was restarted does not know; now and then."""

    def fail(self, job: Job, reason: bytes) -> None:
        raise NotImplementedError

    def fail_for_good(self, job: Job, reason: bytes) -> None:
        raise NotImplementedError

    def give_back(self, job: Job) -> None:
        raise NotImplementedError

    def progress(self, job: Job, percent: int, text: bytes) -> None:
        raise NotImplementedError

    def show_life(self, *jobs: Job) -> None:
        """Show life, with what it holds where that can be said."""
        raise NotImplementedError

    def stopped(self, seconds: float) -> bool:
        """It is told to stop a task."""
        raise NotImplementedError

    def sent_home(self, seconds: float) -> bool:
        """It is told to go away."""
        assert self.take(seconds) is None
        return self.is_sent_home
