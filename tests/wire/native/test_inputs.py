"""Results for a worker: only those that a task needs which it holds."""

from __future__ import annotations

import pytest

from taskyard.core.blobs import results_needed
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native.task_contents import Holder
from tests.wire.kit import Counter

Q = pb.QueryMsg
WORKER = b"w"

PAYLOAD = b'{"argv":["echo","{result:a}"],"results":["a","other/b"]}'


@pytest.fixture
def yard() -> Counter:
    """Return a broker with results `c/a`, `other/b` and `c/secret`, and a held task `c/later`."""
    yard = Counter()
    facts = peer.worker_message(WorkerFacts((b"s",), slots_total=9))
    for campaign, name in ((b"c", b"a"), (b"other", b"b"), (b"c", b"secret")):
        terms = Terms(campaign=campaign, service=b"s")
        yard.ask(peer.create(1, Submission([name], [b""], [terms])))
    yard.ask(peer.steal(2, WORKER, facts, 3))
    done = peer.ReportColumns([b"c/a", b"other/b", b"c/secret"], [1, 1, 1])
    yard.ask(peer.complete(3, WORKER, done))
    terms = Terms(campaign=b"c", service=b"s")
    later = Submission([b"later", b"free"], [PAYLOAD], [terms], after=[[b"a", b"other/b"], []])
    yard.ask(peer.create(4, later))
    yard.ask(peer.steal(5, WORKER, facts, 1))
    return yard


def reply_to(yard: Counter, body: bytes) -> Q:
    (reply,) = yard.frames([b"", body])
    return Q.FromString(reply)


def test_results_of_its_task_are_returned_by_the_names_in_the_payload(yard: Counter) -> None:
    reply = reply_to(yard, task_contents.results(7, [b"a", b"other/b"], Holder(WORKER, b"c/later")))
    assert reply.type == Q.Read
    assert [*reply.batch.name] == [b"a", b"other/b"]
    services = [pb.Terms.FromString(one).service for one in reply.batch.terms]
    assert [services[place] for place in reply.batch.terms_at] == [b"s", b"s"]


@pytest.mark.parametrize(
    ("worker", "held", "name", "reason"),
    [
        (WORKER, b"c/later", b"secret", "task c/later: needs no result of secret"),
        (WORKER, b"c/later", b"c/secret", "task c/later: needs no result of c/secret"),
        (WORKER, b"c/later", b"c/a", "task c/later: needs no result of c/a"),
        (WORKER, b"c/free", b"a", "worker w does not hold task c/free"),
        (WORKER, b"c/a", b"a", "worker w does not hold task c/a"),
        (WORKER, b"nowhere", b"a", "worker w does not hold task nowhere"),
        (b"x", b"c/later", b"a", "worker x does not hold task c/later"),
    ],
)
def test_other_results_are_refused(
    yard: Counter, worker: bytes, held: bytes, name: bytes, reason: str
) -> None:
    for body in (
        task_contents.results(7, [name], Holder(worker, held)),
        task_contents.part(7, name, holder=Holder(worker, held)),
    ):
        reply = reply_to(yard, body)
        assert (reply.type, reply.reason.decode()) == (Q.Error, reason)


@pytest.mark.parametrize(
    ("payload", "names"),
    [
        (PAYLOAD, ["a", "other/b"]),
        (b'{"pickle":1,"results":["x"]}\n\x80"results":["y"]', ["x"]),
        (b'{"pickle":1}\n"results":["y"]', []),
        (b'{"call":"m:f","args":[{"results":["y"]}]}', []),
        (b'{"mine":1,"results":["y"]}', []),  # a payload of a user's own
        (b'{"argv":["a"],"results":[1]}', []),
        (b'{"argv":"results":["y"]', []),
        (b"", []),
    ],
)
def test_names_are_those_of_the_first_line(payload: bytes, names: list[str]) -> None:
    assert results_needed(payload) == names


def test_name_that_means_another_task_is_refused(yard: Counter) -> None:
    terms = Terms(campaign=b"c", service=b"s")
    payload = b'{"argv":["echo"],"results":["x"]}'
    yard.ask(peer.create(7, Submission([b"c/x"], [b""])))  # of no campaign
    yard.ask(peer.create(8, Submission([b"t"], [payload], [terms])))
    yard.ask(peer.steal(9, WORKER, peer.worker_message(WorkerFacts((b"s",), slots_total=9)), 9))
    for body in (
        task_contents.results(10, [b"x"], Holder(WORKER, b"c/t")),
        task_contents.part(11, b"x", holder=Holder(WORKER, b"c/t")),
    ):
        reply = reply_to(yard, body)
        assert reply.type == Q.Error
        assert reply.reason.startswith(b"predecessor c/x: ")
