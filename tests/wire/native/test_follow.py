"""Follow: its requests, its replies, and a document for every kind of record."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from taskyard.core import records
from taskyard.core.effects import RecordPage
from taskyard.core.events import FollowOptions, ReplyDue, Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Submission, Terms, TermsChanges, WorkerFacts
from taskyard.core.records import AnyRecord, ReturnReason
from taskyard.core.states import TaskState
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply
from taskyard.wire.native.server import NativeServer
from taskyard.wire.record_views import AnyRecordDocument, record_document
from tests.wire.kit import BROKER, Counter

W, NAMES, ATTEMPTS = b"w", [b"a", b"\xff"], [1, 2]
TERMS = [Terms(campaign=b"c", due_ns=1_500_000_000), Terms(service=b"s", expires_ns=2 * SECOND_NS)]
EVERY: list[AnyRecord] = [
    records.Submitted(
        SECOND_NS,
        Submission(NAMES, [b"SECRET"], TERMS, [0, 1], [b"", b"l"], [[], [b"a"]], [b"SECRET"] * 2),
        [[b"x"], []],
    ),
    records.Extended(1, NAMES, [[b"x"], []]),
    records.Leased(1, W, NAMES, ATTEMPTS, 5),
    records.Finished(1, W, NAMES, ATTEMPTS, [b"SECRET", b""]),
    records.Failed(1, W, NAMES, ATTEMPTS, [b"oh", b""]),
    records.Postponed(1, W, NAMES, ATTEMPTS, [SECOND_NS, 0], [b"oh", b""], own_fault=False),
    records.Returned(1, W, NAMES, ATTEMPTS, ReturnReason.LEFT, [[b"x"], []]),
    records.LeaseExpired(1, W, NAMES, ATTEMPTS),
    records.CameDue(1, NAMES),
    records.TaskExpired(1, NAMES),
    records.Cancelled(1, NAMES, []),
    records.Retried(1, NAMES),
    records.Progressed(1, W, NAMES, ATTEMPTS, [3, 4], [b"SECRET", b""]),
    records.StaleReport(1, W, NAMES, ATTEMPTS),
    records.WorkerJoined(1, W, WorkerFacts((b"s",), 3, dialect=b"d")),
    records.WorkerLeft(1, W, b"silent"),
    records.SlotsFreed(1, W, 2),
    records.Paused(1, b"s", None),
    records.Resumed(1, b"s", b"l"),
    records.Moved(1, NAMES, b"s", None),
    records.ReportedLate(1, NAMES),
    records.Released(1, NAMES),
    records.WorkerReplaced(1, b"w", 7, NAMES, [1, 1]),
    records.Refunded(1, b"w", 7, NAMES, [1, 1]),
    records.Edited(1, NAMES, TermsChanges(5, 10**9, (2 * 10**9,), 0)),
    records.Numbered(1, b"c", b"/f", 0, [b"SECRET"]),
]


def document_of(record: AnyRecord) -> dict[str, Any]:
    encoded = msgspec.json.encode(record_document(7, record))
    msgspec.json.decode(encoded, type=AnyRecordDocument)
    document: dict[str, Any] = msgspec.json.decode(encoded)
    return document


def test_every_kind_of_record_has_a_document() -> None:
    assert [type(record) for record in EVERY] == [*get_args(AnyRecord)]


@pytest.mark.parametrize("record", EVERY, ids=lambda one: type(one).__name__)
def test_document_has_number_and_names_but_no_contents(record: AnyRecord) -> None:
    document = document_of(record)
    assert document["record"] == 7
    assert document.get("names", ["a", r"\xff"]) == ["a", r"\xff"]
    assert "SECRET" not in msgspec.json.encode(document).decode()


def test_document_of_a_submission_has_its_dependencies() -> None:
    document = document_of(EVERY[0])
    assert (document["kind"], document["at"]) == ("submitted", 1.0)
    assert [one["campaign"] for one in document["terms"]] == ["c", ""]
    assert [(one["due"], one["expires"]) for one in document["terms"]] == [(1.5, None), (None, 2.0)]
    assert (document["terms_at"], document["lanes"]) == ([0, 1], ["", "l"])
    assert (document["after"], document["after_done"]) == ([[], ["a"]], [["x"], []])


def test_documents_have_reasons_services_and_lanes() -> None:
    assert (
        document_of(records.TaskExpired(1, NAMES, b"expired on request"))["reason"]
        == "expired on request"
    )
    document = document_of(records.Moved(1, NAMES, b"s", None))
    assert (document["service"], document["lane"]) == ("s", None)
    changes = TermsChanges(time_limit_ns=SECOND_NS, retry_delays_ns=(), expires_hard_ns=0)
    document = document_of(records.Edited(1, NAMES, changes))
    assert (document["priority"], document["time_limit"]) == (None, 1.0)
    assert (document["retry_delays"], document["expires_hard"]) == ([], 0.0)


def asked(**given: Any) -> ReplyDue:
    (event,) = NativeServer(BROKER, lambda: 0).receive(b"peer", [b"", peer.follow(5, **given)], 1)
    assert isinstance(event, ReplyDue)
    return event


def test_request_has_a_cursor_and_a_scope() -> None:
    scope = Scope(campaign=b"c", service=b"s", lane=b"l", match=b"m")
    event = asked(cursor=9, journal=b"j", scope=scope, count=3, wait_ns=SECOND_NS)
    assert event.follow_options == FollowOptions(9, 3, scope, b"j")
    assert asked().follow_options == FollowOptions(None, 1000, Scope(), b"")


@pytest.mark.parametrize("scope", [Scope(names=(b"a",)), Scope(states=(TaskState.DONE,))])
def test_names_and_states_can_not_be_followed(scope: Scope) -> None:
    assert Reply(Counter().ask(peer.follow(5, scope=scope))).kind == peer.ERROR


def test_reply_has_the_next_cursor() -> None:
    counter = Counter()
    scope = Scope()
    (event,) = counter.dialect.receive(b"peer", [b"", peer.follow(5)], counter.now_ns)
    assert isinstance(event, ReplyDue)
    effect = RecordPage(b"peer", event.request, 8, 1, scope, b"j", [(8, EVERY[10])])
    ((_, frames),) = counter.dialect.reply(effect)
    reply = Reply(frames[1])
    assert (reply.kind, reply.request, reply.cursor, reply.journal) == (peer.FOLLOW, 5, 8, b"j")
    assert [one["kind"] for one in reply.document()] == ["cancelled"]
    assert counter.dialect.reply(effect) == []


def test_missing_records_have_a_reason() -> None:
    counter = Counter()
    (event,) = counter.dialect.receive(b"peer", [b"", peer.follow(5, 1)], counter.now_ns)
    assert isinstance(event, ReplyDue)
    effect = RecordPage(b"peer", event.request, 8, 1, Scope(), b"j", text="trimmed")
    ((_, frames),) = counter.dialect.reply(effect)
    reply = Reply(frames[1])
    assert (reply.kind, reply.cursor, reply.reason) == (peer.NOT_FOUND, 8, "trimmed")


def test_timeout_of_a_follow_is_left_to_the_record_stream() -> None:
    counter = Counter()
    events = counter.dialect.receive(b"peer", [b"", peer.follow(5, wait_ns=9)], counter.now_ns)
    assert len(events) == 1
    assert counter.pass_time(SECOND_NS) == []


def test_create_waits_for_whole_campaigns() -> None:
    counter = Counter()
    first = Submission([b"a"], terms=[Terms(campaign=b"c")])
    assert Reply(counter.ask(peer.create(1, first))).kind == peer.OK
    second = peer.create(2, Submission([b"z"]), after_campaigns=[b"c"])
    assert Reply(counter.ask(second)).count == 1
    assert counter.scheduler.ledger.tasks[b"z"].waits == 1
