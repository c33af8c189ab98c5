"""The ping-pong worker's half of the protocol, with the broker's half. Without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core.blobs import Blob
from taskyard.core.events import DrainRequested, Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.wire.ping_pong import peer
from taskyard.wire.ping_pong.peer import EXIT_NS_MAX, REFUSED_RETRY_NS, Settings, Worker
from tests.wire.ping_pong.kit import BACKEND, W2, Harness

if TYPE_CHECKING:
    from collections.abc import Iterable

READY, DONE = TaskState.READY, TaskState.DONE


class WorkerHarness:
    """One worker and one broker. Carries out the actions of the worker."""

    def __init__(self) -> None:
        self.harness = Harness()
        #: Payloads of running jobs, by name.
        self.jobs: dict[bytes, bytes] = {}
        self.stopped: list[bytes] = []
        #: The worker's messages, without the delimiter.
        self.sent: list[list[bytes]] = []
        self.inbox: list[list[bytes]] = []
        #: No message arrives.
        self.is_cut_off = False
        #: The worker's connections so far, and the broker's id of the last.
        self.connections = 1
        self._identities = 0
        self.identity = self.next_identity()
        self.worker = Worker(Settings(), self.harness.now_ns)
        self._run(self.worker.start(self.harness.now_ns))

    def next_identity(self) -> bytes:
        self._identities += 1
        return b"\0\0\0\0%c" % (100 + self._identities)

    def _run(self, actions: Iterable[peer.Action]) -> None:
        for action in actions:
            if isinstance(action, peer.Send):
                self._send(action.frames)
            elif isinstance(action, peer.Start):
                self.jobs[action.name] = action.payload
            elif isinstance(action, peer.Stop):
                self.stopped.append(action.name)
                self.jobs.pop(action.name, None)
            elif isinstance(action, peer.Reconnect):
                self.connections += 1
                self.identity = self.next_identity()
                self.inbox.clear()

    def _send(self, frames: list[bytes]) -> None:
        self.sent.append(frames[1:])
        if not self.is_cut_off:
            sent_words = self.harness.at(BACKEND + self.identity, *frames)
            self.inbox += [[b"", *words] for words in sent_words]

    def turn(self, times: int = 2) -> None:
        for _ in range(times):
            while not self.worker.has_exited and (frames := self._receive()) is not None:
                self._run(self.worker.take(frames, self.harness.now_ns))
            if not self.worker.has_exited:
                self._run(self.worker.time_passed(self.harness.now_ns))

    def _receive(self) -> list[bytes] | None:
        if self.is_cut_off:
            return None
        self.inbox += [[b"", *words] for words in self.harness.to_worker(self.identity)]
        return self.inbox.pop(0) if self.inbox else None

    def finish(self, outcome: Outcome = Outcome.DONE, text: bytes = b"result") -> None:
        """Finish the first job."""
        name = next(iter(self.jobs))
        del self.jobs[name]
        self._run(self.worker.done(name, outcome, text, self.harness.now_ns))

    def later(self, seconds: float) -> None:
        """Pass time in steps, and let the worker turn when it is due."""
        ends_ns = self.harness.now_ns + int(seconds * SECOND_NS)
        while self.harness.now_ns < ends_ns:
            step_ns = min(max(self.worker.wake_at_ns() - self.harness.now_ns, 10**6), 10**9)
            self.harness.later(min(step_ns, ends_ns - self.harness.now_ns) / SECOND_NS)
            self.turn()

    def is_gone(self) -> bool:
        return self.worker.has_exited

    def words(self) -> list[bytes]:
        """Return the new messages without the counts of pings."""
        sent, self.sent = self.sent, []
        return [one[0] for one in sent]

    def give(self, job: bytes) -> None:
        assert self.harness.client(job, job) == []
        self.turn()


def test_worker_sends_ready_and_numbered_pings_every_second() -> None:
    harness = WorkerHarness()
    harness.later(3)
    assert harness.sent == [[b"READY"], [b"PING", b"1"], [b"PING", b"2"], [b"PING", b"3"]]


def test_job_runs_while_pings_continue_and_its_result_is_sent() -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    assert [*harness.jobs.values()] == [b"job"]
    harness.later(100)  # longer than a lease
    assert {*harness.words()} == {b"READY", b"PING"}
    harness.finish()
    harness.turn()
    assert harness.words() == [b"result"]
    assert harness.harness.to_client(b"job") == [[b"result"]]
    harness.give(b"next")
    assert [*harness.jobs.values()] == [b"next"]


def test_failure_is_sent_with_its_reason() -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    harness.finish(Outcome.FAILED, b"exit status 1")
    harness.turn()
    assert harness.sent[-1] == [b"ERROR", b"exit status 1"]
    assert harness.harness.to_client(b"job") == [[b"ERROR", b"exit status 1"]]


@pytest.mark.parametrize("word", [b"READY", b"PING", b"DISCONNECT"])
def test_result_equal_to_a_protocol_word_is_a_failure(word: bytes) -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    harness.finish(text=word)
    harness.turn()
    ((error, reason),) = harness.harness.to_client(b"job")
    assert (error, word in reason) == (b"ERROR", True)


def test_job_that_can_not_start_returns_and_the_worker_backs_off() -> None:
    harness = WorkerHarness()
    harness.harness.worker(W2, b"READY")
    harness.give(b"job")
    harness.words()
    harness.finish(Outcome.REFUSED, b"no process")
    harness.turn()
    assert harness.words() == [b"DISCONNECT"]
    assert harness.harness.to_worker(W2) == [[b"job"]]
    harness.later(REFUSED_RETRY_NS / SECOND_NS)
    assert harness.words() == [b"READY"]
    assert len(harness.harness.workers()) == 2


def test_worker_opens_another_connection_after_n_timeouts() -> None:
    harness = WorkerHarness()
    harness.later(2)
    harness.words()
    harness.is_cut_off = True
    harness.later(2)
    assert harness.connections == 1
    harness.later(1)
    assert harness.connections == 2
    assert harness.words()[-1] == b"READY"
    harness.is_cut_off = False
    harness.later(1)
    assert harness.words() == [b"READY"]  # the first one was not answered
    harness.give(b"job")
    assert [*harness.jobs.values()] == [b"job"]


def test_keeps_its_connection_and_its_job_while_it_works_and_the_broker_is_silent() -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    harness.is_cut_off = True
    harness.later(50)
    harness.is_cut_off = False
    assert harness.connections == 1
    harness.later(1)
    harness.finish()
    harness.turn()
    assert harness.harness.to_client(b"job") == [[b"result"]]


def test_job_of_a_renewed_connection_is_stopped_and_not_reported() -> None:
    harness = WorkerHarness()
    harness.later(3)
    harness.give(b"job")
    harness.later(3)
    harness.identity = harness.next_identity()  # it reconnected, silently
    harness.words()
    harness.later(1)
    assert harness.words() == [b"PING", b"READY"]
    assert harness.stopped == [b"ping-pong-1"]
    assert [*harness.jobs.values()] == []
    harness.later(3)  # the broker has noticed that the former connection is silent
    assert [*harness.jobs.values()] == [b"job"]
    harness.finish()
    harness.turn()
    assert harness.harness.to_client(b"job") == [[b"result"]]


def test_late_count_from_before_a_backoff_does_not_stop_the_next_job() -> None:
    harness = WorkerHarness()
    harness.later(4)  # the broker counts some pings
    harness.give(b"job")
    harness.finish(Outcome.REFUSED, b"no process")
    harness.turn(1)
    harness.later(REFUSED_RETRY_NS / SECOND_NS - 0.001)
    harness.inbox.insert(0, [b"", b"PONG", b"9"])
    harness.later(2)
    assert harness.worker.is_working
    harness.later(3)
    assert harness.worker.is_working
    assert harness.stopped == []


def test_worker_does_not_spin_while_exit_is_unanswered() -> None:
    harness = WorkerHarness()
    harness.is_cut_off = True
    harness.later(2.5)
    harness.worker.stopping = True
    harness.turn()
    while not harness.worker.has_exited:
        assert harness.worker.wake_at_ns() > harness.harness.now_ns
        harness.harness.later((harness.worker.wake_at_ns() - harness.harness.now_ns) / SECOND_NS)
        harness.turn(1)


def test_worker_exits_after_exit() -> None:
    harness = WorkerHarness()
    harness.harness.handle([DrainRequested(0, b"x")])
    harness.turn()
    assert harness.is_gone()
    assert harness.words() == [b"READY"]


def test_worker_without_a_job_exits_at_once() -> None:
    harness = WorkerHarness()
    harness.turn()
    harness.words()
    harness.worker.stopping = True
    harness.turn()
    assert harness.words() == [b"DISCONNECT", b"PING"]
    assert harness.is_gone()
    assert harness.harness.workers() == []


def test_worker_exits_after_its_job_and_returns_later_ones() -> None:
    harness = WorkerHarness()
    harness.give(b"job")
    assert harness.harness.client(b"next", b"next") == []
    harness.worker.stopping = True
    harness.later(5)
    assert not harness.is_gone()
    harness.finish()
    harness.turn(3)
    assert harness.is_gone()
    assert harness.harness.to_client(b"job") == [[b"result"]]
    done, following = harness.harness.scheduler.ledger.tasks.values()
    assert (done.state, following.state, following.losses) == (DONE, READY, 0)


def test_worker_waits_a_limited_time_after_disconnect() -> None:
    harness = WorkerHarness()
    harness.turn()
    harness.is_cut_off = True
    harness.worker.stopping = True
    harness.turn()
    assert not harness.is_gone()
    harness.later(EXIT_NS_MAX / SECOND_NS + 0.1)
    assert harness.is_gone()


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"x", b"EXIT"], [b"", b"a", b"b"], [b"", b"EXIT", b"", b""]]
)
def test_malformed_message_is_ignored(frames: list[bytes]) -> None:
    harness = WorkerHarness()
    harness.inbox.append(frames)
    harness.turn()
    assert not harness.is_gone()
    assert harness.jobs == {}


def test_ping_may_be_dropped_and_other_messages_may_not() -> None:
    worker = Worker(Settings(), 0)
    assert worker.start(0) == [peer.Send([b"", b"READY"])]
    assert worker.take([b"", b"PONG"], 1) == []
    assert worker.time_passed(SECOND_NS) == [peer.Send([b"", b"PING", b"1"], is_droppable=True)]
    assert worker.take([b"", b"job"], SECOND_NS) == [peer.Start(b"ping-pong-1", b"job")]
    truncated = worker.done(b"ping-pong-1", Outcome.DONE, Blob(b"", 9, b"begin"), SECOND_NS)
    assert [action.frames[1] for action in truncated if isinstance(action, peer.Send)] == [b"ERROR"]
    assert worker.done(b"ping-pong-1", Outcome.DONE, b"again", SECOND_NS) == []
