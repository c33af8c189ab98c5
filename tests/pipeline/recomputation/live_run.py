"""A real run with all that can happen to a task: a broker, worker processes and peers of dialects.

The broker and a worker are killed, leases expire, tasks fail, are retried, cancelled, moved and
submitted again. Every step waits for its effect, so the history always has the same kinds of
events, whatever the speed of the machine.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from taskyard.wire import dwork_pb2 as pb
from tests.conformance.yard import Yard
from tests.kit import processes
from tests.kit.processes import AT_THE_GATE, marking, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.skills import Job, Worker

Q = pb.QueryMsg

#: How long a peer waits for a task.
TAKE_SECONDS = 60.0
#: A service without workers.
NOWHERE = "nowhere"

BUILD: list[dict[str, Any]] = [
    marking("held", AT_THE_GATE, priority=9),
    marking("prepare"),
    *(marking(f"compile-{one}", after=["prepare"], lane="disk") for one in (1, 2, 3)),
    marking("flaky", "[ -e flag ] || { touch flag; exit 3; }", retries=2, backoff="20ms"),
    marking("broken", "echo no; [ -e mended ]", retries=1, backoff="20ms"),
    marking("crashed", "kill -9 $$"),
    marking("behind", after=["broken", "held"]),
    marking("stuck", after=["crashed"]),
]
SHIP: list[dict[str, Any]] = [
    marking("pack", after=["build/compile-1", "build/flaky"], lane="truck"),
    marking("send", after=["pack", "build/prepare"], lane="truck", due="200ms"),
    marking("lost", after=["build/stuck"]),
    marking("report", after=["build/behind"], slots=2),
    {"name": "next year", "argv": ["true"], "due": "365d"},
]
STEERED: list[dict[str, Any]] = [
    marking("endless", "until [ -e never ]; do sleep 0.02; done"),
    marking("waits", after=["endless"]),
    *({"name": f"idle-{one}", "payload": "x", "service": NOWHERE} for one in (1, 2, 3)),
    {"name": "aged", "payload": "x", "service": NOWHERE, "lane": "slow"},
]


def make_state(directory: Path) -> Path:
    """Run everything, export the history, and return the state directory."""
    with Yard(directory) as yard, ExitStack() as stack:
        run = LiveRun(directory, yard, stack)
        run.lose_workers()
        run.kill_broker()
        run.build_and_ship()
        run.steer()
        run.use_other_dialects()
        run.submit_again()
        run.leave_open()
        yard.broker.kill()
    code, _, err = processes.run_here(directory, "journal", "compact")
    assert code == 0, err
    return directory / ".taskyard"


class LiveRun:
    """The steps of the run, in their order."""

    def __init__(self, directory: Path, yard: Yard, stack: ExitStack) -> None:
        self._directory, self._yard, self._stack = directory, yard, stack

    def lose_workers(self) -> None:
        """Kill a worker process and silence a peer. Their leases expire later."""
        options = ("--slots", "1", "--name", "killed", "--heartbeat", "100ms", "--lease", "800ms")
        killed = self._stack.enter_context(processes.Worker(self._directory, *options))
        self._load(BUILD, "build")
        until(lambda: "held" in processes.marks(self._directory), "the first task runs")
        killed.kill()
        self._silent = self._peer("dwork-extended", 2)
        self._submit("fragile", crashes_max=1)
        self._take(self._silent)
        self._submit("late")
        self._late = self._take(self._silent)

    def kill_broker(self) -> None:
        (self._directory / "gate").touch()
        until(
            lambda: self._show("build/held")["state"] == "ready", "the killed worker's lease ends"
        )
        self._yard.restart()

    def build_and_ship(self) -> None:
        """Run the campaigns, then mend a failed task and retry it."""
        options = ("--slots", "2", "--name", "steady")
        self._steady = self._stack.enter_context(processes.Worker(self._directory, *options))
        self._load(SHIP, "ship")
        until(lambda: self._show("build/broken")["state"] == "failed", "a task has failed")
        until(lambda: self._show("ship/send")["state"] == "done", "a task of two campaigns is done")
        (self._directory / "mended").touch()
        self._command("retry", "build/broken")
        until(lambda: self._show("ship/report")["state"] == "done", "the dependents are done")

    def steer(self) -> None:
        """Cancel a running, a blocked and a ready task. Change others in every way."""
        self._load(STEERED, "steered")
        until(lambda: "endless" in processes.marks(self._directory), "the endless task runs")
        self._command("cancel", "steered/endless", "steered/idle-1")
        self._command("move", "steered/idle-2", "--to-lane", "fast")
        self._command("edit", "steered/idle-3", "--priority", "7")
        self._command("expire", "steered/aged")
        self._submit("idle-3", ("ship/next year",), campaign="steered", restart=True)

    def use_other_dialects(self) -> None:
        """Let workers without measurements finish, fail and return tasks, and one report late."""
        worker = self._peer("dwork-extended")
        job = self._take(worker)  # the task of the silent peer
        worker.progress(job, 40, b"halfway")
        self._silent.done(self._late, b"too late")
        worker.done(job, b"in time")
        self._submit("returned")
        worker.return_task(self._take(worker))
        worker.fail_final(self._take(worker), b"hopeless\nin detail")
        worker.leave()
        for kind in ("wmp", "ping-pong"):
            other = self._peer(kind)
            self._submit(f"by {kind}", retry=pb.Terms.Retry(delay_ns=[1_000_000]))
            other.fail(self._take(other), b"once more")
            other.done(self._take(other), b"done")
            until(lambda name=f"by {kind}": self._show(name)["state"] == "done")  # type: ignore[misc]
            other.close()
        client, other = self._yard.client("round-robin"), self._peer("round-robin")
        submitted = client.submit(b"tracked")
        other.done(self._take(other), b"reply")
        assert client.answer(submitted, TAKE_SECONDS)
        other.close()

    def submit_again(self) -> None:
        """Submit two names that have ended, one of them in a campaign."""
        worker, plain = self._peer("dwork-extended"), self._yard.client("dwork-plain")
        for _ in range(2):
            plain.submit(b"again")
            worker.done(self._take(worker), b"")
        self._submit("idle-1", campaign="steered", restart=True)
        worker.done(self._take(worker), b"after its cancellation")
        worker.leave()

    def leave_open(self) -> None:
        """End with a task that a worker holds."""
        worker = self._peer("dwork-extended")
        self._submit("held at the end")
        self._take(worker)

    def _load(self, tasks: list[dict[str, Any]], campaign: str) -> None:
        file = processes.campaign(self._directory, tasks, f"{campaign}.jsonl")
        self._command("load", file, "--campaign", campaign, "-q")

    def _command(self, *words: str) -> None:
        code, _, err = processes.run_here(self._directory, *words)
        assert code == 0, err

    def _submit(
        self, name: str, after: tuple[str, ...] = (), *, restart: bool = False, **terms: Any
    ) -> None:
        """Submit a task. `restart` starts an ended one again, and makes any other wait for more."""
        terms["campaign"] = terms.get("campaign", "").encode()
        batch = pb.Batch(
            name=[name.encode()],
            payload=[b"payload"],
            terms=[pb.Terms(**terms).SerializeToString()],
            after=[one.encode() for one in after],
            after_count=[len(after)],
            restart=restart,
        )
        self._yard.control.requests.must(Q.OK, type=Q.Create, batch=batch)

    def _peer(self, kind: str, slots: int = 1) -> Any:
        return self._yard.worker(kind, slots)

    def _take(self, worker: Worker) -> Job:
        job = worker.take(TAKE_SECONDS)
        assert job is not None, "no task"
        return job

    def _show(self, name: str) -> dict[str, Any]:
        return self._yard.control.show(name)
