"""Rules that are sent to workers and clients, and agent errors that workers report."""

from __future__ import annotations

import pytest
from msgspec import structs

from taskyard.core.events import RulesSet
from taskyard.core.limits import REASON_BYTES_MAX, SECOND_NS, SERVICES_MAX
from taskyard.core.model import WorkerFacts
from taskyard.core.rules import LaneOptions, Rule
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply
from tests.wire.kit import Counter

WORKER = peer.worker_message(WorkerFacts(services=(b"exec",)))


class RequestCounter(Counter):
    def request(self, body: bytes) -> Reply:
        return Reply(self.ask(body))


def test_rules_are_sent_in_their_order() -> None:
    counter = RequestCounter()
    rules = LaneOptions(
        command=b"agents/smtp -v",
        lane_workers_max=3,
        overfeed=10,
        idle_ns_max=7,
        hunger_ns_max=8,
        lane_template=b"{host}",
        lines=b"zmailer",
        interval_ns=9,
        workers_max=20,
    )
    first, others = Rule(b"smtp", b"smtp/*", rules), LaneOptions(lane_workers_max=0)
    counter.handle([RulesSet(0, (first,), others)])
    reply = counter.request(peer.rules(7, [b"smtp", b"exec"]))
    assert (reply.kind, reply.request) == (peer.RULES, 7)
    sent = structs.replace(rules, workers_max=0)  # concerns only the broker
    assert reply.clauses() == [Rule(b"smtp", b"smtp/*", sent), Rule(b"", b"*", others)]


@pytest.mark.parametrize(
    "services", [[b""], [b"\xff"], [b"%d" % number for number in range(SERVICES_MAX + 1)]]
)
def test_rules_request_without_services_is_refused(services: list[bytes]) -> None:
    assert RequestCounter().request(peer.rules(7, services)).kind == peer.ERROR


def test_heartbeat_reports_why_agents_can_not_be_started() -> None:
    counter = RequestCounter()

    def trouble_after(trouble: bytes | None) -> bytes:
        counter.request(peer.heartbeat(7, b"w", WORKER, [], SECOND_NS, trouble=trouble))
        return counter.scheduler.ledger.workers[b"w"].trouble

    assert trouble_after(b"no key") == b"no key"
    assert trouble_after(None) == b"no key"
    assert trouble_after(b"") == b""
    assert len(trouble_after(b"x" * 10_000)) == REASON_BYTES_MAX
