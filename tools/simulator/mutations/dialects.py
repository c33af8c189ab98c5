"""Planted bugs of the dialects: adapters that decode or encode wrongly.

The checkers must catch each of them, as in `core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from simulator.mutations.registry import mutation, patched, patched_item
from taskyard.broker.transport import Connections
from taskyard.core import effects, events, submission
from taskyard.core.entities import Worker
from taskyard.core.events import Outcome
from taskyard.core.model import Submission
from taskyard.wire.native import frames as native_frames
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.pending import PendingRequests
from taskyard.wire.native.server import NativeServer
from taskyard.wire.ping_pong.server import WAITING, WORKING, Backend, Frontend
from taskyard.wire.round_robin.server import RoundRobin
from taskyard.wire.round_robin.workers import WorkerTable
from taskyard.wire.wmp import frames as wmp_frames
from taskyard.wire.wmp import server as wmp
from taskyard.wire.wmp.server import Wmp

if TYPE_CHECKING:
    from collections.abc import Iterator

# ruff: noqa: ANN401, SLF001 - a broken function takes whatever the sound one takes, and is inside


def _no_op(*_arguments: Any, **_named: Any) -> list[Any]:
    """Do nothing."""
    return []


# The native dialect.


@mutation
def request_answered_twice() -> Iterator[None]:
    """Send every reply twice."""
    sound = PendingRequests.answer

    def answer(self: PendingRequests, *arguments: Any, **fields: Any) -> Any:
        return 2 * sound(self, *arguments, **fields)

    with patched(PendingRequests, "answer", answer):
        yield


@mutation
def terms_lost_on_the_wire() -> Iterator[None]:
    """Ignore the priorities in a submission."""
    sound = native_frames.terms_of

    def terms_of(raw: bytes) -> Any:
        return structs.replace(sound(raw), priority=0)

    with patched(native_frames, "terms_of", terms_of):
        yield


@mutation
def outcome_lost_on_the_wire() -> Iterator[None]:
    """Take every report for DONE."""
    sound = native_frames.report_of

    def report_of(query: Any) -> Any:
        return structs.replace(sound(query), outcomes=None)

    with patched(native_frames, "report_of", report_of):
        yield


@mutation
def exit_ignored() -> Iterator[None]:
    """Keep the tasks of a plain worker after its Exit."""

    def leave(pending: Any, asked: Any) -> Any:
        return [events.StatsRequested(0, asked.route, pending.add(asked))]

    with patched_item(native_requests._DECODERS, native_requests._Q.Exit, leave):
        yield


@mutation
def stream_ends_with_first_heartbeat() -> Iterator[None]:
    """End the stream of a Watch with its first heartbeat."""
    sound = NativeServer._watch_ended

    def watch_ended(self: NativeServer, number: int, ticket: Any, now_ns: int) -> Any:
        told = sound(self, number, ticket, now_ns)
        self.pending.drop(number)
        return told

    with patched(NativeServer, "_watch_ended", watch_ended):
        yield


@mutation
def bad_task_refuses_whole_create() -> Iterator[None]:
    """Refuse a plain Create whole because of one bad task."""
    with patched(submission, "decide_partial", submission.decide):
        yield


@mutation
def duplicate_loses_its_dependencies() -> Iterator[None]:
    """Drop the predecessors of all but the first of several tasks of one name."""

    def merged(whole: Submission) -> Submission:
        first = {name: index for index, name in reversed([*enumerate(whole.names)])}
        return whole.part(sorted(first.values()))

    with patched(submission, "_merged", merged):
        yield


# Ping-pong.


@mutation
def ping_makes_a_busy_worker_ready() -> Iterator[None]:
    """Take a busy worker for a ready one when it pings."""
    sound = Backend._pinged

    def pinged(self: Backend, peer: Any, *, is_counted: bool) -> Any:
        told = sound(self, peer, is_counted=is_counted)
        return [*told, *self._register_worker(peer)] if peer.standing is WORKING else told

    with patched(Backend, "_pinged", pinged):
        yield


@mutation
def stale_result_credited_to_new_job() -> Iterator[None]:
    """Assign a worker the next job before it has answered a cancelled job."""

    def let_finish(_self: Backend, peer: Any) -> None:
        peer.standing = WAITING

    with patched(Backend, "_let_finish", let_finish):
        yield


@mutation
def answers_out_of_order() -> Iterator[None]:
    """Answer a ping-pong client in the order of completion."""

    def answer(self: Frontend, number: int, frames: list[bytes]) -> Any:
        asked = self._requests.pop(number, None)
        if asked is None:
            return []
        self._clients[asked.route].remove(asked)
        return [(asked.route, frames)]

    with patched(Frontend, "_answer", answer):
        yield


@mutation
def lost_worker_keeps_its_job() -> Iterator[None]:
    """Never time out a ping-pong worker."""
    sound = Backend._register_worker

    def enlist(self: Backend, peer: Any) -> Any:
        appeared: Any = sound(self, peer)[0]
        appeared.facts = structs.replace(appeared.facts, lease_timeout_ns=0)
        return [appeared]

    def end_wait(self: Backend, peer: Any) -> Any:
        peer.last_seen_ns = self.now_ns
        return []

    with patched(Backend, "_register_worker", enlist), patched(Backend, "on_due", end_wait):
        yield


# WMP.


@mutation
def wake_all() -> Iterator[None]:
    """Wake all workers instead of a single worker."""

    def wake(self: Wmp, effect: effects.Wake) -> Any:
        told = wmp_frames.Wake(wmp_frames.text_of(effect.service), self._manager)
        return [reply for worker in self.peers for reply in self._to(worker, told)]

    with patched_item(Wmp._REPLIES, effects.Wake, wake):
        yield


@mutation
def lock_never_released() -> Iterator[None]:
    """Leave a GIVE without tasks unanswered."""
    with patched_item(Wmp._REPLIES, effects.NoWork, _no_op):
        yield


@mutation
def ready_forgotten() -> Iterator[None]:
    """Forget that a worker is ready."""
    sound = Wmp._ready

    def ready(self: Wmp, *arguments: Any) -> Any:
        return sound(self, *arguments)[:1]

    with patched_item(Wmp._HANDLERS, wmp_frames.Ready, ready):
        yield


@mutation
def request_for_one_task_stands() -> Iterator[None]:
    """Keep the READY of a worker without slots after a TAKE."""
    with patched(Worker, "requests_each_task", property(lambda _worker: False)):
        yield


@mutation
def error_reported_as_ok() -> Iterator[None]:
    """Take a failure in a WMP report for DONE."""
    with patched_item(wmp._OUTCOMES, "error", Outcome.DONE):
        yield


@mutation
def cancel_names_another_attempt() -> Iterator[None]:
    """Send a worker a Cancel with another attempt."""
    sound = Wmp._stop

    def stop(self: Wmp, effect: effects.Stop) -> Any:
        attempts = [attempt + 1 for attempt in effect.attempts]
        return sound(self, structs.replace(effect, attempts=attempts))

    with patched_item(Wmp._REPLIES, effects.Stop, stop):
        yield


# Round-robin.


@mutation
def increment_frees_two_slots() -> Iterator[None]:
    """Free two slots for one INCREMENT."""
    sound = WorkerTable.increment

    def increment(self: WorkerTable, peer: Any) -> Any:
        return [*sound(self, peer), *sound(self, peer)]

    with patched(WorkerTable, "increment", increment):
        yield


@mutation
def response_frees_the_slot() -> Iterator[None]:
    """Free the slot of an answered message before its INCREMENT."""
    sound = WorkerTable.respond

    def respond(self: WorkerTable, *arguments: Any) -> Any:
        told = sound(self, *arguments)
        for report in told:
            if isinstance(report, events.TasksReported):
                report.keeps_slots = False
        return told

    with patched(WorkerTable, "respond", respond):
        yield


@mutation
def message_made_twice() -> Iterator[None]:
    """Make two tasks of one message."""
    sound = RoundRobin._submit

    def submit(self: RoundRobin, *arguments: Any) -> Any:
        return [*sound(self, *arguments), *sound(self, *arguments)]

    with patched(RoundRobin, "_submit", submit):
        yield


@mutation
def response_with_wrong_id() -> Iterator[None]:
    """Send an answer under the id of another message."""
    sound = RoundRobin._settle

    def settle(self: RoundRobin, effect: effects.Settled) -> Any:
        first = next(iter(self._pending), effect.request)
        return sound(self, structs.replace(effect, request=first))

    with patched(RoundRobin, "_settle", settle):
        yield


@mutation
def new_connection_not_noticed() -> Iterator[None]:
    """Let heartbeats on a new connection extend the lease of a message lost before it."""
    with patched(Connections, "is_renewed", lambda *_arguments: False):
        yield
