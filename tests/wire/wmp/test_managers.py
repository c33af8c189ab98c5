"""WMP at the worker: several managers, exit, malformed messages, and its id."""

from __future__ import annotations

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.wire.wmp import peer
from taskyard.wire.wmp import peer as wmp_managers
from taskyard.wire.wmp.peer import Stop
from tests.wire.wmp.kit import Sent, frames
from tests.wire.wmp.test_peer import Bench, commands, give, reported

# Several managers.


def test_managers_that_share_names_are_kept_apart() -> None:
    bench = Bench(wires=2, slots=3)
    bench.quiet()
    bench.wake(0, manager="m0")
    bench.wake(1, manager="m1")
    bench.give("a", "1", 0, manager="m0")
    refused = bench.give("a", "2", 1, manager="m1")
    assert refused[0] == (1, reported("a", "refused", manager="m1"))
    bench.receive("CANCEL", 1, task="a", attempt=1, manager="m1")
    assert bench.stopped == []
    held = {
        wire: said.headers["held"]
        for wire, said in bench.later(SECOND_NS)
        if said.command == "PING"
    }
    assert held == {0: [["a", 1]], 1: []}


def test_one_connection_leads_to_many_managers_each_by_its_route() -> None:
    bench = Bench(slots=2)
    bench.quiet()
    assert bench.wake(back=[0, 1], manager="m1") == [(0, give("1", back=[0, 1]))]
    assert bench.wake(back=[2], manager="m2") == [(0, give("2", back=[2]))]
    bench.give("a", "1", back=[0, 1], manager="m1")
    bench.give("b", "2", back=[2], manager="m2")
    assert bench.done(b"b")[0] == (0, reported("b", manager="m2", back=[2]))
    pings = [said.headers for _, said in bench.later(SECOND_NS) if said.command == "PING"]
    assert [(one["manager"], one["held"], one["back"]) for one in pings] == [
        ("m1", [["a", 1]], [0, 1]),
        ("m2", [["b", 1]], [2]),
    ]


def test_manager_with_two_routes_gets_all_by_the_last() -> None:
    bench = Bench(wires=2, slots=2)
    bench.quiet()
    bench.wake(0, manager="m")
    bench.wake(1, manager="m")
    bench.give("a", "1", 0)
    bench.give("b", "2", 1)
    bench.receive("PONG", 0, worker="w", manager="m")
    pings = [(wire, said) for wire, said in bench.later(SECOND_NS) if said.command == "PING"]
    assert [(wire, said.headers["held"]) for wire, said in pings] == [(0, [["a", 1], ["b", 1]])]


def test_manager_that_sends_its_name_late_or_a_new_one_is_the_same() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    bench.receive("PONG", worker="w", manager="m")
    assert bench.receive("CANCEL", task="a", attempt=1, manager="renamed") != []
    assert bench.stopped == [Stop(b"a", 1, ended=True)]


def test_two_routes_to_one_manager_are_merged() -> None:
    bench = Bench(wires=2, slots=2)
    bench.quiet()
    bench.wake(0, manager="m")
    bench.wake(1)
    bench.give("b", "2", 1)
    bench.receive("PING", 1, worker="w", manager="m")
    (pong,) = [said for _, said in bench.receive("PING", 0, worker="w", manager="m")][:1]
    assert pong.headers["held"] == [["b", 1]]
    assert bench.done(b"b")[0][1].command == "DONE"


def test_owner_of_a_task_is_not_its_sender() -> None:
    bench = Bench(slots=2)
    bench.quiet()
    bench.wake(manager="front")
    bench.give("a", manager="another manager")
    (pong,) = bench.receive("PING", worker="w", manager="front")
    assert pong[1].headers["held"] == [["a", 1]]
    assert bench.done(b"a")[0][1].headers["manager"] == "another manager"


def test_unnamed_route_without_tasks_sends_no_list() -> None:
    bench = Bench(wires=2, slots=2)
    bench.quiet()
    bench.wake(0)
    bench.give("a")
    (pong,) = bench.receive("PING", 1, worker="w")
    assert "held" not in pong[1].headers


def test_silent_managers_are_forgotten_unless_a_task_is_theirs() -> None:
    bench = Bench(wires=2)
    bench.quiet()
    bench.receive("PONG", 1, worker="w")
    bench.wake(0)
    bench.give("a")
    bench.later(peer.FORGOTTEN_NS)
    bench.now_ns += peer.PING_NS_MAX
    assert [wire for wire, _ in bench.later(1)] == [0]


def test_managers_and_routes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wmp_managers, "MANAGERS_MAX", 5)
    monkeypatch.setattr(wmp_managers, "ROUTES_MAX", 3)
    bench = Bench()
    bench.quiet()
    for number in range(20):
        bench.receive("PONG", worker="w", manager=f"m{number}", back=[number])
    assert commands(bench.later(SECOND_NS)).count("PING") == 5
    for number in range(20):
        bench.receive("PONG", worker="w", manager="m", back=[100 + number])
    manager = [*bench.worker._managers][-1]  # noqa: SLF001
    assert len(manager.routes) == 3


# Exit.


