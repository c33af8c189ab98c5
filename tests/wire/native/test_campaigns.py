"""Task names in native messages: short in a Create, full everywhere else."""

from taskyard.core.events import Scope
from taskyard.core.model import Submission, Terms
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply
from tests.wire.native.test_extended import Extended

Q = pb.QueryMsg


def plain_create(name: bytes, *before: bytes) -> bytes:
    deps = [pb.TaskMsg.Dep(name=one).SerializeToString() for one in before]
    task = pb.TaskMsg(name=name, origin=b"", pred=deps).SerializeToString()
    return Q(type=Q.Create, task=[task]).SerializeToString()


def test_task_of_a_campaign_has_its_full_name_on_the_wire() -> None:
    counter = Extended()
    created = counter.frames(
        [b"", peer.create(1, Submission([b"a/b"], [b""], [Terms(campaign=b"c")]), stream=True)]
    )
    assert Reply(created[0]).kind == peer.OK
    counter.request(peer.command(2, peer.CANCEL, Scope(names=(b"c/a/b",))), b"other")
    (reply,) = [Reply(body) for route, body in counter.sent if route == b"peer"]
    assert reply.names == [b"c/a/b"]


def test_documents_have_name_and_campaign_as_two_fields() -> None:
    counter = Extended()
    counter.create(b"a/b", campaign=b"c")
    counter.create(b"c/d")
    (first, second) = counter.request(peer.list_tasks(1, Scope())).document()
    assert (first["name"], first["campaign"]) == ("a/b", "c")
    assert (second["name"], second["campaign"]) == ("c/d", "")
    shown = counter.request(peer.query(1, peer.SHOW, b"c/a/b")).document()
    assert (shown["name"], shown["campaign"]) == ("a/b", "c")
    why = counter.request(peer.query(1, peer.EXPLAIN, b"c/a/b")).document()
    assert (why["name"], why["campaign"]) == ("a/b", "c")


def test_name_is_listed_in_every_campaign_on_request() -> None:
    counter = Extended()
    counter.create(b"x", campaign=b"mon")
    counter.create(b"x", campaign=b"tue")
    scope = Scope(names=(b"x",), any_campaign=True)
    found = counter.request(peer.list_tasks(1, scope)).document()
    assert [(one["campaign"], one["name"]) for one in found] == [("tue", "x"), ("mon", "x")]
    assert counter.request(peer.list_tasks(1, Scope(names=(b"x",)))).document() == []


def test_plain_peer_creates_outside_any_campaign_and_sees_full_names() -> None:
    counter = Extended()
    counter.request(peer.create(1, Submission([b"b", b"w"], [b""], [Terms(campaign=b"a")])))
    found = Q.FromString(counter.ask(Q(type=Q.Lookup, name=b"a/b").SerializeToString()))
    assert pb.TaskMsg.FromString(found.task[0]).name == b"a/b"
    assert Q.FromString(counter.ask(plain_create(b"a/b"))).type == Q.Error
    assert Q.FromString(counter.ask(plain_create(b"a/c", b"a/b"))).type == Q.OK
    task = counter.scheduler.ledger.tasks[b"a/c"]
    assert (task.terms.campaign, task.waits) == (b"", 1)
    steal = Q(type=Q.Steal, location=b"plain", n=9).SerializeToString()
    stolen = Q.FromString(counter.ask(steal, b"plain"))
    names = [pb.TaskMsg.FromString(raw).name for raw in stolen.task]
    assert names == [b"a/b", b"a/w"]
