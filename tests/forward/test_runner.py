"""The runner of a forwarder, with a real broker in memory below it."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from taskyard import testing
from taskyard.calls.inputs import Input
from taskyard.calls.payloads import encode_call, encode_command
from taskyard.core.blobs import Blob
from taskyard.core.events import Outcome
from taskyard.core.model import Stream
from taskyard.forward import runner as runner_module
from taskyard.forward.lower import Capacity, LowerBroker, upper_label
from taskyard.forward.runner import ForwardRunner
from taskyard.wire.native import peer
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.output import OutputSpool, ProgramOutput
from tests.kit.clients import internal
from tests.kit.processes import marks, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.client.internal import InternalClient
    from taskyard.testing import InMemoryBroker

PATIENCE_SECONDS = 60

#: A payload or result that names a value.
LARGE = b'{"pickle":1,"values":["%b-9"]}\n' % (b"a" * 64)


class Forwarder:
    """A runner, and a client of the broker below."""

    def __init__(
        self, runner: ForwardRunner, client: InternalClient, broker: InMemoryBroker
    ) -> None:
        self.runner = runner
        self.client = client
        self.broker = broker

    def until_submitted(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.client.existing([name]):
            assert time.monotonic() < deadline, name
            time.sleep(0.005)

    def result(self) -> JobResult:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (done := self.runner.turn()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        (one,) = done
        return one

    def run(self, job: Job) -> JobResult:
        """Run a job to its end."""
        self.runner.start(job)
        with self.broker.worker({"echo": lambda payload: payload, "large": lambda _: LARGE}):
            return self.result()


@contextmanager
def forwarding(broker: InMemoryBroker) -> Iterator[Forwarder]:
    spool = OutputSpool(time.monotonic_ns)
    runner = ForwardRunner(LowerBroker(internal(broker.client()), "up"), spool)
    with closing(runner):
        yield Forwarder(runner, internal(broker.client()), broker)


@pytest.fixture
def forwarder() -> Iterator[Forwarder]:
    with testing.broker() as broker, forwarding(broker) as one:
        yield one


def command(*argv: str, name: bytes = b"c/a", attempt: int = 1, submitted_ns: int = 7) -> Job:
    payload = encode_command([*argv])
    return Job(name, attempt, b"exec", payload, campaign=b"c", submitted_ns=submitted_ns)


def test_result_and_measurements_are_those_of_the_lower_broker(forwarder: Forwarder) -> None:
    done = forwarder.run(command("echo", "hello"))
    assert (done.outcome, done.text) == (Outcome.DONE, b"hello\n")
    shown = forwarder.client.show("c@up/a")
    assert (shown["state"], shown["origin"], shown["retry_delays"]) == ("done", "forwarded:7", [])


def test_payloads_of_other_services_pass_unchanged(forwarder: Forwarder) -> None:
    payload = bytes(range(256))
    done = forwarder.run(Job(b"a", 1, b"echo", payload, lane=b"l", submitted_ns=7))
    assert (done.outcome, done.text) == (Outcome.DONE, payload)
    assert forwarder.client.show("@up/a")["lane"] == "l"


def test_result_of_a_call_stays_encoded(forwarder: Forwarder) -> None:
    done = forwarder.run(Job(b"a", 1, b"call", encode_call("math:sqrt", [16], {})))
    assert (done.outcome, done.text) == (Outcome.DONE, b"4.0")


def test_failure_has_the_reason_of_the_lower_broker(forwarder: Forwarder) -> None:
    done = forwarder.run(command("sh", "-c", "echo oops; exit 3"))
    assert (done.outcome, done.text) == (Outcome.FAILED, b"exit status 3: oops")


def test_task_that_needs_results_of_others_fails(forwarder: Forwarder) -> None:
    inputs = (Input("c/first", b"exec", b"x"),)
    done = forwarder.run(structs.replace(command("echo", "{result:first}"), inputs=inputs))
    assert done.outcome is Outcome.FAILED_FINAL
    assert done.text.startswith(b"result of c/first: not available at ipc://")


def test_large_arguments_and_results_fail(forwarder: Forwarder) -> None:
    done = forwarder.run(Job(b"a", 1, b"pickle", LARGE))
    assert done.outcome is Outcome.FAILED_FINAL
    assert done.text.startswith(b"large arguments: not available at ipc://")
    done = forwarder.run(Job(b"b", 1, b"large", b"x"))
    assert done.outcome is Outcome.FAILED_FINAL
    assert done.text.startswith(b"large result: not forwarded, available at ipc://")


def test_refused_task_fails_alone(forwarder: Forwarder) -> None:
    long_name = b"c/" + b"x" * 1021
    forwarder.runner.start(command("echo", "x", name=long_name))
    done = forwarder.result()
    assert done.outcome is Outcome.FAILED
    assert done.text.startswith(b"refused by ipc://")
    assert forwarder.run(command("echo", "good")).text == b"good\n"


@pytest.mark.parametrize(
    ("name", "campaign"),
    [
        (b"c@up/a", b"c@up"),
        (b"c@up@other/a", b"c@up@other"),
        (b"@up/c/a", b""),  # from a WMP manager
        (b"c@LOWER/a", b"c@LOWER"),
        (b"c@1@2@3@4@5@6@7@8/a", b"c@1@2@3@4@5@6@7@8"),
    ],
)
def test_task_in_a_loop_is_returned(
    forwarder: Forwarder, name: bytes, campaign: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    label = upper_label(forwarder.client.broker).encode()
    name, campaign = (one.replace(b"LOWER", label) for one in (name, campaign))
    for attempt in (1, 2):
        forwarder.runner.start(Job(name, attempt, b"echo", b"x", campaign=campaign))
        done = forwarder.result()
        assert (done.outcome, done.text[:16]) == (Outcome.REFUSED, b"forwarding loop:")
    assert forwarder.broker.run_all() == []
    assert caplog.text.count("forwarding loop: ") == 1


def test_names_with_a_label_are_no_loop(forwarder: Forwarder) -> None:
    job = Job(b"c@upper/a@up", 1, b"echo", b"x", campaign=b"c@upper", submitted_ns=7)
    assert forwarder.run(job).text == b"x"


def test_next_attempt_takes_the_result_of_a_lost_one(forwarder: Forwarder) -> None:
    forwarder.runner.start(command("echo", "once"))
    forwarder.until_submitted("c@up/a")
    assert forwarder.broker.run_all() == ["c@up/a"]
    with forwarding(forwarder.broker) as second:
        second.runner.start(command("echo", "once", attempt=2))
        assert second.result().text == b"once\n"
        assert second.broker.run_all() == []


def test_next_attempt_of_a_failed_task_runs_again(forwarder: Forwarder, tmp_path: Path) -> None:
    script = f"echo ran >> {tmp_path}/marks; exit 4"
    for attempt in (1, 2):
        done = forwarder.run(command("sh", "-c", script, attempt=attempt))
        assert (done.outcome, done.job.attempt) == (Outcome.FAILED, attempt)
    assert marks(tmp_path) == ["ran", "ran"]


def test_task_submitted_again_is_not_taken_for_the_old_one(forwarder: Forwarder) -> None:
    assert forwarder.run(command("echo", "old")).text == b"old\n"
    assert forwarder.run(command("echo", "new", attempt=2, submitted_ns=8)).text == b"new\n"


def foreign(payload: bytes, attempt: int = 1, manager: str = "their/manager") -> Job:
    """Return a job of a WMP manager that sends no time of submission."""
    return Job(b"job", attempt, b"echo", payload, manager=manager)


def test_running_task_of_a_foreign_manager_is_taken_over(forwarder: Forwarder) -> None:
    forwarder.runner.start(foreign(b"x"))
    forwarder.until_submitted("@their%2Fmanager/job")
    with forwarding(forwarder.broker) as second:
        second.runner.start(foreign(b"x", attempt=2))
        second.runner.start(command("true", name=b"c/next"))
        second.until_submitted("c@up/next")  # after the first was found
        second.runner.stop(b"c/next", 1)
        with second.broker.worker({"echo": lambda payload: payload}):
            done = second.result()
        assert (done.outcome, done.text) == (Outcome.DONE, b"x")
        (attempt,) = second.client.show("@their%2Fmanager/job")["attempts"]
        assert attempt["attempt"] == 1


def test_ended_task_of_a_foreign_manager_runs_again(forwarder: Forwarder) -> None:
    for payload in (b"x", b"x", b"y"):
        assert forwarder.run(foreign(payload)).text == payload
    (attempt,) = forwarder.client.show("@their%2Fmanager/job")["attempts"]
    assert attempt["attempt"] == 3


def test_managers_with_tasks_of_the_same_name_have_campaigns_of_their_own(
    forwarder: Forwarder,
) -> None:
    for manager in ("m", "n"):
        assert forwarder.run(foreign(manager.encode(), manager=manager)).text == manager.encode()
    assert [*forwarder.client.existing(["@m/job", "@n/job"])] == ["@m/job", "@n/job"]
    given = LowerBroker(forwarder.client, "login", is_label_given=True)
    assert given.task_of(foreign(b"")).full_name == "@login:their%2Fmanager/job"


def test_cancellation_spares_a_task_that_the_next_attempt_has_taken_over(
    forwarder: Forwarder,
) -> None:
    for attempt in (1, 2):
        forwarder.runner.start(foreign(b"x", attempt))
    forwarder.until_submitted("@their%2Fmanager/job")
    forwarder.runner.cancel_ended([(b"job", 1)])
    forwarder.runner.stop(b"job", 1)
    with forwarder.broker.worker({"echo": lambda payload: payload}):
        assert (done := forwarder.result()).text == b"x"
    assert done.job.attempt == 2


def test_stopped_job_goes_on_and_ended_one_is_cancelled(forwarder: Forwarder) -> None:
    for name in (b"c/stopped", b"c/ended"):
        forwarder.runner.start(command("true", name=name))
        forwarder.until_submitted(f"c@up/{name[2:].decode()}")
    forwarder.runner.cancel_ended([(b"c/ended", 1)])
    for name in (b"c/stopped", b"c/ended"):
        forwarder.runner.stop(name, 1)
    assert forwarder.runner.running() == []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while forwarder.client.show("c@up/ended")["state"] != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert forwarder.broker.run_all() == ["c@up/stopped"]
    assert forwarder.runner.turn() == []


def test_task_cancelled_below_fails_above(forwarder: Forwarder) -> None:
    forwarder.runner.start(command("true"))
    forwarder.until_submitted("c@up/a")
    forwarder.client.cancel(["c@up/a"])
    done = forwarder.result()
    assert done.outcome is Outcome.FAILED
    assert done.text == f"cancelled at {forwarder.broker.endpoint}".encode()


def test_lost_bytes_are_counted_without_a_spool() -> None:
    output = ProgramOutput()
    output.add_stdout(b"end")
    output.add_lost(Stream.STDOUT, 5)
    done = output.done(command("true"))
    assert done.content == Blob(b"", 8, b"end")
    failed = output.failed(command("true"), Outcome.FAILED, b"reason")
    assert failed.printed == Blob(b"", 8, b"end")


def test_capacity_is_passed_on_when_it_changes(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "CAPACITY_SECONDS", 0.01)
    found: list[Capacity] = []
    with forwarding(forwarder.broker) as one, forwarder.broker.worker():
        one.runner.on_capacity = found.append
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not found:
            one.runner.turn()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for _ in range(5):
            time.sleep(0.01)
            one.runner.turn()
    assert [capacity.slots for capacity in found] == [1]


def test_capacity_leaves_forwarders_out_unless_there_are_no_others(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lower = forwarder.client, LowerBroker(forwarder.client, "up")
    worker_message = peer.worker_message

    def has_workers(total: int) -> bool:
        return len(client.workers()) == total

    with ExitStack() as stack:
        for forwards, workers, total, slots in ((True, 2, 2, 1), (False, 3, 5, 3)):
            message = partial(worker_message, forwards=forwards)
            monkeypatch.setattr(peer, "worker_message", message)
            for _ in range(workers):
                stack.enter_context(forwarder.broker.worker())
            until(partial(has_workers, total), "the workers are there")
            capacity = lower.capacity()
            assert capacity is not None
            assert capacity.slots == slots


def test_label_is_the_address_or_a_hash_of_the_socket() -> None:
    assert upper_label("tcp://login:6125") == "login:6125"
    assert upper_label("ipc:///a/broker.sock") != upper_label("ipc:///b/broker.sock")
    assert "/" not in upper_label("ipc:///a/broker.sock")
