"""The environment of a Create, on its way to the workers."""

import pytest

from taskyard.calls.environments import Environment, decode_environment, encode_environment
from taskyard.calls.payloads import encode_call, encode_command
from taskyard.core.model import Submission, Terms, WorkerFacts
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from taskyard.wire.native.peer import Reply
from tests.wire.kit import Counter

COMMAND = encode_command(["true"])
HERE = encode_environment(Environment("h", "/here", {"A": "b"}))
TERMS = [Terms(service=b"exec")]


def created(counter: Counter, payload: bytes = COMMAND, environment: bytes = HERE) -> Reply:
    submission = Submission([b"a"], [payload], TERMS)
    return Reply(counter.ask(peer.create(1, submission, environment=environment)))


def stolen(counter: Counter, host: bytes) -> bytes:
    """Return the environment that a worker on a host gets with its task."""
    facts = WorkerFacts(services=(b"exec",), slots_total=4, incarnation=9, host=host)
    (reply,) = counter.frames([b"", peer.steal(2, b"w", peer.worker_message(facts), 1)], b"w")
    return Reply(reply).assigned().terms_of(0).environment


def test_worker_on_the_same_host_gets_the_environment() -> None:
    counter = Counter()
    assert created(counter).kind == peer.OK
    assert stolen(counter, b"h") == HERE


def test_worker_on_another_host_gets_no_variables() -> None:
    counter = Counter()
    created(counter)
    assert decode_environment(stolen(counter, b"elsewhere")) == Environment("h", "/here")


def test_only_commands_have_an_environment() -> None:
    for payload in (encode_call("m:f"), b"payload", b""):
        counter = Counter()
        created(counter, payload)
        assert stolen(counter, b"h") == b""


@pytest.mark.parametrize("environment", [b"no JSON", b'{"host":"h","cwd":"a"}'])
def test_invalid_environment_is_refused(environment: bytes) -> None:
    counter = Counter()
    refused = created(counter, environment=environment)
    assert (refused.kind, refused.code) == (peer.ERROR, "malformed")
    assert refused.reason.startswith("environment: ")
    assert not counter.scheduler.ledger.tasks


def test_environment_in_the_terms_of_a_create_is_refused() -> None:
    query = pb.QueryMsg(type=pb.QueryMsg.Create, request=1)
    query.batch.name.append(b"a")
    query.batch.terms.append(pb.Terms(environment=HERE).SerializeToString())
    refused = Reply(Counter().ask(query.SerializeToString()))
    assert (refused.kind, refused.code) == (peer.ERROR, "malformed")
    assert "only allowed beside the tasks" in refused.reason


def test_plain_worker_gets_nothing_of_it() -> None:
    counter = Counter()
    submission = Submission([b"a"], [COMMAND])
    counter.ask(peer.create(1, submission, environment=HERE))
    query = pb.QueryMsg(type=pb.QueryMsg.Steal, location=b"plain")
    answer = counter.ask(query.SerializeToString(), b"plain")
    assert b"/here" not in answer
