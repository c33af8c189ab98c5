"""Requests about lanes: Lanes, Move, Expire."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard.core.events import Scope
from taskyard.core.model import Submission, Terms
from taskyard.core.states import TaskState
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from tests.wire.kit import WALL_NS, Counter

Q = pb.QueryMsg
S = Terms(service=b"s", submitted_ns=WALL_NS)
LATER_NS = WALL_NS + 3600 * 1_000_000_000


class Yard(Counter):
    """A broker with tasks in lanes of two services."""

    def __init__(self) -> None:
        super().__init__()
        terms = [S, Terms(service=b"s", due_ns=LATER_NS), Terms(service=b"t")]
        names, lanes = [b"a", b"b", b"c"], [b"x", b"y", b"x"]
        submission = Submission(names, [b""], terms, terms_at=[0, 1, 2], lanes=lanes)
        assert self.reply(peer.create(1, submission)).kind == peer.OK

    def reply(self, body: bytes) -> peer.Reply:
        return peer.Reply(self.ask(body))

    def lanes(self, *what: Any, **more: Any) -> tuple[list[str], peer.LaneCursor | None]:
        reply = self.reply(peer.lanes(2, *what, **more))
        assert reply.kind == peer.LANES
        return [f"{one['service']}/{one['lane']}" for one in reply.document()], reply.place

    def task(self, name: bytes) -> Any:
        return self.scheduler.ledger.tasks[name]


def test_lanes_are_listed_page_by_page() -> None:
    yard = Yard()
    assert yard.lanes() == (["s/x", "s/y", "t/x"], None)
    some, place = yard.lanes(count=2)
    assert (some, place) == (["s/x", "s/y"], (b"s", b"y"))
    assert yard.lanes(after=place, count=2) == (["t/x"], None)


def test_lanes_are_listed_by_service_and_pattern() -> None:
    yard = Yard()
    assert yard.lanes(b"s") == (["s/x", "s/y"], None)
    assert yard.lanes(None, b"?") == (["s/x", "s/y", "t/x"], None)
    assert yard.lanes(b"t", b"y*") == ([], None)


def test_lane_is_listed_with_its_counts_and_reason() -> None:
    (found,) = Yard().reply(peer.lanes(2, b"s", b"y")).document()
    assert {key: found[key] for key in ("rule", "rule_limit", "tasks", "delayed")} == {
        "rule": "",
        "rule_limit": 0,
        "tasks": 1,
        "delayed": 1,
    }
    assert (found["next_due"], found["reason"]) == (LATER_NS / 1e9, "delayed")
    assert found["why"]


def test_move_changes_only_the_given_service_or_lane() -> None:
    yard = Yard()
    names = Scope(names=(b"a",))
    assert yard.reply(peer.move(3, names, None, b"z")).count == 1
    assert (yard.task(b"a").lane.name, yard.task(b"a").lane.service.name) == (b"z", b"s")
    assert yard.reply(peer.move(4, Scope(service=b"s"), b"t", None)).count == 2
    assert yard.lanes() == (["t/x", "t/y", "t/z"], None)
    assert yard.reply(peer.move(5, names, None, b"")).count == 1
    assert yard.task(b"a").lane.name == b""


def test_tasks_are_expired_at_once() -> None:
    yard = Yard()
    assert yard.reply(peer.command(3, peer.EXPIRE, Scope(lane=b"x"))).count == 2
    assert yard.task(b"a").state is TaskState.FAILED


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (Q.Move, {"batch": pb.Batch(name=[b"a"])}, "a Move needs a target"),
        (Q.Move, {"place": pb.PlaceMsg(lane=b"x")}, "tasks are missing"),
        (
            Q.Move,
            {"batch": pb.Batch(name=[b"a"]), "place": pb.PlaceMsg(service=b"")},
            "a service must have 1 to",
        ),
        (
            Q.Move,
            {"batch": pb.Batch(name=[b"a"]), "place": pb.PlaceMsg(lane=b"\xff")},
            "a lane must be UTF-8",
        ),
        (Q.Expire, {}, "tasks are missing"),
        (Q.Lanes, {"n": 0}, "n must be 1 or more"),
    ],
)
def test_incomplete_request_is_refused(kind: Any, fields: dict[str, Any], reason: str) -> None:
    yard = Yard()
    before = yard.scheduler.ledger.record
    reply = yard.reply(Q(type=kind, request=9, **fields).SerializeToString())
    assert (reply.kind, reply.reason.startswith(reason)) == (peer.ERROR, True)
    assert yard.scheduler.ledger.record == before
