"""The messages of a native worker: reports, requests for tasks and rules, and heartbeats.

A `Steal` requests tasks for free slots, and beyond the slots only while the broker has enough. It
waits at the broker. A single `Steal` is in flight at a time, alone or as a part of a report. Also
one report at a time: tasks that finish meanwhile go into the next report. While enough tasks are
queued here, a report waits a moment for more of them to finish.

A heartbeat lists the held tasks, and renews their leases. The reply has the version of the broker's
rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import deadlines
from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import counted
from taskyard.core.timer_heap import NEVER_NS
from taskyard.net.channel import OVERDUE_NS, PING_NS
from taskyard.wire.native import peer
from taskyard.worker.held_tasks import report_columns
from taskyard.worker.settings import AUTO

if TYPE_CHECKING:
    from taskyard.net.channel import Channel
    from taskyard.net.protocols import MonotonicClock
    from taskyard.wire.native.peer import Reply
    from taskyard.worker.held_tasks import HeldTasks
    from taskyard.worker.jobs import RuleAwareRunner
    from taskyard.worker.settings import WorkerSettings
    from taskyard.worker.slots import Prefetch, Share

#: How long a `Steal` may wait at the broker.
STEAL_WAIT_NS: Final = 60 * SECOND_NS

#: How long a report waits for more tasks to finish, while enough tasks are queued here. A message
#: for each quick task costs CPU time in worker, broker and client.
REPORT_DELAY_NS: Final = SECOND_NS // 20

#: Delay before the next `Steal` after the machine had no room for a process, or after the broker
#: refused a request. Otherwise the same task would come back at once.
REFUSED_RETRY_NS: Final = SECOND_NS

#: Delay before the next request for rules, if they have another version than in the last heartbeat.
RULES_RETRY_NS: Final = 2 * SECOND_NS

#: The shortest interval of heartbeats that a broker may set.
HEARTBEAT_NS_MIN: Final = SECOND_NS // 100

#: Heartbeats that may be unanswered at once.
HEARTBEATS_OPEN_MAX: Final = 16

#: How often to adjust the prefetch, also between heartbeats.
PREFETCH_NS: Final = SECOND_NS


class RuleRequests:
    """Requests the broker's rules for a runner: before the first task, and after changes."""

    def __init__(
        self,
        settings: WorkerSettings,
        channel: Channel,
        clock: MonotonicClock,
        runner: RuleAwareRunner | None,
    ) -> None:
        self._services = settings.services
        self._channel = channel
        self._clock = clock
        self._runner = runner
        #: The request in flight. 0: none.
        self.number = 0
        #: When the next request is due.
        self.due_ns = NEVER_NS if runner is None else clock.monotonic_ns()
        #: No tasks are requested before the first reply.
        self.is_answered = runner is None
        #: The version of the rules here, and in the last reply to a heartbeat.
        self._version = 0
        self._version_newest: int | None = None

    @property
    def overfeed_max(self) -> int:
        return 0 if self._runner is None else self._runner.overfeed_max

    def send(self) -> None:
        """Request the rules."""
        self.due_ns = NEVER_NS
        self.number = self._channel.request(lambda number: peer.rules(number, self._services))

    def on_heartbeat(self, version: int) -> None:
        """Note the version of the broker's rules, and request them if they are new."""
        self._version_newest = version
        if self._runner is not None and self.is_answered and not self.number:
            self._schedule(0)

    def on_reply(self, reply: Reply) -> None:
        """Pass the rules to the runner, unless the broker refuses the request."""
        self.number, self.is_answered, self._version = 0, True, reply.version
        self._schedule(RULES_RETRY_NS)
        if self._runner is not None and reply.kind == peer.RULES:
            self._runner.set_rules(reply.clauses())

    def _schedule(self, delay_ns: int) -> None:
        """Schedule the next request after a delay, if the broker has newer rules."""
        is_newest = self._version_newest in (None, self._version)
        self.due_ns = NEVER_NS if is_newest else self._clock.monotonic_ns() + delay_ns


