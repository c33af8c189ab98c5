"""Flow control of what comes in: the limits of a turn, and a fair queue of client requests.

Every request has an estimated cost. A cheap request is handled in the turn in which it arrives. All
other requests wait in a queue for each client. Every turn serves these queues, client by client, up
to its budget. A command over many tasks is done in portions, each in its own turn and commit. A
client that does not read its replies is not served, and one with too many waiting requests is
refused.

While the journal's compaction lags behind, submissions wait in these queues for a time, and later
requests of their client behind them. At a larger lag the scheduler refuses them (`core.commands`).

Costs are counted, never measured, so the same events always give the same turns. Reports, requests
and heartbeats of workers are never queued. Independent of sockets, dialects and the journal.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field, structs

from taskyard.core import commands, events, graph
from taskyard.core.effects import CommandAck, Refused
from taskyard.core.limits import (
    LAG_REFUSE_ALL_PERCENT,
    LAG_SLOW_PERCENT,
    LIST_LANES_MAX,
    LIST_MEASURED_MAX,
    LIST_SCAN_MAX,
    LIST_TASKS_MAX,
    SECOND_NS,
    STATS_ROWS_MAX,
)
from taskyard.core.model import Refusal
from taskyard.core.states import BLOCKED, DELAYED, FAILED
from taskyard.core.timer_heap import NEVER_NS, TimerHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from taskyard.core.effects import Effect
    from taskyard.core.entities import Task
    from taskyard.core.events import Event
    from taskyard.core.ledger import Ledger

    Handle = Callable[[Event], list[Effect]]

#: Messages and bytes that one turn receives. They share a commit, but the first waits for the last.
MESSAGES_PER_TURN_MAX: Final = 256
BYTES_PER_TURN_MAX: Final = 16 * 1024 * 1024

#: The CPU time for which a turn receives messages: columns of a hundred thousand tasks cost more to
#: decode than their bytes suggest, and more again to handle. Not the time on the clock: on a busy
#: machine it would end a turn after a few messages, and each turn has a commit. But reading the CPU
#: time is a system call, so it is read once half of this has passed on the clock.
DECODING_NS_MAX: Final = SECOND_NS // 20

#: How long submissions wait, for each percent of lag beyond the mark. Half a second at most, so no
#: peer repeats a submission that waits.
HOLD_NS_A_PERCENT: Final = SECOND_NS // 500

#: The scheduler receives the lag in steps of this many percent.
LAG_STEP_PERCENT: Final = 5

#: The bytes of a submission that count as a task that it names.
_NAME_BYTES: Final = 100

#: Waiting requests of one client, and the tasks that they name. A single request may always wait.
WAITING_MAX: Final = 1000
WAITING_NAMES_MAX: Final = 200_000

#: Waiting requests of all clients, and the tasks that they name: some 100 MB.
WAITING_ALL_MAX: Final = 50_000
WAITING_ALL_NAMES_MAX: Final = 1_000_000


class Budget(Struct, frozen=True):
    """The budget of one turn for requests. A unit is about a microsecond of CPU time."""

    #: All waiting requests, except a single one that costs more.
    turn: int = 60_000
    #: A request up to this cost is handled at once.
    cheap: int = 1_000
    #: All requests that are handled at once.
    turn_cheap: int = 40_000
    #: Tasks that a portion of a command examines, and that it changes.
    looked: int = 20_000
    changed: int = 2_000
    #: Names in a portion of a watch.
    watched: int = 10_000
    #: Dependents that are cancelled at once with a task. More are cancelled in portions.
    cancelled: int = 10_000


#: Never waits.
_PING: Final = events.StatsRequested

Command = (
    events.CancelRequested
    | events.RetryRequested
    | events.MoveRequested
    | events.EditRequested
    | events.ExpireRequested
)


class _Waiting(Struct):
    """A request in a queue."""

    event: Any
    cost: int
    #: The number of tasks that it names.
    names: int = 0
    #: A submission: it is not handled before.
    due_ns: int = 0
    #: The rest of a command, portion by portion. None before it starts.
    portions: Iterator[list[Task]] | None = None
    #: Tasks changed so far.
    changed: int = 0
    #: Repetitions of the same command while it waited.
    again: list[int] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        """Whether this is a command that is done in portions."""
        return self.cost >= _PORTION and isinstance(self.event, Command)


class Requests:
    """The waiting requests, by client."""

    def __init__(self, ledger: Ledger, is_reading: Callable[[bytes], bool]) -> None:
        """`is_reading` returns whether a client reads its replies."""
        self._ledger = ledger
        self._is_reading = is_reading
        self.budget = Budget()
        #: The waiting requests of each client that has some.
        self.queues: dict[bytes, deque[_Waiting]] = {}
        #: Clients with a queue: those not served since it began, and the others.
        self._fresh: deque[bytes] = deque()
        self._served: deque[bytes] = deque()
        self._pick = 0
        self._count = self._names = 0
        #: The unfinished command. There is at most one, because it keeps a list of tasks.
        self._begun: _Waiting | None = None
        #: Queued watches, by request, and whether each has ended before it was handled.
        self._watches: dict[int, bool] = {}
        #: The work since the last compaction, in percent of the work that makes one due.
        self.lag_percent = 0
        #: How long submissions wait because of that. They keep their order when the lag has ended,
        #: so they wait until no request waits any more.
        self.hold_ns = 0
        self.is_holding = False
        #: Clients whose next request is a submission that waits.
        self._later = TimerHeap()

    def __len__(self) -> int:
        return self._count

    def set_lag(self, percent: int) -> events.LagChanged | None:
        """Set the lag of compaction. Return an event for the scheduler if it changed by a step."""
        rounded = percent - percent % LAG_STEP_PERCENT
        if rounded == self.lag_percent:
            return None
        self.lag_percent = rounded
        beyond = min(rounded, LAG_REFUSE_ALL_PERCENT) - LAG_SLOW_PERCENT
        self.hold_ns = max(0, beyond) * HOLD_NS_A_PERCENT
        self.is_holding = beyond > 0 or (self.is_holding and bool(self.queues))
        return events.LagChanged(0, rounded)

    def ready_at_ns(self) -> int:
        """Return when a waiting request can be handled, 0 for now. `NEVER_NS`: when its client
        reads."""
        if any(self._can_go(one, self.queues[one][0]) for one in (*self._fresh, *self._served)):
            return 0
        at_ns = self._later.heap[0][0]
        return at_ns if self.hold_ns or at_ns == NEVER_NS else 0

    def admit(self, arrived: Sequence[Event], now_ns: int) -> tuple[list[Event], list[Effect]]:
        """Queue expensive requests, and submissions while compaction lags.

        Return the events to handle now, in order, and refusals.
        """
        now: list[Event] = []
        refused: list[Effect] = []
        room = self.budget.turn_cheap
        for event in arrived:
            estimate = _COSTS.get(type(event))
            if estimate is None:
                if self.is_holding and type(event) is events.SubmitRequested:
                    refused += self._hold(event, now_ns + self.hold_ns)
                    continue
                if type(event) is events.ClientDisconnected:
                    refused += self._drop_queries(event.client)
                if not self._watches or not self._follows_watch(event):
                    now.append(event)
                continue
            cost = estimate(self._ledger, event, self.budget)
            client: bytes = event.client  # type: ignore[attr-defined]
            # Nothing overtakes a submission of its client, except a ping.
            is_behind = self.is_holding and client in self.queues and type(event) is not _PING
            if is_behind or (cost and not self._is_cheap(client, cost, room)):
                refused += self._wait(client, _Waiting(event, cost, _names_in(event)))
            else:
                room -= cost
                now.append(event)
        return now, refused

    def run(self, handle: Handle, now_ns: int) -> list[Effect]:
        """Handle waiting requests, client by client, up to the budget of a turn."""
        held_until_ns = now_ns if self.hold_ns else NEVER_NS - 1
        self._fresh.extend(client for _, client in self._later.pop_due(held_until_ns))
        effects: list[Effect] = []
        held: list[bytes] = []
        room = self.budget.turn
        while room > 0 and (self._fresh or self._served):
            client = self._next_client()
            queue = self.queues[client]
            waiting = queue[0]
            if self.hold_ns and waiting.due_ns > now_ns:
                self._later.add(waiting.due_ns, None, client)
                continue
            if not self._can_go(client, waiting):
                held.append(client)
                continue
            if waiting.cost > room and room < self.budget.turn:
                self._served.appendleft(client)  # first in the next turn
                break
            room -= waiting.cost
            if self._step(waiting, handle, effects):
                self._remove_effects(queue)
            if queue:
                self._served.append(client)
            else:
                del self.queues[client]
        self._served.extend(held)
        self.is_holding = self.hold_ns > 0 or (self.is_holding and bool(self.queues))
        return effects

    def _next_client(self) -> bytes:
        """Remove and return the next client: a served one, the newest and the oldest by turns.

        So many waiting clients do not delay a later one, nor later ones the waiting.
        """
        self._pick = (self._pick + 1) % 3
        if self._served and (not self._pick or not self._fresh):
            return self._served.popleft()
        return self._fresh.pop() if self._pick == 1 else self._fresh.popleft()

    # Waiting.

    def _hold(self, event: events.SubmitRequested, due_ns: int) -> list[Effect]:
        """Queue a submission. Count its memory in names."""
        asked, count = event.submission, len(event.submission.names)
        texts = (*asked.payloads, *(asked.envelopes or ()))
        size = sum(len(one) for one in texts if isinstance(one, bytes)) // _NAME_BYTES
        size += count + sum(map(len, asked.after or ()))
        return self._wait(event.client, _Waiting(event, 20 + _SUBMITTED * count, size, due_ns))

    def _is_cheap(self, client: bytes, cost: int, room: int) -> bool:
        fits = cost <= min(room, self.budget.cheap)
        return fits and client not in self.queues and self._is_reading(client)

    def _can_go(self, client: bytes, waiting: _Waiting) -> bool:
        if self._begun is not None and waiting is not self._begun and waiting.is_long:
            return False
        return self._is_reading(client)

    def _wait(self, client: bytes, waiting: _Waiting) -> list[Effect]:
        """Put a request at the end of its client's queue, or refuse it."""
        queue = self.queues.get(client)
        for former in queue or ():
            if waiting.is_long and _is_same(former.event, waiting.event):
                former.again.append(waiting.event.request)
                return []
        if self._is_too_much(queue, waiting):
            text = f"client: {len(queue or ())} of its requests are waiting (retry later)"
            return [Refused(client, waiting.event.request, Refusal.OVERLOADED, text)]
        if queue is None:
            queue = self.queues[client] = deque()
            self._fresh.append(client)
        queue.append(waiting)
        self._count += 1
        self._names += waiting.names
        if isinstance(waiting.event, events.WatchRequested):
            self._watches[waiting.event.request] = False
        return []

    def _is_too_much(self, queue: deque[_Waiting] | None, waiting: _Waiting) -> bool:
        count, names = self._count, self._names + waiting.names
        if queue is None:  # half of the room is for clients without other requests
            return count >= 2 * WAITING_ALL_MAX or names > 2 * WAITING_ALL_NAMES_MAX
        if count >= WAITING_ALL_MAX or names > WAITING_ALL_NAMES_MAX or len(queue) >= WAITING_MAX:
            return True
        own = waiting.names
        return own > 1 and own + sum(one.names for one in queue) > WAITING_NAMES_MAX

    def _remove_effects(self, queue: deque[_Waiting]) -> None:
        waiting = queue.popleft()
        self._count -= 1
        self._names -= waiting.names
        if waiting is self._begun:
            self._begun = None
        if isinstance(waiting.event, events.WatchRequested):
            self._watches.pop(waiting.event.request, None)

    def _follows_watch(self, event: Event) -> bool:
        """Queue the end of a waiting watch behind it. Returns whether one is waiting."""
        if isinstance(event, events.WatchEnded) and event.request in self._watches:
            self._watches[event.request] = True
            self._queue_after(event)
            return True
        if isinstance(event, events.ReplyDue) and self._watches.get(event.request, False):
            self._queue_after(event)
            return True
        return False

    def _queue_after(self, event: events.WatchEnded | events.ReplyDue) -> None:
        self.queues[event.client].append(_Waiting(event, 1))
        self._count += 1

    def _drop_queries(self, client: bytes) -> list[Effect]:
        """Refuse the queries of a client that is gone or does not read. The commands still run, and
        its submissions without their watches."""
        queue = self.queues.get(client)
        if queue is None:
            return []
        kept: deque[_Waiting] = deque()
        refused: list[Effect] = []
        while queue:
            event = queue[0].event
            if isinstance(event, Command | events.SubmitRequested):
                if isinstance(event, events.SubmitRequested):
                    event.watch = False
                kept.append(queue.popleft())
                continue
            self._remove_effects(queue)
            if type(event) in _COSTS:
                text = "client: it does not read its replies (retry later)"
                refused.append(Refused(client, event.request, Refusal.OVERLOADED, text))
        if kept:
            self.queues[client] = kept
        else:
            del self.queues[client]
            line = self._fresh if client in self._fresh else self._served
            line.remove(client)
        return refused

    # Handling.

    def _step(self, waiting: _Waiting, handle: Handle, effects: list[Effect]) -> bool:
        """Handle a request, or the next portion of it. Returns whether it is done."""
        event = waiting.event
        if isinstance(event, events.WatchRequested) and event.names:
            some = event.names[: self.budget.watched]
            event.names = event.names[self.budget.watched :]
            effects += handle(structs.replace(event, names=some))
            return not event.names
        if waiting.is_long:
            return self._step_of_command(waiting, handle, effects)
        effects += handle(event)
        return True

    def _step_of_command(self, waiting: _Waiting, handle: Handle, effects: list[Effect]) -> bool:
        event = waiting.event
        if waiting.portions is None:
            waiting.portions = self._portions(event)
            self._begun = waiting
        chosen = next(waiting.portions, None)
        waiting.cost = _PORTION
        answer: CommandAck | Refused | None = None
        if chosen is None:
            answer = CommandAck(event.client, event.request, waiting.changed)
        else:
            for effect in handle(structs.replace(event, chosen=chosen)):
                if isinstance(effect, CommandAck) and effect.request == event.request:
                    waiting.changed += effect.count
                elif isinstance(effect, Refused) and effect.request == event.request:
                    answer = effect
                else:
                    effects.append(effect)
        if answer is None:
            return False
        requests = (event.request, *waiting.again)
        effects += [structs.replace(answer, request=request) for request in requests]
        return True

    def _portions(self, event: Command) -> Iterator[list[Task]]:
        """Yield the tasks of a command in portions. Tasks submitted meanwhile are not included."""
        scope, changed = event.scope, self.budget.changed
        if isinstance(event, events.CancelRequested) and scope.names is not None:
            yield from self._with_dependents(commands.tasks_in_scope(self._ledger, scope))
            return
        whole = [*self._ledger.tasks.values()]
        if scope.names is not None:
            whole = commands.tasks_in_scope(self._ledger, scope)
        # Cancelling a task cancels its dependents, which were mostly submitted later. In the other
        # order one portion would cancel all the rest.
        line = reversed(whole) if isinstance(event, events.CancelRequested) else iter(whole)
        while some := list(islice(line, self.budget.looked)):
            found = commands.fitting(scope, some)
            for start in range(0, max(len(found), 1), changed):
                yield found[start : start + changed]

    def _with_dependents(self, tasks: list[Task]) -> Iterator[list[Task]]:
        """Yield tasks to cancel. If they have many dependents, these come first."""
        live = [task for task in tasks if task.ending is None]
        whole = graph.with_dependents(live)
        if len(whole) <= self.budget.cancelled:
            yield live
            return
        yield []  # finding them was the work of one turn
        line = reversed(whole)
        while some := list(islice(line, self.budget.changed)):
            yield some


