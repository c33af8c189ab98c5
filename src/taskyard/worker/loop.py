"""The worker's loop: asks for tasks, has them run, reports, shows life.

Owns what the worker holds, from the assignment to the broker's word that the report is durable. The
lease belongs to this loop: as long as it turns, its heartbeats list what it holds, whatever the
children do; if it hangs they stop, and the tasks go to others. Gets its line, runner and clock as
arguments. Where its hands follow the broker's rules it takes no task before it knows these, and
asks for them again now and then.

One report and one wish for more tasks are under way at a time: what is done meanwhile is gathered
and leaves together, with the next wish in the same message. What the broker does not acknowledge is
sent again by the line.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct

from taskyard.core import runs
from taskyard.core.events import Outcome
from taskyard.core.identity import split
from taskyard.core.limits import SECOND_NS
from taskyard.core.tasks import Result
from taskyard.core.workers import WorkerFacts
from taskyard.wire import dwork_peer as peer
from taskyard.worker.jobs import Done, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.events import Rule
    from taskyard.core.runs import Run
    from taskyard.net.line import Channel
    from taskyard.wire.dwork_peer import Reply

#: How long a wish for tasks may wait at the broker.
STEAL_NS: Final = 30 * SECOND_NS

#: A worker that has to refuse a task, because the machine gives it no process, asks for no more for
#: so long: it would be given the same one at once. Likewise one that is refused by the broker.
REFUSED_NS: Final = SECOND_NS

#: How often to ask whether the rules have changed.
RULES_NS: Final = 2 * SECOND_NS

#: Signs of life that may be unanswered at once.
HEARTBEATS_OPEN_MAX: Final = 16

#: How often to tell how tasks go, at most: each time is a record in the journal.
PROGRESS_NS: Final = SECOND_NS

#: Results and output in one report; the rest follows in the next.
REPORT_BYTES_MAX: Final = 4 * 1024 * 1024

#: Tasks asked for beyond the free slots, for workers that finish at least so many a second: about
#: a tenth of a second of work, so that a quick task does not wait for a message. Those of slow
#: tasks ask for none: what they hold and don't run would be missing elsewhere.
AHEAD: Final = ((2560, 256), (640, 64), (80, 8), (4, 1), (0, 0))


class Settings(Struct, frozen=True):
    """Who works, and how much at once."""

    name: bytes
    services: tuple[bytes, ...]
    slots: int
    #: Tells this process from an earlier one of the same name.
    incarnation: int
    heartbeat_ns: int = SECOND_NS
    #: Silence after which the broker gives its tasks to others.
    silence_ns: int = 15 * SECOND_NS
    #: The machine and process, for whoever looks for it.
    host: bytes = b""
    pid: int = 0
    #: Its supervisor saw the processes of its name end, from this incarnation on; 0: no supervisor.
    replaces: int = 0


class Hands(Protocol):
    """Who does the work: the runner."""

    def start(self, job: Job) -> None: ...

    def stop(self, name: bytes, attempt: int) -> None: ...

    def run_so_far(self, name: bytes, attempt: int) -> Run | None: ...

    def turn(self) -> list[Done]: ...

    def unstarted(self) -> list[Job]: ...

    def wake_at_ns(self) -> int | None: ...


class Host(Hands, Protocol):
    """Hands that follow the broker's rules."""

    @property
    def trouble(self) -> bytes: ...

    @property
    def malformed(self) -> int: ...

    @property
    def overfeed_max(self) -> int: ...

    def overfeed(self, lane: tuple[bytes, bytes]) -> int: ...

    def follow(self, clauses: Sequence[Rule]) -> None: ...


class Clock(Protocol):
    def monotonic_ns(self) -> int: ...