def test_worker_exits_when_its_tasks_are_reported() -> None:
    bench = Bench(wires=2)
    bench.quiet()
    bench.wake(0)
    bench.give("a")
    assert bench.leave() == []
    assert bench.wake(1) == []
    assert commands(bench.done(b"a")) == ["DONE"]
    assert commands(bench.later(1)) == ["PING"]
    assert not bench.worker.gone
    bench.receive("CANCEL", task="a", attempt=1)
    bye = Sent("BYE", {"worker": "w", "reason": "exits"})
    assert bench.later(1) == [(0, bye), (1, bye)]
    assert bench.worker.gone


def test_worker_does_not_wait_for_ever_to_exit() -> None:
    bench = Bench()
    bench.quiet()
    bench.wake()
    bench.give("a")
    bench.leave()
    bench.done(b"a")
    bench.later(1)
    assert commands(bench.later(peer.BYE_NS_MAX)) == ["PING", "BYE"]


def test_take_during_exit_is_refused() -> None:
    bench = Bench(slots=2)
    bench.quiet()
    bench.wake()
    bench.wake()
    bench.give("a", "1")
    bench.leave()
    assert bench.give("b", "2") == [(0, reported("b", "refused"))]
    assert "READY" not in commands(bench.later(60 * SECOND_NS))


def test_worker_with_byes_of_all_managers_is_dismissed() -> None:
    bench = Bench(wires=2)
    bench.quiet()
    bye = Sent("BYE", {"worker": "w"})
    assert bench.receive("BYE", 0, worker="w", manager="m0") == [(0, bye)]
    assert not bench.worker.is_dismissed
    assert bench.receive("BYE", 1, worker="w", manager="m1", back=[0]) == [(1, bye)]
    assert bench.worker.is_dismissed


def test_bye_of_one_of_two_managers_behind_a_relay_gets_no_bye() -> None:
    bench = Bench()
    bench.quiet()
    bench.receive("PONG", worker="w", manager="m0", back=[0])
    bench.receive("PONG", worker="w", manager="m1", back=[1])
    assert bench.receive("BYE", worker="w", manager="m0", back=[0]) == []
    assert not bench.worker.is_dismissed


def test_manager_that_sent_bye_gets_no_ready_for_a_while_and_may_come_back() -> None:
    bench = Bench(wires=2)
    bench.quiet()
    bench.receive("PONG", 1, worker="w", manager="m1")
    bench.receive("BYE", 0, worker="w", manager="m0")
    ready = [wire for wire, said in bench.later(SECOND_NS) if said.command == "READY"]
    assert ready == [1]
    bench.later(peer.READY_NS_MAX)
    ready = [wire for wire, said in bench.later(peer.READY_NS_MAX) if said.command == "READY"]
    assert ready == [0, 1]
    assert bench.wake(0, manager="m0") == [(0, give())]


# Malformed messages.


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b""],
        frames("READY", {"worker": "w"}),
        frames("DONE", {"worker": "w", "task": "a", "attempt": 1, "status": "ok"}),
        [b"hop", *frames("WAKE", {"service": "default"})],
        frames("WAKE", {}),
        frames("TAKE", {"request": 1, "task": "a", "attempt": 1, "service": "x"}),
        frames("TAKE", {"request": [], "task": "a", "attempt": 1, "service": "x", "lease_ms": 1}),
        frames("WAKE", {"service": "default", "back": [0] * 9}),
        frames("WAKE", {"service": "default", "back": [-1]}),
        frames("CANCEL", {"task": "\0€", "attempt": 1}),
    ],
)
def test_malformed_message_is_counted_and_changes_nothing(message: list[bytes]) -> None:
    bench = Bench()
    bench.quiet()
    assert bench.worker.take(0, message, bench.now_ns) == []
    assert bench.worker.malformed == 1


# Its id.


def test_worker_whose_id_is_held_stops_its_tasks_and_retries_every_second() -> None:
    bench = Bench(slots=2, incarnation=7)
    bench.quiet()
    bench.wake(manager="m")
    bench.give("a", manager="m")
    bench.receive("BYE", worker="w", manager="m", reason="held", code="name-held")
    assert bench.stopped == [Stop(b"a", 1)]
    assert (bench.worker.name_held, bench.worker.is_dismissed) == ("held", False)
    for _ in range(5):
        assert "READY" in commands(bench.later(SECOND_NS))
        bench.receive("BYE", worker="w", manager="m", reason="held", code="name-held")
    bench.receive("PONG", worker="w", manager="m")
    assert bench.worker.name_held == ""


def test_worker_whose_id_is_lost_has_a_reason() -> None:
    bench = Bench(incarnation=7)
    bench.quiet()
    bench.receive("BYE", worker="w", manager="m", reason="lost", code="name-lost")
    assert bench.worker.name_lost == "lost"


def test_all_messages_of_a_worker_have_its_incarnation() -> None:
    bench = Bench(incarnation=7)
    said = bench.start()
    said += bench.wake(manager="m")
    said += bench.give("a", manager="m")
    said += bench.receive("PING", worker="w", manager="m")
    said += bench.done(b"a")
    said += bench.receive("CANCEL", task="a", attempt=1, manager="m")
    said += bench.leave()
    kinds = {"READY", "PING", "GIVE", "PONG", "DONE", "BYE"}
    assert {one.command for _, one in said} == kinds
    assert {one.headers["incarnation"] for _, one in said} == {7}