def _is_same(one: Event, other: Event) -> bool:
    """Return whether a peer repeats a request that was not answered in time."""
    if type(one) is not type(other):
        return False
    return structs.replace(one, request=0, now_ns=0) == structs.replace(other, request=0, now_ns=0)


def _names_in(event: Any) -> int:  # noqa: ANN401 - any request
    """Count the tasks that a request names."""
    names = event.scope.names if hasattr(event, "scope") else getattr(event, "names", None)
    return len(names or ())


# Costs of requests, in about microseconds. 0 means: handle at once.

#: A task that is submitted.
_SUBMITTED: Final = 10

#: A task in a reply as a JSON document.
_VIEW: Final = 16

#: A name that is looked up, watched or changed.
_NAME: Final = 2

#: Tasks scanned in one microsecond.
_SCANNED: Final = 10

#: Tasks visited in one microsecond by a walk along the graph.
_WALKED: Final = 2

#: A row of the journal that is read and decoded.
_ROW: Final = 500
#: The latest attempt of a listed task: tasks share rows.
_MEASURED: Final = 100

#: Bytes read from a file and sent in one microsecond.
_BYTES_READ: Final = 500

#: A portion of a command.
_PORTION: Final = 20_000


def _list_cost(ledger: Ledger, event: events.ListRequested, _budget: Budget) -> int:
    scope, total = event.scope, len(ledger.tasks)
    if scope.names is not None:
        measured = _MEASURED * LIST_MEASURED_MAX if event.measured else 0
        return 50 + (_VIEW + _NAME) * len(scope.names) + measured
    scanned = 0 if scope == _EVERYTHING and not event.match else min(total, LIST_SCAN_MAX)
    limit, each = (LIST_MEASURED_MAX, _MEASURED) if event.measured else (LIST_TASKS_MAX, _VIEW)
    return 50 + each * min(event.count, limit, total) + scanned // _SCANNED