class TaskRequests:
    """Requests tasks for the free slots, and some beyond them while tasks are quick."""

    #: Take no more tasks.
    is_closed = False
    #: Why the broker refuses requests. Empty while it does not.
    refusal = ""
    #: The part of a process that works for several brokers. None: all of its slots.
    share: Share | None = None
    #: The last answer had fewer tasks than were requested: the broker has no more for now.
    _came_short = False
    #: `Steal`s in a row that the broker answered at once without tasks.
    _not_found_count = 0

    def __init__(  # noqa: PLR0913, PLR0917  # the parts of one worker
        self,
        settings: WorkerSettings,
        channel: Channel,
        clock: MonotonicClock,
        held: HeldTasks,
        prefetch: Prefetch,
        rules: RuleRequests,
    ) -> None:
        self.settings = settings
        self._channel = channel
        self._clock = clock
        self._held = held
        self._rules = rules
        self.prefetch = prefetch
        #: When to adjust the prefetch, unless it is 0.
        self.prefetch_due_ns = clock.monotonic_ns()
        #: The `Steal` in flight, and how many tasks it requests. 0: none.
        self.number = self._count = 0
        self._sent_ns = 0
        self._backoff_until_ns = 0
        self.update_message()

    def update_message(self) -> None:
        """Encode the facts of the worker anew, after a change."""
        settings = self.settings
        # Overfed tasks of a lane take no slots, and neither do calls that wait.
        ahead = self.prefetch.count + settings.slots * self._rules.overfeed_max
        ahead += sum(job.slots for job in self._held.waiting_calls)
        #: The worker as every request describes it.
        self.worker_message = peer.worker_message(
            settings.facts(), ahead, settings.replaces, forwards=settings.forwards
        )

    # How many tasks.

    def tasks_wanted(self) -> int:
        """Return how many tasks to request. The broker adds overfed tasks of a lane unasked."""
        is_ready = self._rules.is_answered and not self.is_closed
        if not is_ready or self._clock.monotonic_ns() < self._backoff_until_ns:
            return 0
        return max(0, self._slots() + self._waiting_max() - self._held.unfinished_count())

    def has_enough(self) -> bool:
        """Return whether enough tasks are queued here until the next message."""
        # A `Steal` in flight gets the next tasks without a message from here.
        reserve = 0 if self.number else self.prefetch.count // 3
        return self._held.unfinished_count() > self._slots() + reserve

    def excess(self) -> int:
        """Return how many tasks are queued beyond the tasks that may wait. Below 0: none."""
        slots = self.settings.slots if self.share is None else self.share.slots_unused()
        return self._held.unfinished_count() - slots - self._waiting_max()

    def _slots(self) -> int:
        """Return the slots for tasks of this broker, which no other broker's tasks have."""
        return self.settings.slots if self.share is None else self.share.slots_available()

    def _waiting_max(self) -> int:
        """Return how many tasks may wait for slots. None while calls wait: these would go first."""
        ahead = 0 if self.share is None else self.share.waiting_max()
        return max(0 if self._held.waiting_calls else self.prefetch.count, ahead)

    # The prefetch.

    def on_busy(self) -> None:
        """Begin to measure how quick tasks are: some have come to an idle worker."""
        self.prefetch.on_busy(self._clock.monotonic_ns())

    def on_finished(self, tasks: int) -> None:
        """Count finished tasks."""
        if self.prefetch.on_finished(tasks, self._clock.monotonic_ns()):
            self.update_message()

    def adjust_prefetch(self) -> None:
        """Raise or lower the prefetch by the tasks that have finished since the last time."""
        now_ns = self._clock.monotonic_ns()
        self.prefetch_due_ns = now_ns + PREFETCH_NS
        if self.prefetch.on_heartbeat(now_ns):
            self.update_message()

    # The `Steal`.

    def send(self) -> None:
        """Send a `Steal`, unless a report has or will soon have it."""
        count = self.tasks_wanted()
        if not count or (self._came_short and self._held.lanes and count <= self._waiting_max()):
            return  # no slot is free, and the report of a held task requests the next tasks
        name, worker = self.settings.name, self.worker_message
        request = self._channel.request(
            lambda number: peer.steal(number, name, worker, count, STEAL_WAIT_NS), STEAL_WAIT_NS
        )
        self.on_sent(request, count)

    def on_sent(self, number: int, count: int) -> None:
        """Note a `Steal` that was sent, alone or in a report."""
        self.number, self._count, self._sent_ns = number, count, self._clock.monotonic_ns()
        if self.share is not None:
            self.share.on_request(count)

    def on_report_waits(self) -> None:
        """Keep a report that was acknowledged and waits for tasks. If it is lost, a `Steal` with
        its number is sent instead."""
        name, worker = self.settings.name, self.worker_message
        steal = peer.steal(self.number, name, worker, self._count, STEAL_WAIT_NS)
        self._channel.replace(self.number, steal, STEAL_WAIT_NS)

    def on_reply(self) -> None:
        """Note that the `Steal` was answered."""
        self.number = 0
        if self.share is not None:
            self.share.on_reply()

    def on_assigned(self, tasks: int) -> None:
        """Note how many tasks the answer had."""
        self._came_short = tasks < self._count

    def on_accepted(self) -> None:
        """Note that the broker refuses nothing."""
        self.refusal, self._not_found_count = "", 0

    def on_refused(self, reason: str, reports: int = 0) -> None:
        """Record the refusal, and back off: the broker would refuse the next request too."""
        subject = f"its report on {counted(reports, 'task')} (to run again)" if reports else "it"
        self.refusal = f"the broker refuses {subject}: {reason}"
        self.back_off()

    def on_not_found(self) -> None:
        """Back off if the broker keeps answering at once: it has not registered this worker."""
        waited_ns = self._clock.monotonic_ns() - self._sent_ns
        self._not_found_count = self._not_found_count + 1 if waited_ns < STEAL_WAIT_NS // 2 else 0
        if self._not_found_count > 1:
            self.refusal = "the broker does not register it (see the broker's log)"
            self.back_off()

    def back_off(self) -> None:
        """Request no tasks for a while."""
        self._backoff_until_ns = self._clock.monotonic_ns() + REFUSED_RETRY_NS


