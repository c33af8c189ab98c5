"""Roles × requests: every cell of the table, sent to a real dialect and scheduler.

The table is repeated here by hand, so that a change of it is noticed.
`python -m tests.wire.test_roles` prints the table from the results of the requests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from taskyard.core.model import Stream, Submission, Terms, WorkerFacts
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import attempt_columns, number_messages, peer
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.attempt_columns import StreamChunk
from taskyard.wire.roles import (
    DWORK,
    PERMISSIONS,
    READ_FOR_TASK,
    UNKNOWN_PEER,
    AuthenticatedPeer,
    Role,
    may_act_as,
    refusal,
)
from tests.kit.cases import each_case
from tests.wire.kit import Counter

Q = pb.QueryMsg

#: The key of each role. A worker's is bound to its name.
GUESTS: Final = {role: AuthenticatedPeer(f"a-{role}", (role,)) for role in Role}
WORKER: Final = b"a-worker/1"

#: The roles that may send each request: viewer, producer, worker, admin.
TABLE: Final = {
    "OK": "vpwa",
    "Lookup": "vpwa",
    "Relay": "vpwa",
    "Stats": "vp-a",
    "List": "vp-a",
    "Show": "vp-a",
    "Explain": "vp-a",
    "Workers": "vp-a",
    "Lanes": "vp-a",
    "Watch": "vp-a",
    "Follow": "vp-a",
    "Read": "vp-a",
    "Read for a task": "--wa",
    "Values": "vpwa",
    "PutValue": "-pwa",
    "Rules": "-pwa",
    "Numbers": "vp-a",
    "Create": "-p-a",
    "Number": "-p-a",
    "Cancel": "-p-a",
    "Retry": "-p-a",
    "Move": "-p-a",
    "Expire": "-p-a",
    "Edit": "-p-a",
    "Steal": "--wa",
    "Complete": "--wa",
    "Transfer": "--wa",
    "Progress": "--wa",
    "Append": "--wa",
    "Heartbeat": "--wa",
    "Exit": "--wa",
    "Drain": "---a",
    "Failover": "---a",
    "Pause": "---a",
    "Resume": "---a",
}

#: The roles of the table in the docs. A relay's permits nothing without another.
COLUMNS: Final = [role for role in Role if role is not Role.RELAY]

CELLS: Final = [(request, role) for request in TABLE for role in Role]


def requests(location: bytes = WORKER) -> dict[str, bytes]:
    """Return a valid request of each type. The worker holds `held`, and `ready` is ready."""
    held = pb.Batch(name=[b"held"], attempt=[1])

    def asked(kind: str, **fields: Any) -> bytes:
        return Q(type=kind, request=7, **fields).SerializeToString()

    def reported(kind: str) -> bytes:
        return asked(kind, location=location, batch=held)

    one = pb.Batch(name=[b"ready"])
    chunks = [StreamChunk(b"held", 1, Stream.STDOUT, 0, b"x")]
    return {
        "OK": asked("OK"),
        "Lookup": asked("Lookup", name=b"ready"),
        "Relay": asked("Relay", gone=[1]),
        "Stats": asked("Stats"),
        "List": asked("List"),
        "Show": asked("Show", name=b"ready"),
        "Explain": asked("Explain", name=b"ready"),
        "Workers": asked("Workers"),
        "Lanes": asked("Lanes"),
        "Watch": asked("Watch", batch=one),
        "Follow": asked("Follow"),
        "Read": asked("Read", batch=one),
        "Read for a task": asked("Read", location=location, held=b"held", name=b"held", value=b"x"),
        "Values": asked("Values"),
        "PutValue": asked("PutValue", value=b"x"),
        "Rules": asked("Rules", worker=pb.WorkerMsg(service=[b"default"])),
        "Numbers": number_messages.numbers(7, path=b"f"),
        "Number": number_messages.number(7, b"c", b"f", 0, [b"x"]),
        "Create": peer.create(7, Submission([b"new"], [b""], [Terms()])),
        "Cancel": asked("Cancel", batch=one),
        "Retry": asked("Retry", batch=one),
        "Move": asked("Move", batch=one, place=pb.PlaceMsg(lane=b"l")),
        "Expire": asked("Expire", batch=one),
        "Edit": asked("Edit", batch=one, changes=pb.Terms(priority=1)),
        "Steal": asked("Steal", location=location),
        "Complete": reported("Complete"),
        "Transfer": reported("Transfer"),
        "Progress": reported("Progress"),
        "Append": attempt_columns.append(7, location, chunks),
        "Heartbeat": reported("Heartbeat"),
        "Exit": asked("Exit", location=location),
        "Drain": asked("Drain", everything=True),
        "Failover": asked("Failover", epoch=1),
        "Pause": asked("Pause"),
        "Resume": asked("Resume"),
    }


class Yard(Counter):
    """A broker whose socket requires keys, with a ready task and a leased one."""

    def __init__(self) -> None:
        super().__init__()
        payload = b'{"argv":["echo"],"results":["ready"]}'
        self.ask(peer.create(1, Submission([b"held"], [payload], [Terms()])))
        self.ask(peer.steal(2, WORKER, peer.worker_message(WorkerFacts(slots_total=1)), 1))
        self.ask(peer.create(3, Submission([b"ready"], [b""], [Terms()])))
        self.before = self.scheduler.ledger.record

    def ask_as(self, guest: AuthenticatedPeer, body: bytes) -> list[Q]:
        """Return the replies to a request of an authenticated peer."""
        self.sent = []
        self.handle([*self.dialect.receive(b"peer", [b"", body], self.now_ns, guest)])
        return [Q.FromString(body) for _, body in self.sent]

    def changed(self) -> bool:
        return self.scheduler.ledger.record != self.before


def is_allowed(request: str, role: Role) -> tuple[bool, str]:
    """Return whether a request is allowed, and the reason if not. A refusal changes nothing."""
    yard = Yard()
    yard.dialect.set_handover(lambda epoch, *, force: "")  # noqa: ARG005  # as `HandOver`
    answers = yard.ask_as(GUESTS[role], requests()[request])
    if not yard.dialect.forbidden:
        assert [one for one in answers if one.type == Q.Error] == []
        return True, ""
    assert [one.type for one in answers] == [Q.Error]
    assert not yard.changed()
    assert answers[0].code == b"forbidden"
    return False, answers[0].reason.decode()


@each_case(("request_name", "role"), CELLS)
def test_each_role_may_send_the_requests_of_its_row_and_no_others(
    request_name: str, role: Role
) -> None:
    allowed, reason = is_allowed(request_name, role)
    assert allowed is (role[0] in TABLE[request_name])
    if not allowed:
        article = "an" if role is Role.ADMIN else "a"
        assert reason.startswith(f"key 'a-{role}': {article} {role} may not ")
        assert reason.endswith("'s key)")


def test_every_request_has_a_row_here_and_in_the_table() -> None:
    decoded = [*map(Q.Type.Name, native_requests._DECODERS), "Relay", READ_FOR_TASK]  # noqa: SLF001
    assert sorted(TABLE) == sorted(requests()) == sorted(decoded)
    rows = [one if isinstance(one, str) else Q.Type.Name(one) for one in PERMISSIONS[DWORK]]
    assert sorted(rows) == sorted(decoded)


def test_request_without_a_row_is_for_admins_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PERMISSIONS[DWORK], Q.Lookup)
    assert [role for role in Role if is_allowed("Lookup", role)[0]] == [Role.ADMIN]


def test_without_a_key_everything_is_allowed() -> None:
    """On the native socket the kernel has checked the user."""
    for body in requests(b"anybody").values():
        yard = Yard()
        yard.frames([b"", body])
        assert yard.dialect.forbidden == 0


@pytest.mark.parametrize("guest", [AuthenticatedPeer("a-admin", ()), UNKNOWN_PEER])
@each_case("request_name", TABLE)
def test_revoked_and_unknown_keys_are_refused(guest: AuthenticatedPeer, request_name: str) -> None:
    yard = Yard()
    (answer,) = yard.ask_as(guest, requests()[request_name])
    reason = "key 'a-admin' was revoked" if guest.name else "this key is no longer known"
    assert answer.type == Q.Error
    assert answer.reason.decode().startswith(reason)
    assert not yard.changed()


BY_WORKER: Final = [name for name, roles in TABLE.items() if roles == "--wa"]


@each_case("request_name", BY_WORKER)
@pytest.mark.parametrize("location", [b"a-worker2", b"a-worke", b"other", b"a-worker\0/x", b"/"])
def test_worker_may_not_act_as_another(request_name: str, location: bytes) -> None:
    yard = Yard()
    (answer,) = yard.ask_as(GUESTS[Role.WORKER], requests(location)[request_name])
    assert answer.type == Q.Error
    expected = "key 'a-worker': workers must be named a-worker or a-worker/…, not "
    assert answer.reason.decode().startswith(expected)
    assert not yard.changed()


@each_case("request_name", BY_WORKER)
def test_admin_may_act_as_any_worker(request_name: str) -> None:
    yard = Yard()
    yard.ask_as(GUESTS[Role.ADMIN], requests(WORKER)[request_name])
    assert yard.dialect.forbidden == 0


@each_case(("request_name", "role"), [cell for cell in CELLS if cell[1] in COLUMNS])
def test_relayed_request_is_checked_by_the_key_of_the_relay(request_name: str, role: Role) -> None:
    yard = Yard()
    envelope = pb.Envelope(peer=1, message=requests()[request_name]).SerializeToString()
    assert yard.ask_as(GUESTS[role], Q(type=Q.Relay, envelope=[envelope]).SerializeToString()) == []
    is_refused = bool(yard.dialect.forbidden)
    assert is_refused is (role[0] not in TABLE[request_name])
    if is_refused:
        ((_, (_, body)),) = yard.dialect.flush()
        (reply,) = Q.FromString(body).envelope
        assert Q.FromString(pb.Envelope.FromString(reply).message).code == b"forbidden"
        assert not yard.changed()


def test_request_without_a_worker_name_is_refused_by_role_first() -> None:
    assert refusal(GUESTS[Role.WORKER], DWORK, Q.Steal)
    assert not may_act_as("w", b"")
    assert may_act_as("w", b"w")
    assert may_act_as("w", b"w/")


def test_long_name_is_cut_in_the_refusal() -> None:
    refused = refusal(GUESTS[Role.WORKER], DWORK, Q.Steal, b"x" * 1_000_000)
    assert refused is not None
    assert len(refused[1]) < 250


def test_plain_peer_gets_a_plain_error() -> None:
    plain = Q(type=Q.Steal, location=b"w").SerializeToString()
    (answer,) = Yard().ask_as(GUESTS[Role.VIEWER], plain)
    assert answer == Q(type=Q.Error)


def test_malformed_request_of_an_authenticated_peer_is_malformed() -> None:
    yard = Yard()
    (answer,) = yard.ask_as(GUESTS[Role.VIEWER], b"\xff")
    assert answer.type == Q.Error
    assert (yard.dialect.malformed, yard.dialect.forbidden) == (1, 0)


#: The first words of the rows in the docs, and the requests behind them.
PAGE_ROWS: Final = {
    "read": "Stats List Show Explain Workers Watch Follow Read",
    "change tasks": "Create Cancel Retry",
    "run tasks": "Steal Complete Transfer Progress Append Heartbeat Exit",
    "control": "Drain Failover Pause Resume",
}


def test_docs_have_the_same_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for title, requests in PAGE_ROWS.items():
        (cells,) = re.findall(rf"^\| {title}: .*? ((?:\| (?:yes|-) ){{4}})\|$", page, re.MULTILINE)
        cells = "".join(
            role[0] if cell == "yes" else "-"
            for role, cell in zip(COLUMNS, re.findall(r"yes|-", cells), strict=True)
        )
        assert {TABLE[request] for request in requests.split()} == {cells}


def printed() -> str:
    """Format the table from the results of all requests."""
    lines = ["| request | " + " | ".join(Role) + " |", "|---|" + "---|" * len(Role)]
    for request in TABLE:
        cells = ["yes" if is_allowed(request, role)[0] else "-" for role in Role]
        lines.append(f"| {request} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_table_is_printed() -> None:
    """Run `pytest -s` to see it."""
    table = printed()
    print(f"\n{table}")  # noqa: T201
    assert table.count("yes") == sum(len(row.replace("-", "")) for row in TABLE.values())


if __name__ == "__main__":
    print(printed())  # noqa: T201
