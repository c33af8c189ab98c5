"""The session under adverse brokers, callers and machines.

Most tests play the broker: they receive each request and choose the reply.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future as AnyFuture
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from taskyard.campaign import lanes
from taskyard.client import task_buffer, watches
from taskyard.client.exchanges import Query
from taskyard.client.futures import Future
from taskyard.client.internal import InternalClient
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState
from taskyard.errors import ClientClosed, NoBroker, Refused, TimedOut, UserError
from taskyard.net import sockets
from taskyard.net.host import Poller
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native.frames import encode_rule
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Q = pb.QueryMsg
HALF_A_CHARACTER = "caf\udce9"


class Stage:
    """A broker that the test plays, at a real endpoint, in the thread of the test."""

    def __init__(self, path: Path) -> None:
        self.wire = sockets.listen(f"ipc://{path}")
        self.process = 1
        #: The rules that it replies. None: it does not understand the request.
        self.clauses: list[Rule] | None = []
        self._route = b""
        self._poller = Poller()
        self._poller.add(self.wire)

    def receive(self) -> Q:
        """Return the next request. Answer requests for rules and heartbeats meanwhile."""
        while True:
            while (frames := self.wire.receive()) is None:
                assert self._poller.wait(int(PATIENCE_SECONDS * SECOND_NS)), "no request arrived"
            self._route = frames[0]
            query = Q.FromString(frames[-1])
            if query.type == Q.Rules:
                self._reply_rules(query)
            elif query.type == Q.OK:
                self.reply(query, Q.OK)
            else:
                return query

    def _reply_rules(self, asked: Q) -> None:
        if self.clauses is None:
            self.reply(asked, Q.Error)
        else:
            rules = {"clause": [*map(encode_rule, self.clauses)], "version": 1}
            self.reply(asked, Q.Rules, rules=rules)

    def is_quiet(self) -> bool:
        """Return whether no request arrives for a while, shorter than the heartbeat interval."""
        return self.wire.receive() is None and not self._poller.wait(SECOND_NS // 10)

    def reply(self, asked: Q, kind: Q.Type, reason: bytes = b"", **more: Any) -> None:
        answer = Q(type=kind, request=asked.request, broker=self.process, reason=reason, **more)
        assert self.wire.send([self._route, b"", answer.SerializeToString()])

    def settle(self, asked: Q, *names: str, left: int) -> None:
        columns = {
            "name": [name.encode() for name in names],
            "standing": [TaskState.DONE] * len(names),
            "text": [b""] * len(names),
        }
        self.reply(asked, Q.Watch, batch=columns, n=left)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    played = Stage(tmp_path / "broker.sock")
    with contextlib.closing(played.wire):
        yield played


@pytest.fixture
def client(stage: Stage) -> Iterator[InternalClient]:
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(InternalClient, stage.wire.endpoint)
        stage.reply(stage.receive(), Q.Stats, document=b"{}")
        opened = opening.result(PATIENCE_SECONDS)
    yield opened
    opened.close(0)


def names(query: Q) -> list[str]:
    return [name.decode() for name in query.batch.name]


def reason_of(future: Future) -> str:
    return str(future.exception(PATIENCE_SECONDS))


# Cancelling.


def test_cancelling_a_task_that_does_not_end_in_time_returns_false(
    stage: Stage, client: InternalClient
) -> None:
    client._timeout = 0.1  # noqa: SLF001
    future = client.submit(b"", name="endless")
    stage.reply(stage.receive(), Q.OK)
    with ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(future.cancel)
        stage.reply(stage.receive(), Q.OK, n=1)
        assert not cancelled.result(PATIENCE_SECONDS)


# Order.


def test_refusal_does_not_count_while_an_earlier_submission_is_open(
    stage: Stage, client: InternalClient
) -> None:
    client.submit(b"", name="first")
    first = stage.receive()
    behind = client.submit(b"", name="behind", after=["first"])
    stage.reply(stage.receive(), Q.Error, b"predecessor first is not known")
    lost = client.submit(b"", name="later")
    assert stage.is_quiet()
    stage.reply(first, Q.OK)
    again = stage.receive()
    assert names(again) == ["behind"]
    stage.reply(again, Q.OK)
    later = stage.receive()
    assert names(later) == ["later"]
    assert not behind.done()
    stage.reply(later, Q.Error, b"no")
    assert reason_of(lost) == "task later was refused: no"


def fill_flight(stage: Stage, client: InternalClient) -> list[Q]:
    """Put as many batches in flight as may be. Later tasks are gathered."""
    held = []
    for number in range(task_buffer.CREATES_MAX):
        client.submit(b"", name=f"held-{number}")
        held.append(stage.receive())
    return held


def refuse(stage: Stage, query: Q, **faults: str) -> None:
    """Refuse a batch because of the tasks at these indexes, each with a code and a sentence."""
    tasks = [
        pb.RefusedTask(
            index=int(index.removeprefix("at")),
            name=query.batch.name[int(index.removeprefix("at"))],
            code=code.encode(),
            reason=f"it is {code}".encode(),
        ).SerializeToString()
        for index, code in faults.items()
    ]
    stage.reply(query, Q.Error, b"the first sentence", code=b"first", refused=tasks)


def gathered(stage: Stage, client: InternalClient, *tasks: str) -> tuple[Q, list[Future]]:
    """Submit tasks as one batch. Return its request and their futures."""
    held = fill_flight(stage, client)
    futures = [client.submit(b"", name=name) for name in tasks]
    for each in held:
        stage.reply(each, Q.OK)
    batch = stage.receive()
    assert names(batch) == [*tasks]
    return batch, futures


def test_refusal_does_not_count_while_the_rest_of_an_earlier_batch_is_open(
    stage: Stage, client: InternalClient
) -> None:
    held = fill_flight(stage, client)
    for name in "ab":
        client.submit(b"", name=name)
    behind = client.submit(b"", name="behind", after=["b"], wait_for_unknown=True)
    for each in held:
        stage.reply(each, Q.OK)
    both, last = stage.receive(), stage.receive()
    assert (names(both), names(last)) == (["a", "b"], ["behind"])
    refuse(stage, both, at0="conflict")
    refuse(stage, last, at0="unknown")
    for expected in (["b"], ["behind"]):
        part = stage.receive()
        assert names(part) == expected
        stage.reply(part, Q.OK)
    assert not behind.done()


def test_tasks_at_fault_are_refused_and_the_others_sent_again_at_once(
    stage: Stage, client: InternalClient
) -> None:
    batch, futures = gathered(stage, client, *"abcde")
    refuse(stage, batch, at1="conflict", at3="unknown")
    again = stage.receive()
    assert names(again) == ["a", "c", "e"]
    stage.reply(again, Q.OK)
    assert reason_of(futures[1]) == "task b was refused: it is conflict"
    assert reason_of(futures[3]) == "task d was refused: it is unknown"
    refused = futures[3].exception(PATIENCE_SECONDS)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.names) == ("unknown", ("d",))
    assert [future.done() for future in futures] == [False, True, False, True, False]
    assert stage.is_quiet()


def test_refusal_that_names_no_task_is_that_of_all(stage: Stage, client: InternalClient) -> None:
    batch, futures = gathered(stage, client, *"ab")
    stage.reply(batch, Q.Error, b"the disk is full", code=b"full")
    for future in futures:
        assert reason_of(future) == f"task {future.name} was refused: the disk is full"
        refused = future.exception(PATIENCE_SECONDS)
        assert isinstance(refused, Refused)
        assert (refused.code, refused.names) == ("full", (future.name,))
    assert stage.is_quiet()


def test_repeated_names_are_sent_after_the_first(stage: Stage, client: InternalClient) -> None:
    batch, futures = gathered(stage, client, *"abacaa")
    refuse(stage, batch, at2="duplicate", at4="duplicate", at5="duplicate")
    for expected in ("abc", "a", "a", "a"):
        part = stage.receive()
        assert names(part) == [*expected]
        stage.reply(part, Q.OK)
    assert not any(future.done() for future in futures)


def test_refusal_of_tasks_that_were_not_sent_ends_the_batch(
    stage: Stage, client: InternalClient
) -> None:
    batch, futures = gathered(stage, client, *"ab")
    task = pb.RefusedTask(index=2, code=b"conflict").SerializeToString()
    stage.reply(batch, Q.Error, b"no", code=b"conflict", refused=[task])
    assert [reason_of(future) for future in futures] == [
        f"task {name} was refused: no" for name in "ab"
    ]


# Tasks and requests that can't be sent.


def test_invalid_unicode_raises_at_the_call(client: InternalClient) -> None:
    bad = HALF_A_CHARACTER
    calls: list[Callable[[], object]] = [
        *(lambda look=look: look(bad) for look in (client.show, client.why, client.output)),
        *(lambda look=look: look(bad) for look in (client.result, client.future, client.drain)),
        lambda: list(client.tasks(match=bad)),
        lambda: client.wait_names([bad]),
        lambda: client.wait_campaign(bad),
        lambda: client.cancel([bad]),
        lambda: client.submit(b"", name=bad),
        lambda: client.submit(b"", campaign=bad),
        lambda: client.submit(b"", after=[bad]),
        lambda: client.submit_encoded(bad, b"", Terms()),
    ]
    for call in calls:
        with pytest.raises(UserError, match=r"'caf\\udce9'"):
            call()


def test_request_that_can_not_be_encoded_fails_alone(stage: Stage, client: InternalClient) -> None:
    def fail(_number: int) -> NoReturn:
        raise ValueError("no such question")

    answer: AnyFuture[Any] = AnyFuture()
    client._session.request(Query(fail), answer)  # noqa: SLF001
    with pytest.raises(ValueError, match="no such question"):
        answer.result(PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client.status)
        stage.reply(stage.receive(), Q.Stats, document=b"{}")
        assert status.result(PATIENCE_SECONDS) == {}


def test_task_that_can_not_be_encoded_is_refused_alone(
    stage: Stage, client: InternalClient
) -> None:
    held = fill_flight(stage, client)
    good = client.submit(b"", name="good")
    bad = client.submit_encoded("bad", [None], Terms())  # type: ignore[arg-type]
    for each in held:
        stage.reply(each, Q.OK)
    taken = stage.receive()
    assert names(taken) == ["good"]
    stage.reply(taken, Q.OK)
    assert reason_of(bad).startswith("task bad was refused: ")
    assert not good.done()


def test_task_that_fits_no_message_raises_at_the_call(client: InternalClient) -> None:
    with pytest.raises(UserError, match="task 'big': payload of 16,777,217 bytes is too large"):
        client.submit(bytes(PAYLOAD_BYTES_MAX + 1), name="big")
    many = ["n" * 1000 + str(number) for number in range(9_000)]
    with pytest.raises(UserError, match=r"task 'join': names of .* are too long"):
        client.submit_encoded("join", b"", Terms(), after=many)


def test_submission_that_fits_no_message_raises_at_the_call(client: InternalClient) -> None:
    payloads = [bytes(PAYLOAD_BYTES_MAX - 1)] * 3
    with pytest.raises(UserError, match="limit is 33,554,432"):
        client.create(Submission([b"a", b"b", b"c"], payloads, [Terms()]))


def test_names_count_towards_the_size_of_a_batch(
    stage: Stage, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_buffer, "BYTES_PER_CREATE_MAX", 10_000)
    held = fill_flight(stage, client)
    for name in ("a", "b"):
        client.submit_encoded(name, b"", Terms(), after=["n" * 500] * 12)
    for each in held:
        stage.reply(each, Q.OK)
    parts = [stage.receive(), stage.receive()]
    assert [names(part) for part in parts] == [["a"], ["b"]]
    for part in parts:
        stage.reply(part, Q.OK)


# Waiting, and its end.


def test_timeout_is_kept_without_an_answer(
    stage: Stage, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.client.requests.GRACE_SECONDS", 0.05)
    future = client.submit(b"", name="a")
    stage.reply(stage.receive(), Q.OK)
    with pytest.raises(TimedOut, match=r"1 tasks: the broker did not answer within 0.05 s"):
        client.wait_names(["a"], 0.05)
    with pytest.raises(TimedOut, match="campaign c: the broker did not answer"):
        client.wait_campaign("c", 0.05)
    client._timeout = 0.05  # noqa: SLF001
    with pytest.raises(TimedOut, match="the broker did not answer"):
        future.cancel()
    assert not future.done()


def test_timed_out_request_is_not_sent_again(
    stage: Stage, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.client.requests.GRACE_SECONDS", 0.0)
    with pytest.raises(TimedOut):
        client.wait_campaign("given-up", 0.05)
    assert stage.receive().scope.campaign == b"given-up"
    stage.process = 2  # open requests are sent again
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client.status)
        asked = stage.receive()
        assert asked.type == Q.Stats
        stage.reply(asked, Q.Stats, document=b"{}")
        status.result(PATIENCE_SECONDS)
    assert stage.is_quiet()


class Overtaken(deque[Any]):
    """A queue that closes the client just before an item is appended."""

    def __init__(self, client: InternalClient) -> None:
        super().__init__()
        self.closer = threading.Thread(target=client.close)

    def append(self, item: object) -> None:
        self.closer.start()
        self.closer.join(0.1)
        super().append(item)


def test_task_submitted_during_close_is_still_sent(stage: Stage, client: InternalClient) -> None:
    waiting = client._session._buffer.tasks = Overtaken(client)  # noqa: SLF001
    future = client.submit(b"", name="late")
    stage.reply(stage.receive(), Q.OK)
    waiting.closer.join(PATIENCE_SECONDS)
    with pytest.raises(ClientClosed):
        future.result(PATIENCE_SECONDS)


def test_request_made_during_close_is_still_sent(stage: Stage, client: InternalClient) -> None:
    waiting = client._session._requests.waiting = Overtaken(client)  # noqa: SLF001
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client.status)
        asked = stage.receive()
        with contextlib.suppress(AssertionError):  # it may have disconnected already
            stage.reply(asked, Q.Stats, document=b"{}")
        error = status.exception(PATIENCE_SECONDS)
    assert error is None or isinstance(error, ClientClosed)
    waiting.closer.join(PATIENCE_SECONDS)


def test_failure_to_connect_is_raised_where_the_client_is_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **_named: object) -> NoReturn:
        raise OSError("too many open files")

    monkeypatch.setattr(sockets, "connect", fail)
    with pytest.raises(NoBroker, match=r"broker at ipc://.*: can't connect: too many open files"):
        InternalClient(stage.wire.endpoint)


def test_closed_client_leaves_no_descriptors(client: InternalClient) -> None:
    waker = client._session._waker  # noqa: SLF001
    client.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        waker.wake()
    client.close()


# Callbacks.


def test_callback_that_waits_for_the_client_raises(stage: Stage, client: InternalClient) -> None:
    future = client.submit(b"", name="a")
    raised: AnyFuture[object] = AnyFuture()

    def look(settled: AnyFuture[Any]) -> None:
        assert isinstance(settled, Future)
        try:
            raised.set_result(settled.state)
        except UserError as error:
            raised.set_result(error)

    future.add_done_callback(look)
    asked = stage.receive()
    stage.reply(asked, Q.OK)
    stage.settle(asked, "a", left=0)
    assert "callback: must not wait for the client" in str(raised.result(PATIENCE_SECONDS))


def test_callback_may_submit_however_full_the_buffer_is_and_close(
    stage: Stage, client: InternalClient
) -> None:
    client.submit(b"", name="before")
    stage.reply(stage.receive(), Q.OK)  # it has the rules by now
    client._session._buffer.tasks_max = 0  # noqa: SLF001
    following: AnyFuture[Future] = AnyFuture()

    def go_on(_settled: object) -> None:
        following.set_result(client.submit(b"", name="next"))
        client.submit(b"", name="next-but-one")
        client.close()

    future = client.submit(b"", name="a")
    future.add_done_callback(go_on)
    asked = stage.receive()
    stage.reply(asked, Q.OK)
    stage.settle(asked, "a", left=0)
    taken = stage.receive()
    assert names(taken) == ["next", "next-but-one"]
    stage.reply(taken, Q.OK)
    with pytest.raises(ClientClosed):
        following.result(PATIENCE_SECONDS).result(PATIENCE_SECONDS)


# Watches.


def test_watch_is_requested_again_without_settled_tasks(
    stage: Stage, client: InternalClient
) -> None:
    held = fill_flight(stage, client)
    futures = [client.submit(b"payload", name=name) for name in "abcd"]
    for each in held:
        stage.reply(each, Q.OK)
    asked = stage.receive()
    stage.reply(asked, Q.OK)
    stage.settle(asked, "a", "c", left=2)
    assert futures[2].result(PATIENCE_SECONDS) == b""
    again = {}
    with ThreadPoolExecutor(1) as pool:
        stage.process = 2  # open requests are sent again to the new broker
        status = pool.submit(client.status)
        stage.reply(stage.receive(), Q.Stats, document=b"{}")
        status.result(PATIENCE_SECONDS)
    while asked.request not in again:
        query = stage.receive()
        again[query.request] = query
    assert again[asked.request].type == Q.Watch
    assert names(again[asked.request]) == ["b", "d"]


def test_polled_tasks_get_a_stream_when_there_are_enough(
    stage: Stage, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "STREAMS_MAX", 1)
    monkeypatch.setattr(watches, "POLLED_STREAM_TASKS_MIN", 3)

    def submit(name: str) -> None:
        client.submit(b"", name=name)
        stage.reply(stage.receive(), Q.OK)

    submit("a")
    submit("b")
    asked = stage.receive()
    assert (names(asked), asked.stream) == (["b"], False)
    submit("c")
    submit("d")
    stage.reply(asked, Q.Watch, n=1)
    asked = stage.receive()
    assert (sorted(names(asked)), asked.stream) == (["b", "c", "d"], True)


# Lanes by the settings of a service.


def clause(name: bytes, match: bytes, template: bytes = b"") -> Rule:
    return Rule(name, match, LaneOptions(lane_template=template))


def test_lane_template_of_a_service_applies_to_tasks_without_a_lane(
    stage: Stage, client: InternalClient
) -> None:
    stage.clauses = [
        clause(b"big", b"smtp/big-*", b"no"),
        clause(b"smtp", b"smtp/*", b"{host}"),
        clause(b"", b"*", b"{name}"),
    ]
    client.submit(b'{"host":"a.org"}', name="mail", service="smtp")
    client.submit(b'{"host":"a.org"}', name="own", service="smtp", lane="b")
    client.submit("m:f", name="call", args=[1])
    found: dict[str, bytes] = {}
    while len(found) < 3:  # all of them
        asked = stage.receive()
        found |= dict(zip(names(asked), asked.batch.lane, strict=True))
        stage.reply(asked, Q.OK)
    assert found == {"mail": b"a.org", "own": b"b", "call": b"call"}


def test_task_that_the_template_does_not_fit_is_refused_alone(
    stage: Stage, client: InternalClient
) -> None:
    stage.clauses = [clause(b"", b"*", b"{host}")]
    held = fill_flight_in_lanes(stage, client)
    bad = [
        client.submit(b"none", name=f"bad-{number}", wait_for_unknown=bool(number % 2))
        for number in range(8)  # each in its own message
    ]
    client.submit(b'{"host":"h"}', name="good")
    for each in held:
        stage.reply(each, Q.OK)
    good = stage.receive()
    assert (names(good), [*good.batch.lane]) == (["good"], [b"h"])
    text = "the lane of service default is '{host}', but the task has no field 'host' (it has"
    for future in bad:
        assert reason_of(future).startswith(f"task {future.name} was refused: {text}")
    stage.reply(good, Q.OK)


def fill_flight_in_lanes(stage: Stage, client: InternalClient) -> list[Q]:
    held = []
    for number in range(task_buffer.CREATES_MAX):
        client.submit(b"", name=f"held-{number}", lane="own")
        held.append(stage.receive())
    return held


def test_old_lane_templates_are_requested_again(
    stage: Stage, client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(b"", name="first")
    stage.reply(stage.receive(), Q.OK)
    stage.clauses = [clause(b"", b"*", b"{name}")]
    client.submit(b"", name="second")
    second = stage.receive()
    assert [*second.batch.lane] == []
    stage.reply(second, Q.OK)
    monkeypatch.setattr(lanes, "CACHE_NS", SECOND_NS // 20)
    assert stage.is_quiet()  # for longer than that
    client.submit(b"", name="third")
    assert [*stage.receive().batch.lane] == [b"third"]


def test_broker_without_rules_has_no_lane_templates(stage: Stage, client: InternalClient) -> None:
    stage.clauses = None
    client.submit(b"", name="a")
    assert [*stage.receive().batch.lane] == []