class Reports:
    """The reports on finished tasks: one in flight at a time, which may request tasks too."""

    def __init__(
        self, channel: Channel, clock: MonotonicClock, held: HeldTasks, requests: TaskRequests
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._held = held
        self._requests = requests
        #: The report in flight. 0: none.
        self.number = 0
        #: When results are sent that wait for more of them. 0: they don't wait.
        self.due_ns = 0

    def send(self, *, may_wait: bool) -> None:
        """Send a report, unless it waits. It requests tasks too if no other message does."""
        if may_wait and self._must_wait():
            return
        self.due_ns = 0
        requests, settings = self._requests, self._requests.settings
        done = self._held.take_results()
        requests.on_finished(sum(one.outcome is not Outcome.REFUSED for one in done))
        reports = report_columns(done, settings.host)
        worker = requests.worker_message
        count = 0 if requests.number else requests.tasks_wanted()
        self.number = self._channel.request(
            lambda number: peer.complete(
                number, settings.name, reports, worker, count, wait_ns=STEAL_WAIT_NS
            ),
            stream=bool(count),
        )
        if count:
            requests.on_sent(self.number, count)

    def _must_wait(self) -> bool:
        """Return whether the results wait for more of them."""
        now_ns = self._clock.monotonic_ns()
        if 0 < self.due_ns <= now_ns or not self._requests.has_enough():
            return False
        self.due_ns = self.due_ns or now_ns + REPORT_DELAY_NS
        return True

    def on_reply(self) -> int:
        """Forget the reported tasks. Return their number."""
        self.number = 0
        return self._held.on_report_reply()


class Heartbeats:
    """The heartbeats of a worker, and their interval."""

    def __init__(self, settings: WorkerSettings, channel: Channel, clock: MonotonicClock) -> None:
        self._settings = settings
        self._channel = channel
        lease_ns = settings.lease_timeout_ns
        #: The longest interval that renews leases, and that of a worker without tasks.
        self._longest_ns = deadlines.heartbeat_longest_ns(lease_ns)
        self._longest_idle_ns = deadlines.heartbeat_longest_ns(lease_ns, is_idle=True)
        #: The interval now, when the next heartbeat is due, and when the last was sent.
        self.interval_ns = settings.heartbeat_ns or deadlines.heartbeat_interval_ns(1, lease_ns)
        self.due_ns = self._sent_ns = clock.monotonic_ns()
        #: Heartbeats in flight, and the `Steal` that each names. A slow broker may have several.
        self._in_flight: dict[int, int] = {}
        #: `seen` of the last reply, sent back with the next heartbeat.
        self._seen = 0
        #: Why agents can't start. b"" after they could again, None if they always could.
        self.agent_error: bytes | None = None
        self._set_interval(self.interval_ns)

    def send(
        self, now_ns: int, worker: peer.WorkerMessage, held: HeldTasks, steal: int, malformed: int
    ) -> None:
        """Send a heartbeat that names the held tasks and the `Steal` in flight."""
        self._sent_ns, self.due_ns = now_ns, now_ns + self.interval_ns
        if len(self._in_flight) == HEARTBEATS_OPEN_MAX:
            oldest = next(iter(self._in_flight))
            del self._in_flight[oldest]
            self._channel.drop(oldest)
        keys, waiting = [*held.lanes], {job.key for job in held.waiting_calls}
        is_resting = not keys and self._settings.heartbeat_ns == AUTO
        number = self._channel.request(
            lambda number: peer.heartbeat(
                number,
                self._settings.name,
                worker,
                keys,
                self.interval_ns,
                seen=self._seen,
                trouble=self.agent_error,
                malformed=malformed,
                rest_ns=self._longest_idle_ns if is_resting else 0,
                waiting=steal,
                calls_waiting=[index for index, key in enumerate(keys) if key in waiting],
                calls_kept=held.kept_calls_count,
            )
        )
        self._in_flight[number] = steal

    def on_agent_error(self, problem: bytes) -> None:
        """Send a changed agent error at once, and then in every heartbeat: a restarted broker has
        lost it."""
        self.agent_error = problem
        self.due_ns = 0

    def take(self, number: int) -> int | None:
        """Return the `Steal` that a heartbeat in flight names. None: it is no heartbeat."""
        return self._in_flight.pop(number, None)

    def on_reply(self, reply: Reply, *, is_idle: bool) -> None:
        """Use the broker's interval."""
        self._seen = reply.seen
        if reply.heartbeat_ns and self._settings.heartbeat_ns == AUTO:
            longest_ns = self._longest_idle_ns if is_idle else self._longest_ns
            self._set_interval(max(HEARTBEAT_NS_MIN, min(reply.heartbeat_ns, longest_ns)))
            self.due_ns = self._sent_ns + self.interval_ns

    def on_busy(self) -> None:
        """Return to an interval that renews leases. Without tasks it may have been longer."""
        if self.interval_ns > self._longest_ns and self._settings.heartbeat_ns == AUTO:
            self._set_interval(self._longest_ns)
            self.due_ns = self._sent_ns + self._longest_ns

    def _set_interval(self, interval_ns: int) -> None:
        """Set the interval. A heartbeat is a ping too, so the channel pings only if it is late."""
        self.interval_ns = interval_ns
        self._channel.ping_ns = PING_NS + min(interval_ns, 2 * OVERDUE_NS)