class Loop:
    """One worker, one broker."""

    #: Another live process has the name: no tasks until the broker gives it to this one.
    waits_for_name = False
    #: Why the broker gave the name to another process for good; empty while it did not.
    name_lost = ""

    def __init__(
        self,
        settings: Settings,
        line: Channel,
        hands: Hands,
        clock: Clock,
        host: Host | None = None,
    ) -> None:
        """`host` is the hands again, where they follow the broker's rules."""
        self._settings = settings
        self._line = line
        self._hands = hands
        self._host = host
        self._clock = clock
        #: Tasks and attempts that the broker has us down for, each with its service and lane.
        self._held: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        #: Done, and not on their way yet.
        self._reports: list[Done] = []
        #: The report under way, and what it is about.
        self._report = 0
        self._reported: list[tuple[bytes, int]] = []
        #: The wish for more under way; it may be the report too.
        self._steal = 0
        self._stole_ns = 0
        #: Wishes in a row that the broker did not let wait.
        self._turned_away = 0
        #: Signs of life that are not answered yet; a slow broker may have several.
        self._heartbeats: dict[int, None] = {}
        #: What the broker's last answer to a heartbeat was about: see there.
        self._seen = 0
        self._heartbeat_due_ns = clock.monotonic_ns()
        #: What the last heartbeat said of the host's trouble; None: nothing.
        self._told_trouble: bytes | None = None
        #: The question for the rules under way, when to ask again, and whether they are known.
        self._rules = 0
        self._rules_due_ns = self._heartbeat_due_ns
        self._is_ruled = host is None
        #: What tasks have printed that the broker was not told yet.
        self._printed: dict[tuple[bytes, int], Result] = {}
        #: The message of that under way, and when the next one may leave.
        self._progress = 0
        self._progress_due_ns = 0
        self._farewell = 0
        self._rests_until_ns = 0
        self._ahead = 0
        self._overfeed_max = 0
        self._finished = 0
        self._introduction = self._introduce()
        #: Why the broker refuses what it is asked; empty while it does not.
        self.trouble = ""
        #: No more tasks: it ends when it holds none.
        self.leaving = False
        #: It has said goodbye, and was heard.
        self.gone = False

    @property
    def held(self) -> int:
        return len(self._held)

    def leave(self) -> None:
        """Take no more tasks, give back what is not begun, and go when the rest is done."""
        if not self.leaving:
            self.leaving = True
            self._give_back(self._hands.unstarted())

    def abandon(self, jobs: Sequence[Job]) -> None:
        """End what runs, and give it back."""
        runs_so_far = [self._hands.run_so_far(*job.key) for job in jobs]
        for job in jobs:
            self._hands.stop(*job.key)
        self._give_back(jobs, runs_so_far)

    def turn(self) -> None:
        """Once around: never waits."""
        for reply in self._line.receive():
            self._hear(reply)
        self._note(self._hands.turn())
        self._ask_for_rules()
        self._send_reports()
        self._ask_for_tasks()
        self._show_life()
        self._tell_progress()
        if self.leaving and not self._held and not self._farewell:
            name, incarnation = self._settings.name, self._settings.incarnation
            self._farewell = self._line.request(
                lambda number: peer.leave(number, name, incarnation)
            )
        self._line.turn()

    def show_progress(self, job: Job, printed: Result) -> None:
        """Let the broker know what a task has printed so far: the newest, and not too often."""
        if job.key in self._held:
            self._printed[job.key] = printed

    def _note(self, done: list[Done]) -> None:
        self._reports += done
        for one in done:  # the report tells it all
            self._printed.pop(one.job.key, None)
        if any(one.outcome is Outcome.REFUSED and not one.is_well for one in done):
            self._rest()

    def wake_at_ns(self) -> int:
        """When the next turn is due though nothing arrives."""
        times = [self._line.wake_at_ns(), self._hands.wake_at_ns()]
        if not self._farewell:
            times.append(self._heartbeat_due_ns)
            if self._host is not None and not self._rules:
                times.append(self._rules_due_ns)
        if self._printed and not self._progress:
            times.append(self._progress_due_ns)
        due_ns = min((time for time in times if time is not None), default=None)
        return self._clock.monotonic_ns() + SECOND_NS if due_ns is None else due_ns

    # What the broker says.

    def _hear(self, reply: Reply) -> None:
        number = reply.request
        if reply.kind == peer.ERROR and reply.code in (peer.NAME_HELD, peer.NAME_LOST):
            self._lack_name(reply)
        if number == self._farewell:
            self.gone = True
        elif number in self._heartbeats:
            del self._heartbeats[number]
            if reply.kind == peer.ERROR:
                self._be_refused(reply.reason, 0)
                return
            if self.waits_for_name:
                self.waits_for_name, self.trouble = False, ""
            self._seen = reply.seen
            self._stop(zip(reply.names, reply.attempts, strict=True))
        elif number == self._progress:
            self._progress = 0
        elif number == self._rules:
            self._hear_of_rules(reply)
        elif number in (self._report, self._steal):
            self._hear_of_tasks(number, reply)

    def _lack_name(self, reply: Reply) -> None:
        """Stop what runs: it belongs to another process, or to nobody any more."""
        if reply.code == peer.NAME_LOST:
            self.name_lost = reply.reason
        self.waits_for_name = True
        held = [*self._held]
        self._stop(zip([name for name, _ in held], [number for _, number in held], strict=True))

    def _hear_of_rules(self, reply: Reply) -> None:
        """A broker that does not tell them has none: then everything is as without."""
        self._rules, self._is_ruled = 0, True
        self._rules_due_ns = self._clock.monotonic_ns() + RULES_NS
        if self._host is None or reply.kind != peer.RULES:
            return
        self._host.follow(reply.clauses())
        if self._host.overfeed_max != self._overfeed_max:
            self._overfeed_max = self._host.overfeed_max
            self._introduction = self._introduce()

    def _hear_of_tasks(self, number: int, reply: Reply) -> None:
        is_report, is_steal = number == self._report, number == self._steal
        if is_report:
            self._report = 0
            for key in self._reported:  # durable, or not ours any more: either way it is over
                self._held.pop(key, None)
        if is_steal:
            self._steal = 0
        if reply.kind == peer.ERROR:
            self._be_refused(reply.reason, len(self._reported) if is_report else 0)
        elif is_steal and reply.kind == peer.NOT_FOUND and not is_report:
            self._be_turned_away()
        else:
            self.trouble, self._turned_away = "", 0
        if is_steal and reply.kind == peer.TRANSFER:
            self._take(reply.assigned())
        elif is_steal and reply.kind == peer.EXIT:
            self.leave()

    def _be_refused(self, reason: str, reports: int) -> None:
        """The broker will say the same of the next message: don't ask at once."""
        what = f"its report on {reports} task(s), to be done again" if reports else "it"
        self.trouble = f"the broker refuses {what}: {reason}"
        self._rest()

    def _be_turned_away(self) -> None:
        """Nothing to do. A broker that says so at once, again and again, does not know us."""
        waited_ns = self._clock.monotonic_ns() - self._stole_ns
        self._turned_away = self._turned_away + 1 if waited_ns < STEAL_NS // 2 else 0
        if self._turned_away > 1:
            self.trouble = "the broker does not take it on; see what the broker logs"
            self._rest()

    def _rest(self) -> None:
        self._rests_until_ns = self._clock.monotonic_ns() + REFUSED_NS

    def _take(self, assigned: peer.Assigned) -> None:
        jobs: list[Job] = []
        for index, name in enumerate(assigned.names):
            terms = assigned.terms_of(index)
            # A plain peer creates tasks without a payload: their name is what there is to do.
            payload = assigned.payloads[index] or split(name, terms.campaign)
            jobs.append(
                Job(
                    *(name, assigned.attempts[index], terms.service, payload),
                    time_limit_ns=terms.time_limit_ns,
                    slots=terms.slots,
                    lane=assigned.lanes[index] if assigned.lanes else b"",
                    campaign=terms.campaign,
                )
            )
        fresh = [job for job in jobs if job.key not in self._held]
        for job in fresh:
            self._held[job.key] = (job.service, job.lane)
        if self.leaving:
            self._give_back(fresh)
        else:
            for job in fresh:
                self._hands.start(job)

    def _stop(self, keys: zip[tuple[bytes, int]]) -> None:
        """The broker has these down for somebody else, or wants them no more."""
        unwanted = dict.fromkeys(keys)
        for name, attempt in unwanted:
            self._hands.stop(name, attempt)
            self._held.pop((name, attempt), None)
            self._printed.pop((name, attempt), None)
        if unwanted:
            self._reports = [done for done in self._reports if done.job.key not in unwanted]

    def _give_back(self, jobs: Sequence[Job], ran: Sequence[Run | None] = ()) -> None:
        self._reports += [
            Done(job, Outcome.REFUSED, b"the worker leaves", run=run)
            for job, run in zip_longest(jobs, ran)
        ]

    # What the broker is told.

    def _introduce(self) -> peer.WorkerMessage:
        settings = self._settings
        facts = WorkerFacts(
            services=settings.services,
            slots_total=settings.slots,
            lease_timeout_ns=settings.silence_ns,
            incarnation=settings.incarnation,
            host=settings.host,
            pid=settings.pid,
            heartbeat_ns=settings.heartbeat_ns,
        )
        # What a lane has here beyond the task in hand takes no slot.
        overfed = settings.slots * self._overfeed_max
        return peer.worker_message(facts, self._ahead + overfed, settings.replaces)

    def _ask_for_rules(self) -> None:
        is_due = self._rules_due_ns <= self._clock.monotonic_ns()
        if self._host is None or self._rules or not is_due or self._farewell:
            return
        services = self._settings.services
        self._rules = self._line.request(lambda number: peer.rules(number, services))

    def _room(self) -> int:
        """How many tasks to ask for. An overfed lane is as one: its tasks are done one after the
        other, and the broker adds them by itself."""
        if self.leaving or not self._is_ruled or self._clock.monotonic_ns() < self._rests_until_ns:
            return 0
        return max(0, self._settings.slots + self._ahead - self._in_hand())

    def _in_hand(self) -> int:
        """What is not done yet."""
        if self._host is None or not self._overfeed_max:
            over = len(self._reports) + (len(self._reported) if self._report else 0)
            return len(self._held) - over
        over_keys = {done.job.key for done in self._reports}
        if self._report:
            over_keys.update(self._reported)
        lanes = Counter(lane for key, lane in self._held.items() if key not in over_keys)
        return sum(-(-count // (1 + self._host.overfeed(one))) for one, count in lanes.items())

    def _send_reports(self) -> None:
        """With the next wish in the same message, if none is under way."""
        if not self._reports or self._report:
            return
        done = self._next_reports()
        self._finished += len(done)
        self._reported = [one.job.key for one in done]
        reports = peer.ReportColumns(
            names=[one.job.name for one in done],
            attempts=[one.job.attempt for one in done],
            outcomes=[one.outcome for one in done],
            texts=[one.text for one in done],
            outputs=[one.output for one in done],
            retry_at_ns=[one.retry_at_ns for one in done],
            result_bytes_total=[one.result_bytes_total for one in done],
            output_bytes_total=[one.output_bytes_total for one in done],
            runs=runs.run_columns([one.run for one in done], self._settings.host),
        )
        self._report = -1  # under way, so that its tasks are not counted twice
        count = 0 if self._steal else self._room()
        name, worker = self._settings.name, self._introduction
        self._report = self._line.request(
            lambda number: peer.complete(number, name, reports, worker, count)
        )
        if count:
            self._steal = self._report

    def _next_reports(self) -> list[Done]:
        """All that is done, or as much of it as fits a message."""
        count = room = 0
        for done in self._reports:
            room += len(done.text) + len(done.output)
            if room > REPORT_BYTES_MAX and count:
                break
            count += 1
        first, self._reports = self._reports[:count], self._reports[count:]
        return first

    def _ask_for_tasks(self) -> None:
        """Wait for them at the broker: a wish that came with a report was answered at once."""
        count = self._room()
        if self._steal or not count:
            return
        name, worker = self._settings.name, self._introduction
        self._stole_ns = self._clock.monotonic_ns()
        self._steal = self._line.request(
            lambda number: peer.steal(number, name, worker, count, STEAL_NS), STEAL_NS
        )

    def _show_life(self) -> None:
        now_ns = self._clock.monotonic_ns()
        trouble = self._trouble_to_tell()
        is_due = self._heartbeat_due_ns <= now_ns or trouble != self._told_trouble
        if not is_due or self._farewell:
            return
        self._told_trouble = trouble
        self._look_ahead()
        self._heartbeat_due_ns = now_ns + self._settings.heartbeat_ns
        if len(self._heartbeats) == HEARTBEATS_OPEN_MAX:
            oldest = next(iter(self._heartbeats))
            del self._heartbeats[oldest]
            self._line.drop(oldest)
        name, worker, held = self._settings.name, self._introduction, [*self._held]
        heartbeat_ns, seen = self._settings.heartbeat_ns, self._seen
        malformed = 0 if self._host is None else self._host.malformed
        more: dict[str, Any] = {"seen": seen, "trouble": trouble, "malformed": malformed}
        number = self._line.request(
            lambda number: peer.heartbeat(number, name, worker, held, heartbeat_ns, **more)
        )
        self._heartbeats[number] = None

    def _trouble_to_tell(self) -> bytes | None:
        """Why agents can't be started, told for as long as that is so; and that they can, from
        then on: a broker may come back and not know it. None: there never was any."""
        trouble = b"" if self._host is None else self._host.trouble
        return trouble if trouble or self._told_trouble is not None else None

    def _tell_progress(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if not self._printed or self._progress or now_ns < self._progress_due_ns:
            return
        self._progress_due_ns = now_ns + PROGRESS_NS
        name, incarnation = self._settings.name, self._settings.incarnation
        held, printed = [*self._printed], [*self._printed.values()]
        self._printed.clear()
        self._progress = self._line.request(
            lambda number: peer.progress(number, name, held, printed, incarnation)
        )

    def _look_ahead(self) -> None:
        """Ask for more at once if tasks are quick, for less if they are half as quick as that."""
        rate = self._finished * SECOND_NS // self._settings.heartbeat_ns
        self._finished = 0
        for lowest, ahead in AHEAD:
            easier = ahead <= self._ahead
            if rate >= (lowest // 2 if easier else lowest):
                if ahead != self._ahead:
                    self._ahead = ahead
                    self._introduction = self._introduce()
                return
