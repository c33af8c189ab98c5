"""Planted bugs of the dialects: what an adapter may make of good bytes, and must be caught.

Beside `bugs`, whose rules hold here too: the checkers alone find them.
"""
# ruff: noqa: ANN401, SLF001 - a broken function takes whatever the sound one takes, and is inside

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from simulator.mutations.registry import mutation, patched, patched_item
from taskyard.core import effects, events, submission
from taskyard.core.events import Outcome
from taskyard.core.model import Submission
from taskyard.wire.native import frames as native_frames
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.pending import PendingRequests
from taskyard.wire.native.server import NativeServer
from taskyard.wire.ping_pong.backend import WAITING, WORKING, Backend
from taskyard.wire.ping_pong.server import Frontend
from taskyard.wire.round_robin.server import RoundRobin
from taskyard.wire.round_robin.workers import WorkerTable
from taskyard.wire.wmp import frames as wmp_frames
from taskyard.wire.wmp import server as wmp
from taskyard.wire.wmp.server import Wmp

if TYPE_CHECKING:
    from collections.abc import Iterator


def _no_op(*_arguments: Any, **_named: Any) -> list[Any]:
    """Say nothing."""
    return []


# Our native dialect.


@mutation
def request_answered_twice() -> Iterator[None]:
    """A request gets its answer two times."""
    sound = PendingRequests.answer

    def answer(self: PendingRequests, *arguments: Any, **fields: Any) -> Any:
        return 2 * sound(self, *arguments, **fields)

    with patched(PendingRequests, "answer", answer):
        yield


@mutation
def terms_lost_on_the_wire() -> Iterator[None]:
    """A submission's priorities are not read."""
    sound = native_frames.terms_of

    def terms_of(raw: bytes) -> Any:
        return structs.replace(sound(raw), priority=0)

    with patched(native_frames, "terms_of", terms_of):
        yield


@mutation
def outcome_lost_on_the_wire() -> Iterator[None]:
    """Whatever a worker reports, it is done."""
    sound = native_frames.report_of

    def report_of(query: Any) -> Any:
        return structs.replace(sound(query), outcomes=None)

    with patched(native_frames, "report_of", report_of):
        yield


@mutation
def exit_ignored() -> Iterator[None]:
    """A plain worker says Exit, is told OK, and its tasks stay its own."""

    def leave(pending: Any, asked: Any) -> Any:
        return [events.StatsRequested(0, asked.route, pending.issue(asked))]

    with patched_item(native_requests._DECODERS, native_requests._Q.Exit, leave):
        yield


@mutation
def stream_ends_with_first_heartbeat() -> Iterator[None]:
    """Who watches is told that the broker is there, and nothing any more."""
    sound = NativeServer._watch_ended

    def watch_ended(self: NativeServer, number: int, ticket: Any, now_ns: int) -> Any:
        told = sound(self, number, ticket, now_ns)
        self._pending.drop(number)
        return told

    with patched(NativeServer, "_watch_ended", watch_ended):
        yield


@mutation
def bad_task_refuses_whole_create() -> Iterator[None]:
    """A plain peer's Create with one bad task in it is refused whole."""
    with patched(submission, "decide_partial", submission.decide):
        yield


@mutation
def duplicate_loses_its_dependencies() -> Iterator[None]:
    """Of tasks of one name in a message only the first counts."""

    def merged(whole: Submission) -> Submission:
        first = {name: index for index, name in reversed([*enumerate(whole.names)])}
        return whole.part(sorted(first.values()))

    with patched(submission, "_merged", merged):
        yield


# Ping-pong.


@mutation
def ping_makes_a_busy_worker_ready() -> Iterator[None]:
    """A worker that pings while it works is taken for one that waits."""
    sound = Backend._pinged

    def pinged(self: Backend, peer: Any, *, is_counted: bool) -> Any:
        told = sound(self, peer, is_counted=is_counted)
        return [*told, *self._register_worker(peer)] if peer.standing is WORKING else told

    with patched(Backend, "_pinged", pinged):
        yield


