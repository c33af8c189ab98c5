"""The native worker without I/O: receives tasks, runs them, and sends reports and heartbeats.

The leases of its tasks belong to this loop. While it turns, heartbeats renew them, whatever the
children do. If it hangs, the leases expire. A rule-aware runner gets the broker's rules before the
first task, and again when they have changed.

A task passes through `_start_assigned`, the inputs, the runner and `_collect_done`. Then it waits
in `HeldTasks` for its report. `Reports`, `TaskRequests`, `RuleRequests` and `Heartbeats` build the
messages and know when they are due. The channel resends unacknowledged requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from taskyard.wire.native import peer
from taskyard.worker.held_tasks import HeldTasks
from taskyard.worker.inputs import InputFetcher
from taskyard.worker.output import OutputSender, OutputSpool, ProgressSender
from taskyard.worker.requests import Heartbeats, Reports, RuleRequests, TaskRequests
from taskyard.worker.slots import Prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.blobs import Content
    from taskyard.core.resources import Resources
    from taskyard.net.channel import Channel
    from taskyard.net.protocols import Clock
    from taskyard.wire.native.peer import Reply
    from taskyard.worker.jobs import Job, JobResult, RuleAwareRunner, Runner
    from taskyard.worker.settings import WorkerSettings
    from taskyard.worker.slots import Share

#: How soon the broker gets to know that a call waits, if no other message is sent.
WAITING_NOTICE_NS: Final = SECOND_NS // 10

_SHUTDOWN: Final = b"the worker shuts down"


class NativeWorkerLoop:
    """A worker that is connected to one broker."""

    #: Another live process holds the name: no tasks until the broker gives it to this process.
    waits_for_name = False
    #: Why the broker gave the name to another process for good. Empty otherwise.
    name_lost = ""
    #: Why the broker refuses the key for good: it was revoked, or has no fitting role.
    forbidden = ""
    #: `Exit` was answered.
    has_exited = False
    #: Called with held tasks that have ended at the broker, before they are stopped.
    on_ended: Callable[[Sequence[tuple[bytes, int]]], None] | None = None
    #: The `Exit` in flight. 0: none.
    _exit_request = 0

    def __init__(  # noqa: PLR0913  # most are named
        self,
        settings: WorkerSettings,
        channel: Channel,
        runner: Runner,
        clock: Clock,
        rule_runner: RuleAwareRunner | None = None,
        *,
        spool: OutputSpool | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        """Set up a worker. `rule_runner` is the runner again if it follows the broker's rules."""
        self._channel = channel
        self._runner = runner
        self._rule_runner = rule_runner
        self._clock = clock
        spool = OutputSpool(clock.monotonic_ns) if spool is None else spool
        prefetch = prefetch or Prefetch(settings.slots, clock.monotonic_ns())
        self._spool = spool
        self._output = OutputSender(spool, channel, settings, clock)
        self._progress = ProgressSender(channel, settings)
        self._inputs = InputFetcher(channel, settings, runner)
        self._held = HeldTasks(self._output, rule_runner)
        self._rules = RuleRequests(settings, channel, clock, rule_runner)
        self._requests = TaskRequests(settings, channel, clock, self._held, prefetch, self._rules)
        self._reports = Reports(channel, clock, self._held, self._requests)
        self._heartbeats = Heartbeats(settings, channel, clock)

    @property
    def settings(self) -> WorkerSettings:
        return self._requests.settings

    @property
    def held(self) -> int:
        return len(self._held.lanes)

    @property
    def heartbeat_ns(self) -> int:
        return self._heartbeats.interval_ns

    @property
    def stopping(self) -> bool:
        """Return whether it takes no more tasks, and exits when none is held."""
        return self._requests.is_closed

    @property
    def refusal(self) -> str:
        """Return why the broker refuses requests. Empty while it does not."""
        return self._requests.refusal

    def use_share(self, share: Share) -> None:
        """Share the slots of the process with the workers of other brokers."""
        self._requests.share = share
        share.prefetch = self._requests.prefetch

    def set_capacity(self, slots: int, resources: Resources) -> None:
        """Use another number of slots and other resources from now on."""
        self._requests.settings = structs.replace(self.settings, slots=slots, resources=resources)
        self._requests.update_message()

    def set_progress(self, job: Job, printed: Content) -> None:
        """Send a running task's newest output to the broker, at a limited rate."""
        if job.key in self._held.lanes:
            self._progress.printed[job.key] = printed

    def shut_down(self) -> None:
        """Take no more tasks, return tasks not started, and exit when no task is held."""
        if not self.stopping:
            self._requests.is_closed = True
            self._held.give_back(self._inputs.unstarted(), _SHUTDOWN)

    def stop_running(self, jobs: Sequence[Job]) -> None:
        """Stop running tasks, and return them to the broker."""
        runs_so_far = [self._runner.run_so_far(*job.key) for job in jobs]
        for job in jobs:
            self._runner.stop(*job.key)
            self._spool.drop(job.key)
        self._held.give_back(jobs, _SHUTDOWN, runs_so_far)

    def turn(self) -> None:
        """Receive, run and send. Never blocks."""
        self.receive()
        self.send()

    # Receiving and running: the first half of a turn.

    def receive(self) -> bool:
        """Receive, and run tasks. Return whether there are reports."""
        for reply in self._channel.receive():
            if reply.request in self._inputs.waiting:  # a refusal concerns its task alone
                self._collect_done(self._inputs.on_reply(reply))
            else:
                self._on_reply(reply)
        return self.run_tasks()

    def run_tasks(self) -> bool:
        """Run tasks without receiving. Return whether there are reports."""
        if done := self._runner.turn():
            self._collect_done(done)
        held = self._held
        waiting, kept_count = self._runner.waiting_calls()
        if waiting != held.waiting_calls or kept_count != held.kept_calls_count:
            held.waiting_calls, held.kept_calls_count = waiting, kept_count
            self._requests.update_message()
            soon_ns = self._clock.monotonic_ns() + WAITING_NOTICE_NS
            self._heartbeats.due_ns = min(self._heartbeats.due_ns, soon_ns)
        return bool(held.results)

    def is_gathering(self) -> bool:
        """Return whether there are reports that may wait for more tasks to finish."""
        return bool(self._held.results) and not self.stopping and self._requests.has_enough()

    def _collect_done(self, done: Sequence[JobResult]) -> None:
        for one in done:
            if not self._output.hold(one):
                self._held.results.append(one)
            self._progress.printed.pop(one.job.key, None)  # the report has the whole output
            self._inputs.release(one.job)
            if one.outcome is Outcome.REFUSED and not one.healthy:
                self._requests.back_off()

    def _on_reply(self, reply: Reply) -> None:
        number = reply.request
        if reply.kind == peer.ERROR and reply.code in peer.EXCLUDED:
            self._on_excluded(reply)
        if number == self._exit_request:
            self.has_exited = True
        elif (steal := self._heartbeats.take(number)) is not None:
            self._on_heartbeat(steal, reply)
        elif number == self._progress.request:
            self._progress.request = 0
        elif number == self._output.request:
            self._held.results += self._output.on_reply(reply)
            self._held.results += self._output.stop_unwritten(self._runner, self._inputs.stop)
        elif number == self._rules.number:
            self._rules.on_reply(reply)
            self._requests.update_message()
        elif number in (self._reports.number, self._requests.number):
            self._on_tasks(reply)

    def _on_excluded(self, reply: Reply) -> None:
        """Stop running tasks: they belong to another process, or to none any more."""
        if reply.code == peer.NAME_LOST:
            self.name_lost = reply.reason
        elif reply.code == peer.FORBIDDEN:
            self.forbidden = reply.reason
        self.waits_for_name = True
        self._stop([*self._held.lanes])

    def _on_heartbeat(self, steal: int, reply: Reply) -> None:
        """Stop tasks, use the broker's interval, and request rules that have changed."""
        if reply.kind == peer.ERROR:
            self._requests.on_refused(reply.reason)
            return
        if self.waits_for_name:
            self.waits_for_name, self._requests.refusal = False, ""
        self._channel.note_waiting(steal, waits=reply.waiting == steal)
        stopped = [*zip(reply.names, reply.attempts, strict=True)]
        if self.on_ended is not None:
            states = zip(stopped, reply.states, strict=True)
            self.on_ended([key for key, state in states if state is TaskState.CANCELLED])
        self._stop(stopped)
        self._heartbeats.on_reply(reply, is_idle=not self._held.lanes)
        self._rules.on_heartbeat(reply.rules_version)

    def _stop(self, keys: Sequence[tuple[bytes, int]]) -> None:
        """Stop tasks that the broker has cancelled or assigned to another worker."""
        for key in keys:
            self._inputs.stop(key)
            self._progress.printed.pop(key, None)
            self._spool.drop(key)
        if keys:
            self._held.drop(dict.fromkeys(keys))

    def _on_tasks(self, reply: Reply) -> None:
        """Take tasks, or note the acknowledgement of a report. A report may have requested tasks,
        too."""
        requests, kind = self._requests, reply.kind
        is_report, is_steal = (
            reply.request == self._reports.number,
            reply.request == requests.number,
        )
        reported_count = self._reports.on_reply() if is_report else 0
        if is_report and is_steal and kind == peer.OK:
            requests.on_report_waits()
            is_steal = False
        if is_steal:
            requests.on_reply()
        if kind == peer.ERROR:
            requests.on_refused(reply.reason, reported_count)
        elif is_steal and kind == peer.NOT_FOUND and not is_report:
            requests.on_not_found()
        else:
            requests.on_accepted()
        if is_steal and kind == peer.TRANSFER:
            self._start_assigned(reply.assigned())
        elif is_steal and kind == peer.EXIT:
            self.shut_down()

    def _start_assigned(self, assigned: peer.Assigned) -> None:
        if not self._held.lanes:
            self._requests.on_busy()
        self._requests.on_assigned(len(assigned.names))
        fresh = self._held.add(assigned)
        if self._held.lanes:
            self._heartbeats.on_busy()
        if self.stopping:
            self._held.give_back(fresh, _SHUTDOWN)
        else:
            for job in fresh:
                self._inputs.start(job)

    # Sending: the second half of a turn.

    def send(self) -> None:
        """Send reports, requests and heartbeats."""
        if not self._exit_request:
            self._send_due(self._clock.monotonic_ns())
        self._channel.turn()

    def _send_due(self, now_ns: int) -> None:
        requests, reports, share = self._requests, self._reports, self._requests.share
        if share is not None and share.must_return(requests.excess()):
            self._return_excess(b"the worker's slots are taken")
        if self._spool.streams:
            self._output.send()
        if self._rules.due_ns <= now_ns:
            self._rules.send()
        if not self._held.results:
            reports.due_ns = 0
        elif not reports.number:
            reports.send(may_wait=not self.stopping)
        if not (requests.number or reports.due_ns):
            requests.send()
        self._send_heartbeat(now_ns)
        if requests.prefetch.count and requests.prefetch_due_ns <= now_ns:
            self._adjust_prefetch()
        if self._progress.printed:
            self._progress.send(now_ns)
        if self.stopping and not self._held.lanes:
            self._leave()

    def _send_heartbeat(self, now_ns: int) -> None:
        """Send a heartbeat if it is due, or if agents can't start any more, or can again."""
        heartbeats, malformed = self._heartbeats, 0
        if self._rule_runner is not None:
            malformed, problem = self._rule_runner.malformed, self._rule_runner.agent_error
            if problem != (heartbeats.agent_error or b""):
                heartbeats.on_agent_error(problem)
        if heartbeats.due_ns <= now_ns:
            self._adjust_prefetch()
            requests = self._requests
            heartbeats.send(now_ns, requests.worker_message, self._held, requests.number, malformed)

    def _adjust_prefetch(self) -> None:
        """Adjust the prefetch. Return queued tasks beyond it: another worker may be idle."""
        self._requests.adjust_prefetch()
        if self._requests.share is None:
            self._return_excess(b"the worker has slow tasks")

    def _return_excess(self, reason: bytes) -> None:
        excess = self._requests.excess()
        if excess > 0 and not self._rules.overfeed_max:
            self._held.give_back(self._runner.withdraw(excess), reason)

    def _leave(self) -> None:
        """Send `Exit` as the last request: an older request that is sent again would register
        anew."""
        self._channel.drop_all()
        name, incarnation = self.settings.name, self.settings.incarnation
        self._exit_request = self._channel.request(
            lambda number: peer.leave(number, name, incarnation)
        )

    def wake_at_ns(self) -> int:
        """Return when the next turn is due without input."""
        times = [self._channel.wake_at_ns(), self._runner.wake_at_ns()]
        if not self._exit_request:
            times += [self._heartbeats.due_ns, self._rules.due_ns]
            if self._requests.prefetch.count:
                times.append(self._requests.prefetch_due_ns)
        if self._reports.due_ns:
            times.append(self._reports.due_ns)
        if self._spool.streams or self._progress.printed:
            times += [self._output.wake_at_ns(), self._progress.wake_at_ns()]
        if self._requests.share is not None:
            times.append(self._requests.share.wake_at_ns())
        due_ns = min([time for time in times if time is not None], default=NEVER_NS)
        return self._clock.monotonic_ns() + SECOND_NS if due_ns == NEVER_NS else due_ns
