"""The native worker without I/O: requests tasks, runs them, reports, sends heartbeats.

Owns the list of held tasks, from the assignment until the broker has acknowledged the report. The
leases belong to this loop. While it turns, heartbeats renew them, whatever the children do. If it
hangs, the leases expire. A rule-aware runner gets the broker's rules before the first task, and
again when they have changed.

One report and one `Steal` are in flight at a time. Tasks that finish meanwhile go into the next
report, which carries the next `Steal`. It is acknowledged at once and waits for tasks, so a worker
sends one message per task. A `Steal` of its own requests tasks for free slots, and beyond the slots
only while the broker has enough. While enough tasks are queued here, a report waits a moment for
more tasks to finish. The channel resends unacknowledged requests.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from taskyard.core import deadlines
from taskyard.core.blobs import Content
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import counted
from taskyard.core.states import TaskState
from taskyard.core.timer_heap import NEVER_NS
from taskyard.net.channel import OVERDUE_NS, PING_NS, Channel
from taskyard.wire.native import peer
from taskyard.worker.inputs import InputFetcher
from taskyard.worker.jobs import Job, JobResult
from taskyard.worker.native_messages import (
    assigned_jobs,
    report_columns,
    report_size,
    slots_of_lanes,
)
from taskyard.worker.output_sender import OutputSender, ProgressSender
from taskyard.worker.prefetch import Prefetch
from taskyard.worker.settings import AUTO
from taskyard.worker.spool import OutputSpool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.runs import Run
    from taskyard.net.protocols import Clock
    from taskyard.wire.native.peer import Reply
    from taskyard.worker.jobs import RuleAwareRunner, Runner
    from taskyard.worker.settings import WorkerSettings
    from taskyard.worker.slot_budget import Share

#: How long a `Steal` may wait at the broker.
STEAL_WAIT_NS: Final = 60 * SECOND_NS

#: Delay before the next `Steal` after the machine had no room for a process, or after the broker
#: refused a request. Otherwise the same task would come back at once.
REFUSED_RETRY_NS: Final = SECOND_NS

#: Delay before the next request for rules, if they have another version than in the last heartbeat.
RULES_RETRY_NS: Final = 2 * SECOND_NS

#: The shortest interval of heartbeats that a broker may set.
HEARTBEAT_NS_MIN: Final = SECOND_NS // 100

#: How often to adjust the prefetch, also between heartbeats.
PREFETCH_NS: Final = SECOND_NS

#: Heartbeats that may be unanswered at once.
HEARTBEATS_OPEN_MAX: Final = 16

#: How long a report waits for more tasks to finish, while enough tasks are queued here. A message
#: for each quick task costs CPU time in worker, broker and client.
REPORT_DELAY_NS: Final = SECOND_NS // 20

#: How soon the broker gets to know that a call waits, if no other message is sent.
WAITING_NOTICE_NS: Final = SECOND_NS // 10


class NativeWorkerLoop:
    """One worker, connected to one broker."""

    #: Another live process holds the name: no tasks until the broker gives it to this one.
    waits_for_name = False
    #: Why the broker gave the name to another process for good. Empty otherwise.
    name_lost = ""
    #: Why the broker refuses the key for good: it was revoked, or has no fitting role.
    forbidden = ""
    #: Why the broker refuses requests. Empty while it does not.
    refusal = ""
    #: Take no more tasks, and exit when none is held.
    stopping = False
    #: `Exit` was answered.
    has_exited = False
    #: Called with held tasks that have ended at the broker, before they are stopped.
    on_ended: Callable[[Sequence[tuple[bytes, int]]], None] | None = None
    #: The last answer had fewer tasks than were requested: the broker has no more for now.
    _came_short = False
    #: `Steal`s in a row that the broker answered at once without tasks.
    _not_found_count = 0
    #: `seen` of the last heartbeat reply, sent back with the next heartbeat.
    _seen = 0
    #: The agent error in the last heartbeat. None: there was none so far.
    _sent_agent_error: bytes | None = None
    #: The version of the rules here, and in the last reply to a heartbeat. None: none came.
    _rules_version = 0
    _rules_version_newest: int | None = None
    #: Calls that wait for other tasks without their slots, and how many others with them.
    _waiting: Sequence[Job] = ()
    _kept_count = 0
    #: Its part of a process that works for several brokers. None: it has all slots.
    _share: Share | None = None

    def __init__(  # noqa: PLR0913  # the last ones are named
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
        self.settings = settings
        self._channel = channel
        self._runner = runner
        self._rule_runner = rule_runner
        self._clock = clock
        #: Task and attempt, with service and lane, of every task held.
        self._held: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        #: Results not yet sent, and when they are. 0: they don't wait for more.
        self._reports: list[JobResult] = []
        self._reports_due_ns = 0
        spool = OutputSpool(clock.monotonic_ns) if spool is None else spool
        self._spool = spool
        self._output = OutputSender(spool, channel, settings, clock)
        self._inputs = InputFetcher(channel, settings, runner)
        #: The report in flight, and its tasks.
        self._report_request = 0
        self._reported_keys: list[tuple[bytes, int]] = []
        #: The `Steal` in flight. It may be the report too.
        self._steal_request = self._steal_sent_ns = self._steal_count = 0
        #: Heartbeats in flight, and the `Steal` that each names. A slow broker may have several.
        self._heartbeats: dict[int, int] = {}
        #: The longest interval of heartbeats that renews leases, and the interval now.
        self._longest_ns = deadlines.heartbeat_longest_ns(settings.lease_timeout_ns)
        self.heartbeat_ns = settings.heartbeat_ns or deadlines.heartbeat_interval_ns(
            1, settings.lease_timeout_ns
        )
        self._heartbeat_due_ns = self._prefetch_due_ns = clock.monotonic_ns()
        self._heartbeat_sent_ns = self._heartbeat_due_ns
        #: The rules request in flight, when the next is due, and whether a reply has come.
        self._rules_request = 0
        self._rules_due_ns = NEVER_NS if rule_runner is None else self._heartbeat_due_ns
        self._has_rules = rule_runner is None
        self._progress = ProgressSender(channel, settings)
        self._exit_request = self._backoff_until_ns = self._overfeed_max = 0
        self._prefetch = prefetch or Prefetch(settings.slots, self._heartbeat_due_ns)
        self._worker_message = self._make_worker_message()
        self._set_heartbeat(self.heartbeat_ns)

    @property
    def held(self) -> int:
        return len(self._held)

    def use_share(self, share: Share) -> None:
        """Share the slots of the process with the workers of other brokers."""
        self._share = share
        share.prefetch = self._prefetch

    def shut_down(self) -> None:
        """Take no more tasks, return those not started, and exit after the rest."""
        if not self.stopping:
            self.stopping = True
            self._return_tasks(self._inputs.unstarted(), b"the worker shuts down")

    def stop_running(self, jobs: Sequence[Job]) -> None:
        """Stop running tasks, and return them to the broker."""
        runs_so_far = [self._runner.run_so_far(*job.key) for job in jobs]
        for job in jobs:
            self._runner.stop(*job.key)
            self._spool.drop(job.key)
        self._return_tasks(jobs, b"the worker shuts down", runs_so_far)

    def turn(self) -> None:
        """Receive, run and send. Never blocks."""
        self.receive()
        self.send()

    def receive(self) -> bool:
        """Receive, and run tasks, the first half of a turn. Return whether there are reports."""
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
        waiting, kept_count = self._runner.waiting_calls()
        if waiting != self._waiting or kept_count != self._kept_count:
            self._waiting, self._kept_count = waiting, kept_count
            self._worker_message = self._make_worker_message()
            soon_ns = self._clock.monotonic_ns() + WAITING_NOTICE_NS
            self._heartbeat_due_ns = min(self._heartbeat_due_ns, soon_ns)
        return bool(self._reports)

    def is_gathering(self) -> bool:
        """Return whether there are reports that may wait for more tasks to finish."""
        return bool(self._reports) and not self.stopping and self._has_enough()

    def _has_enough(self) -> bool:
        """Return whether enough tasks are queued here until the next message."""
        # A `Steal` in flight gets the next tasks without a message from here.
        reserve = 0 if self._steal_request else self._prefetch.count // 3
        return self._unfinished_count() > self._slots() + reserve

    def send(self) -> None:  # noqa: C901  # a check here costs no call
        """Send reports, requests and heartbeats. The second half of a turn."""
        if self._share is not None and self._share.must_return(self._excess()):
            self._return_excess(b"the worker's slots are taken")
        now_ns = self._clock.monotonic_ns()
        if self._spool.streams:
            self._output.send()
        if self._rules_due_ns <= now_ns:
            self._request_rules()
        if not self._reports:
            self._reports_due_ns = 0
        elif not self._report_request:
            self._send_reports()
        if not (self._steal_request or self._reports_due_ns):
            self._request_tasks()
        runner = self._rule_runner
        has_news = runner is not None and (runner.agent_error or self._sent_agent_error)
        if has_news or self._heartbeat_due_ns <= now_ns:
            self._send_heartbeat(now_ns)
        if self._prefetch.count and self._prefetch_due_ns <= now_ns:
            self._adjust_prefetch()
        if self._progress.printed:
            self._progress.send(now_ns)
        if self.stopping and not self._held and not self._exit_request:
            self._leave()
        self._channel.turn()

    def _leave(self) -> None:
        """Send `Exit` as the last request: an older one that is sent again would register anew."""
        self._channel.drop_all()
        own = self.settings
        self._exit_request = self._channel.request(
            lambda number: peer.leave(number, own.name, own.incarnation)
        )

    def set_progress(self, job: Job, printed: Content) -> None:
        """Send a running task's newest output to the broker, at a limited rate."""
        if job.key in self._held:
            self._progress.printed[job.key] = printed

    def _collect_done(self, done: list[JobResult]) -> None:
        for one in done:
            if not self._output.hold(one):
                self._reports.append(one)
            self._progress.printed.pop(one.job.key, None)  # the report has the whole output
            self._inputs.release(one.job)
            if one.outcome is Outcome.REFUSED and not one.healthy:
                self._back_off()

    def wake_at_ns(self) -> int:
        """Return when the next turn is due without input."""
        times = [NEVER_NS, self._channel.wake_at_ns(), self._runner.wake_at_ns()]
        if not self._exit_request:
            times += [self._heartbeat_due_ns, self._rules_due_ns]
            if self._prefetch.count:
                times.append(self._prefetch_due_ns)
        if self._reports_due_ns:
            times.append(self._reports_due_ns)
        if self._spool.streams or self._progress.printed:
            times += [self._output.wake_at_ns(), self._progress.wake_at_ns()]
        if self._share is not None:
            times.append(self._share.wake_at_ns())
        due_ns = min([time for time in times if time is not None])
        return self._clock.monotonic_ns() + SECOND_NS if due_ns == NEVER_NS else due_ns

    # Replies of the broker.

    def _on_reply(self, reply: Reply) -> None:
        number, kind = reply.request, reply.kind
        if kind == peer.ERROR and reply.code in peer.EXCLUDED:
            self._on_excluded(reply)
        if number == self._exit_request:
            self.has_exited = True
        elif number in self._heartbeats:
            named = self._heartbeats.pop(number)
            if kind == peer.ERROR:
                self._on_refused(reply.reason, 0)
                return
            if self.waits_for_name:
                self.waits_for_name, self.refusal = False, ""
            self._channel.note_waiting(named, waits=reply.waiting == named)
            self._on_heartbeat(reply)
        elif number == self._progress.request:
            self._progress.request = 0
        elif number == self._output.request:
            self._reports += self._output.on_reply(reply)
            self._reports += self._output.stop_unwritten(self._runner, self._inputs.stop)
        elif number == self._rules_request:
            self._on_rules(reply)
        elif number in (self._report_request, self._steal_request):
            self._on_tasks(number, kind, reply)

    def _on_heartbeat(self, reply: Reply) -> None:
        """Stop tasks, use the broker's interval, and request rules that have changed."""
        self._seen = reply.seen
        stopped = [*zip(reply.names, reply.attempts, strict=True)]
        if self.on_ended is not None:
            states = zip(stopped, reply.states, strict=True)
            self.on_ended([key for key, state in states if state is TaskState.CANCELLED])
        self._stop(stopped)
        if reply.heartbeat_ns and self.settings.heartbeat_ns == AUTO:
            lease_ns, is_idle = self.settings.lease_timeout_ns, not self._held
            longest_ns = deadlines.heartbeat_longest_ns(lease_ns, is_idle=is_idle)
            self._set_heartbeat(max(HEARTBEAT_NS_MIN, min(reply.heartbeat_ns, longest_ns)))
            self._heartbeat_due_ns = self._heartbeat_sent_ns + self.heartbeat_ns
        self._rules_version_newest = reply.rules_version
        if self._rule_runner is not None and self._has_rules and not self._rules_request:
            self._schedule_rules(0)

    def _set_heartbeat(self, heartbeat_ns: int) -> None:
        """Set the interval. A heartbeat is a ping too, so the channel pings only if one is late."""
        self.heartbeat_ns = heartbeat_ns
        self._channel.ping_ns = PING_NS + min(heartbeat_ns, 2 * OVERDUE_NS)

    def _shorten_heartbeat(self) -> None:
        """Return to an interval that renews leases. Without tasks it may have been longer."""
        if self._held and self.settings.heartbeat_ns == AUTO:
            self._set_heartbeat(self._longest_ns)
            self._heartbeat_due_ns = self._heartbeat_sent_ns + self._longest_ns

    def _on_excluded(self, reply: Reply) -> None:
        """Stop running tasks: they belong to another process, or to none any more."""
        if reply.code == peer.NAME_LOST:
            self.name_lost = reply.reason
        elif reply.code == peer.FORBIDDEN:
            self.forbidden = reply.reason
        self.waits_for_name = True
        self._stop([*self._held])

    def _schedule_rules(self, delay_ns: int) -> None:
        """Schedule the next request for rules: after a delay if the broker has newer ones."""
        is_newest = self._rules_version_newest in (None, self._rules_version)
        self._rules_due_ns = NEVER_NS if is_newest else self._clock.monotonic_ns() + delay_ns

    def _on_rules(self, reply: Reply) -> None:
        """Pass the rules to the runner, unless the broker refuses the request."""
        self._rules_request, self._has_rules, self._rules_version = 0, True, reply.version
        self._schedule_rules(RULES_RETRY_NS)
        if self._rule_runner is None or reply.kind != peer.RULES:
            return
        self._rule_runner.set_rules(reply.clauses())
        if self._rule_runner.overfeed_max != self._overfeed_max:
            self._overfeed_max = self._rule_runner.overfeed_max
            self._worker_message = self._make_worker_message()

    def _on_tasks(self, number: int, kind: int, reply: Reply) -> None:
        is_report, is_steal = number == self._report_request, number == self._steal_request
        if is_report:
            self._report_request = 0
            for key in self._reported_keys:  # durable, or lost to another worker
                self._held.pop(key, None)
        if is_report and is_steal and kind == peer.OK:
            self._on_report_waits(number)
            is_steal = False
        self._steal_request = 0 if is_steal else self._steal_request
        if is_steal and self._share is not None:
            self._share.on_reply()
        if kind == peer.ERROR:
            self._on_refused(reply.reason, len(self._reported_keys) if is_report else 0)
        elif is_steal and kind == peer.NOT_FOUND and not is_report:
            self._on_not_found()
        else:
            self.refusal, self._not_found_count = "", 0
        if is_steal and kind == peer.TRANSFER:
            self._start_assigned(reply.assigned())
        elif is_steal and kind == peer.EXIT:
            self.shut_down()

    def _on_report_waits(self, number: int) -> None:
        """Keep a report that was acknowledged and waits for tasks. If it is lost, a `Steal` with
        its number is sent instead."""
        name, worker, count = self.settings.name, self._worker_message, self._steal_count
        steal = peer.steal(number, name, worker, count, STEAL_WAIT_NS)
        self._channel.replace(number, steal, STEAL_WAIT_NS)

    def _on_refused(self, reason: str, reports: int) -> None:
        """Record the refusal, and back off: the broker would refuse the next request too."""
        subject = f"its report on {counted(reports, 'task')} (to run again)" if reports else "it"
        self.refusal = f"the broker refuses {subject}: {reason}"
        self._back_off()

    def _on_not_found(self) -> None:
        """Back off if the broker keeps answering at once: it has not registered this worker."""
        waited_ns = self._clock.monotonic_ns() - self._steal_sent_ns
        self._not_found_count = self._not_found_count + 1 if waited_ns < STEAL_WAIT_NS // 2 else 0
        if self._not_found_count > 1:
            self.refusal = "the broker does not register it (see the broker's log)"
            self._back_off()

    def _back_off(self) -> None:
        self._backoff_until_ns = self._clock.monotonic_ns() + REFUSED_RETRY_NS

    def _start_assigned(self, assigned: peer.Assigned) -> None:
        self._came_short = len(assigned.names) < self._steal_count
        if not self._held:
            self._prefetch.on_busy(self._clock.monotonic_ns())
        fresh = []
        for job in assigned_jobs(assigned):
            if (key := job.key) not in self._held:
                self._held[key] = (job.service, job.lane)
                fresh.append(job)
        if self.heartbeat_ns > self._longest_ns:
            self._shorten_heartbeat()
        if self.stopping:
            self._return_tasks(fresh, b"the worker shuts down")
        else:
            for job in fresh:
                self._inputs.start(job)

    def _stop(self, keys: Sequence[tuple[bytes, int]]) -> None:
        """Stop tasks that the broker has cancelled or assigned to another worker."""
        unwanted = dict.fromkeys(keys)
        for name, attempt in unwanted:
            self._inputs.stop((name, attempt))
            self._held.pop((name, attempt), None)
            self._progress.printed.pop((name, attempt), None)
            self._spool.drop((name, attempt))
        if unwanted:
            self._reports = [done for done in self._reports if done.job.key not in unwanted]
            self._output.forget(unwanted)

    def _return_tasks(
        self, jobs: Sequence[Job], reason: bytes, ran: Sequence[Run | None] = ()
    ) -> None:
        self._reports += [
            JobResult(job, Outcome.REFUSED, reason, run=run) for job, run in zip_longest(jobs, ran)
        ]

    # Requests to the broker.

    def _make_worker_message(self) -> peer.WorkerMessage:
        settings, facts = self.settings, self.settings.facts()
        # Overfed tasks of a lane take no slots.
        overfed = settings.slots * self._overfeed_max
        ahead = self._prefetch.count + overfed + sum(job.slots for job in self._waiting)
        return peer.worker_message(facts, ahead, settings.replaces, forwards=settings.forwards)

    def _request_rules(self) -> None:
        if self._exit_request:
            return
        self._rules_due_ns, wanted = NEVER_NS, self.settings.services
        self._rules_request = self._channel.request(lambda number: peer.rules(number, wanted))

    def _tasks_wanted(self) -> int:
        """Return how many tasks to request. The broker adds overfed tasks of a lane unasked."""
        is_closed = self.stopping or not self._has_rules
        if is_closed or self._clock.monotonic_ns() < self._backoff_until_ns:
            return 0
        return max(0, self._slots() + self._waiting_max() - self._unfinished_count())

    def _slots(self) -> int:
        """Return the slots for tasks of this broker: those that no other broker's tasks have."""
        return self.settings.slots if self._share is None else self._share.slots_available()

    def _waiting_max(self) -> int:
        """Return how many tasks may wait for slots. None while calls wait: these would go first."""
        others = 0 if self._share is None else self._share.waiting_max()
        return max(0 if self._waiting else self._prefetch.count, others)

    def _unfinished_count(self) -> int:
        """Return how many tasks are not finished. The overfed tasks of a lane count as one.

        Calls that wait for other tasks don't count: they have no slots.
        """
        held = self._held
        waiting = [job.key for job in self._waiting if job.key in held] if self._waiting else ()
        if self._rule_runner is None or not self._overfeed_max:
            over = len(self._reports) + len(self._output.held) + len(waiting)
            over += len(self._reported_keys) if self._report_request else 0
            return len(self._held) - over
        over_keys = {*waiting, *(one.job.key for one in (*self._reports, *self._output.held))}
        over_keys.update(self._reported_keys if self._report_request else ())
        lanes = [lane for key, lane in self._held.items() if key not in over_keys]
        return slots_of_lanes(lanes, self._rule_runner.overfeed)

    def _send_reports(self) -> None:
        """Send a report, with a `Steal` in the same message if none is in flight."""
        if self._must_wait_for_more():
            return
        done = self._next_reports()
        finished = sum(one.outcome is not Outcome.REFUSED for one in done)
        if self._prefetch.on_finished(finished, self._clock.monotonic_ns()):
            self._worker_message = self._make_worker_message()
        self._reported_keys = [one.job.key for one in done]
        reports = report_columns(done, self.settings.host)
        self._report_request = -1  # in flight, so that its tasks are not counted twice
        count = 0 if self._steal_request else self._tasks_wanted()
        name, worker = self.settings.name, self._worker_message
        self._report_request = self._channel.request(
            lambda number: peer.complete(
                *(number, name, reports, worker, count), wait_ns=STEAL_WAIT_NS
            ),
            stream=bool(count),
        )
        if count:
            self._on_steal(self._report_request, count)

    def _on_steal(self, request: int, count: int) -> None:
        sent_ns = self._clock.monotonic_ns()
        self._steal_request, self._steal_count, self._steal_sent_ns = request, count, sent_ns
        if self._share is not None:
            self._share.on_request(count)

    def _must_wait_for_more(self) -> bool:
        """Return whether the report is not sent yet."""
        due_ns, now_ns = self._reports_due_ns, self._clock.monotonic_ns()
        if self.stopping or 0 < due_ns <= now_ns or not self._has_enough():
            self._reports_due_ns = 0
        elif not due_ns:
            self._reports_due_ns = now_ns + REPORT_DELAY_NS
        return bool(self._reports_due_ns)

    def _next_reports(self) -> list[JobResult]:
        """Remove and return the results for the next report."""
        size = report_size(self._reports)
        first, self._reports = self._reports[:size], self._reports[size:]
        return first

    def _request_tasks(self) -> None:
        """Send a `Steal` that waits at the broker, unless one in a report does, or will soon."""
        count = self._tasks_wanted()
        if not count or (self._came_short and self._held and count <= self._waiting_max()):
            return  # no slot is free, and the report of a held task requests the next ones
        name, worker = self.settings.name, self._worker_message
        request = self._channel.request(
            lambda number: peer.steal(number, name, worker, count, STEAL_WAIT_NS), STEAL_WAIT_NS
        )
        self._on_steal(request, count)

    def _send_heartbeat(self, now_ns: int) -> None:
        # b"" after agents could start again, None if they always could. It is repeated in every
        # heartbeat, because a restarted broker has lost it.
        problem = b"" if self._rule_runner is None else self._rule_runner.agent_error
        agent_error = problem if problem or self._sent_agent_error is not None else None
        is_early = now_ns < self._heartbeat_due_ns and agent_error == self._sent_agent_error
        if is_early or self._exit_request:
            return
        self._sent_agent_error = agent_error
        self._adjust_prefetch()
        self._heartbeat_sent_ns = now_ns
        self._heartbeat_due_ns = now_ns + self.heartbeat_ns
        if len(self._heartbeats) == HEARTBEATS_OPEN_MAX:
            oldest = next(iter(self._heartbeats))
            del self._heartbeats[oldest]
            self._channel.drop(oldest)
        name, worker, held = self.settings.name, self._worker_message, [*self._held]
        heartbeat_ns, named = self.heartbeat_ns, self._steal_request
        malformed = 0 if self._rule_runner is None else self._rule_runner.malformed
        more: dict[str, Any] = {"seen": self._seen, "trouble": agent_error, "waiting": named}
        more["malformed"] = malformed
        waiting = {job.key for job in self._waiting}
        more["calls_waiting"] = [place for place, key in enumerate(held) if key in waiting]
        more["calls_kept"] = self._kept_count
        if not held and self.settings.heartbeat_ns == AUTO:
            more["rest_ns"] = deadlines.heartbeat_longest_ns(
                self.settings.lease_timeout_ns, is_idle=True
            )
        number = self._channel.request(
            lambda number: peer.heartbeat(number, name, worker, held, heartbeat_ns, **more)
        )
        self._heartbeats[number] = named

    def _adjust_prefetch(self) -> None:
        """Adjust the prefetch. Return queued tasks beyond it: another worker may be idle."""
        self._prefetch_due_ns = self._clock.monotonic_ns() + PREFETCH_NS
        if self._prefetch.on_heartbeat(self._clock.monotonic_ns()):
            self._worker_message = self._make_worker_message()
        if self._share is None:
            self._return_excess(b"the worker has slow tasks")

    def _excess(self) -> int:
        """Return how many tasks are queued beyond those that may wait. Below 0: none."""
        slots = self.settings.slots if self._share is None else self._share.slots_unused()
        return self._unfinished_count() - slots - self._waiting_max()

    def _return_excess(self, reason: bytes) -> None:
        excess = self._excess()
        if excess > 0 and not self._overfeed_max:
            self._return_tasks(self._runner.withdraw(excess), reason)