@mutation
def stale_result_credited_to_new_job() -> Iterator[None]:
    """A worker whose job was cancelled gets another one before it has answered the first."""

    def let_finish(_self: Backend, peer: Any) -> None:
        peer.standing = WAITING

    with patched(Backend, "_let_finish", let_finish):
        yield


@mutation
def answers_out_of_order() -> Iterator[None]:
    """A client of ping-pong is answered when a job is done, whichever it asked for first."""

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
    """The silence of a worker of ping-pong is minded by nobody."""
    sound = Backend._register_worker

    def enlist(self: Backend, peer: Any) -> Any:
        appeared: Any = sound(self, peer)[0]
        appeared.facts = structs.replace(appeared.facts, lease_timeout_ns=0)
        return [appeared]

    def end_wait(self: Backend, peer: Any) -> Any:
        peer.heard_ns = self._now_ns
        return []

    with patched(Backend, "_register_worker", enlist), patched(Backend, "_end_wait", end_wait):
        yield


# WMP.


@mutation
def wake_all() -> Iterator[None]:
    """Whoever is called, everybody is woken."""

    def wake(self: Wmp, effect: effects.Wake) -> Any:
        told = wmp_frames.Wake(wmp_frames.text_of(effect.service), self._manager)
        return [reply for worker in self._peers for reply in self._to(worker, told)]

    with patched_item(Wmp._REPLIES, effects.Wake, wake):
        yield


@mutation
def lock_never_released() -> Iterator[None]:
    """A GIVE for which there is nothing is not answered."""
    with patched_item(Wmp._REPLIES, effects.NoWork, _no_op):
        yield


@mutation
def ready_forgotten() -> Iterator[None]:
    """A worker that says READY is known, and not called."""
    sound = Wmp._ready

    def ready(self: Wmp, *arguments: Any) -> Any:
        return sound(self, *arguments)[:1]

    with patched_item(Wmp._HANDLERS, wmp_frames.Ready, ready):
        yield


@mutation
def error_reported_as_ok() -> Iterator[None]:
    """A task that failed is done, by what WMP's worker says."""
    with patched_item(wmp._OUTCOMES, "error", Outcome.DONE):
        yield


@mutation
def cancel_names_another_attempt() -> Iterator[None]:
    """A worker of WMP is told to forget an attempt that it does not have."""
    sound = Wmp._stop

    def stop(self: Wmp, effect: effects.Stop) -> Any:
        attempts = [attempt + 1 for attempt in effect.attempts]
        return sound(self, structs.replace(effect, attempts=attempts))

    with patched_item(Wmp._REPLIES, effects.Stop, stop):
        yield


# Round-robin.


@mutation
def increment_frees_two_slots() -> Iterator[None]:
    """A worker that frees a slot is taken for one that has freed two."""
    sound = WorkerTable.increment

    def increment(self: WorkerTable, peer: Any) -> Any:
        return [*sound(self, peer), *sound(self, peer)]

    with patched(WorkerTable, "increment", increment):
        yield


@mutation
def response_frees_the_slot() -> Iterator[None]:
    """The slot of an answered message is free at once, before INCREMENT."""
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
    """A message of a client of round-robin becomes two tasks."""
    sound = RoundRobin._submit

    def submit(self: RoundRobin, *arguments: Any) -> Any:
        return [*sound(self, *arguments), *sound(self, *arguments)]

    with patched(RoundRobin, "_submit", submit):
        yield


@mutation
def response_with_wrong_id() -> Iterator[None]:
    """The answer to one message of a client goes out under the id of another."""
    sound = RoundRobin._settle

    def settle(self: RoundRobin, effect: effects.Settled) -> Any:
        first = next(iter(self._pending), effect.request)
        return sound(self, structs.replace(effect, request=first))

    with patched(RoundRobin, "_settle", settle):
        yield