def _lookup_cost(ledger: Ledger, event: events.LookupRequested, _budget: Budget) -> int:
    if not event.shows_after:
        return 0
    tasks = [ledger.tasks.get(name) for name in event.names]
    blocked = any(task is not None and task.state is BLOCKED for task in tasks)
    return _ROW + _VIEW * len(tasks) + (len(ledger.tasks) // 4 if blocked else 0)


def _explain_cost(ledger: Ledger, event: events.ExplainRequested, _budget: Budget) -> int:
    task = ledger.tasks.get(event.name)
    if task is None or task.state not in (BLOCKED, FAILED):
        return _VIEW
    behind = (ledger.counts[BLOCKED] + len(ledger.reasons)) // _WALKED
    if task.state is FAILED:
        return _VIEW + (behind if task.dependents is not None else 0)
    return _VIEW + len(ledger.tasks) // _SCANNED + (behind if ledger.counts[FAILED] else 0)


def _stats_cost(ledger: Ledger, event: events.StatsRequested, _budget: Budget) -> int:
    rows = min(len(ledger.campaigns), STATS_ROWS_MAX) + min(len(ledger.services), STATS_ROWS_MAX)
    return 0 if event.is_brief else 50 + rows // 2


def _lanes_cost(ledger: Ledger, event: events.LanesRequested, _budget: Budget) -> int:
    lanes = sum(len(service.lanes) for service in ledger.services.values())
    looked = lanes + len(ledger.reasons) + ledger.counts[DELAYED]
    return 50 + 40 * min(event.count, LIST_LANES_MAX, lanes) + looked // _SCANNED


def _workers_cost(ledger: Ledger, _event: events.WorkersRequested, _budget: Budget) -> int:
    return 50 + 10 * len(ledger.workers)


def _results_cost(_ledger: Ledger, event: events.ResultsRequested, _budget: Budget) -> int:
    return 50 + _NAME * len(event.names)


def _watch_cost(ledger: Ledger, event: events.WatchRequested, budget: Budget) -> int:
    names = min(len(event.names or ()), budget.watched)
    behind = ledger.counts[BLOCKED] + len(ledger.reasons) if ledger.counts[FAILED] else 0
    return 20 + _NAME * names + behind // _SCANNED


def _part_cost(ledger: Ledger, event: events.PartRequested, _budget: Budget) -> int:
    if event.blob:
        return 50 + event.count // _BYTES_READ
    return _ROW if event.name in ledger.outputs else _VIEW


def _command_cost(ledger: Ledger, event: Command, budget: Budget) -> int:
    names = event.scope.names
    count = len(ledger.tasks) if names is None else len(names)
    if count > budget.changed:
        return _PORTION
    if isinstance(event, events.CancelRequested) and ledger.counts[BLOCKED] > budget.cancelled:
        found = (ledger.tasks.get(name) for name in names or ())
        if any(task is not None and task.dependents is not None for task in found):
            return max(_PORTION, ledger.counts[BLOCKED] // _WALKED)
    return 20 + _NAME * count


_EVERYTHING: Final = events.Scope()

_COSTS: Final[dict[type[Any], Callable[[Ledger, Any, Budget], int]]] = {
    events.ListRequested: _list_cost,
    events.LookupRequested: _lookup_cost,
    events.ExplainRequested: _explain_cost,
    events.StatsRequested: _stats_cost,
    events.LanesRequested: _lanes_cost,
    events.WorkersRequested: _workers_cost,
    events.ResultsRequested: _results_cost,
    events.WatchRequested: _watch_cost,
    events.PartRequested: _part_cost,
    events.CancelRequested: _command_cost,
    events.RetryRequested: _command_cost,
    events.MoveRequested: _command_cost,
    events.EditRequested: _command_cost,
    events.ExpireRequested: _command_cost,
}

#: Events that `admit` looks at while no request waits.
ESTIMATED: Final = frozenset(_COSTS)
