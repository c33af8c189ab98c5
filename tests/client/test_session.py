"""The courier: what it does when the broker, the caller or the machine is at its worst.

Most of it is seen from outside, by a broker that the test plays: it answers when and as it is told.
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
from taskyard.client import outbox, watches
from taskyard.client.client import Client
from taskyard.client.futures import Future
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.rules import LaneOptions, Rule
from taskyard.core.states import TaskState
from taskyard.errors import ClientClosed, NoBroker, TimedOut, UserError
from taskyard.net import sockets
from taskyard.net.poller import Poller
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
        #: What is told to who asks where tasks are to go; None: that is no question.
        self.clauses: list[Rule] | None = []
        self._route = b""
        self._poller = Poller()
        self._poller.add(self.wire)

    def hear(self) -> Q:
        """The next request; signs of life are given meanwhile, and rules."""
        while True:
            while (frames := self.wire.receive()) is None:
                assert self._poller.wait(int(PATIENCE_SECONDS * SECOND_NS)), "nothing was asked"
            self._route = frames[0]
            query = Q.FromString(frames[-1])
            if query.type == Q.Rules:
                self._tell_rules(query)
            elif query.type == Q.OK:
                self.say(query, Q.OK)
            else:
                return query

    def _tell_rules(self, asked: Q) -> None:
        if self.clauses is None:
            self.say(asked, Q.Error)
        else:
            rules = {"clause": [*map(encode_rule, self.clauses)], "version": 1}
            self.say(asked, Q.Rules, rules=rules)

    def is_quiet(self) -> bool:
        """Nothing is asked for a while, which is shorter than until a sign of life is wanted."""
        return self.wire.receive() is None and not self._poller.wait(SECOND_NS // 10)

    def say(self, asked: Q, kind: Q.Type, reason: bytes = b"", **more: Any) -> None:
        answer = Q(type=kind, request=asked.request, broker=self.process, reason=reason, **more)
        assert self.wire.send([self._route, b"", answer.SerializeToString()])

    def settle(self, asked: Q, *names: str, left: int) -> None:
        columns = {
            "name": [name.encode() for name in names],
            "standing": [TaskState.DONE] * len(names),
            "text": [b""] * len(names),
        }
        self.say(asked, Q.Watch, batch=columns, n=left)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    played = Stage(tmp_path / "broker.sock")
    with contextlib.closing(played.wire):
        yield played


@pytest.fixture
def client(stage: Stage) -> Iterator[Client]:
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Client, stage.wire.endpoint)
        stage.say(stage.hear(), Q.Stats, document=b"{}")
        opened = opening.result(PATIENCE_SECONDS)
    yield opened
    opened.close(0)


def names(query: Q) -> list[str]:
    return [name.decode() for name in query.batch.name]


def reason_of(future: Future) -> str:
    return str(future.exception(PATIENCE_SECONDS))


# Order.


def test_refusal_does_not_count_while_an_earlier_submission_is_open(
    stage: Stage, client: Client
) -> None:
    client.submit(b"", name="first")
    first = stage.hear()
    behind = client.submit(b"", name="behind", after=["first"])
    stage.say(stage.hear(), Q.Error, b"predecessor first is not known")
    lost = client.submit(b"", name="later")
    assert stage.is_quiet()
    stage.say(first, Q.OK)
    again = stage.hear()
    assert names(again) == ["behind"]
    stage.say(again, Q.OK)
    later = stage.hear()
    assert names(later) == ["later"]
    assert not behind.done()
    stage.say(later, Q.Error, b"no")
    assert reason_of(lost) == "task later was refused: no"


def hold_up(stage: Stage, client: Client) -> list[Q]:
    """As many submissions as may be under way; what is submitted now is gathered."""
    held = []
    for number in range(outbox.CREATES_MAX):
        client.submit(b"", name=f"held-{number}")
        held.append(stage.hear())
    return held


def test_refusal_does_not_count_while_an_earlier_submission_is_taken_apart(
    stage: Stage, client: Client
) -> None:
    held = hold_up(stage, client)
    for name in "ab":
        client.submit(b"", name=name)
    behind = client.submit(b"", name="behind", after=["b"], wait_for_unknown=True)
    for each in held:
        stage.say(each, Q.OK)
    both, last = stage.hear(), stage.hear()
    assert (names(both), names(last)) == (["a", "b"], ["behind"])
    stage.say(both, Q.Error, b"one of them is bad")
    stage.say(last, Q.Error, b"predecessor b is not known")
    for expected in (["a"], ["b"], ["behind"]):
        part = stage.hear()
        assert names(part) == expected
        stage.say(part, Q.OK)
    assert not behind.done()


def test_refused_batch_is_tried_in_parts_in_the_order_of_submission(
    stage: Stage, client: Client
) -> None:
    held = hold_up(stage, client)
    futures = [client.submit(b"", name=name) for name in "abcd"]
    for each in held:
        stage.say(each, Q.OK)
    batch = stage.hear()
    assert names(batch) == ["a", "b", "c", "d"]
    stage.say(batch, Q.Error, b"one is bad")
    tried = []
    for is_good in (True, False, False, True):
        part = stage.hear()
        tried.append("".join(names(part)))
        stage.say(part, Q.OK if is_good else Q.Error, b"" if is_good else b"bad")
    assert tried == ["ab", "cd", "c", "d"]
    assert reason_of(futures[2]) == "task c was refused: bad"
    assert [future.done() for future in futures] == [False, False, True, False]


# What can't be sent.


def test_text_that_is_no_unicode_is_told_where_it_was_written(client: Client) -> None:
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


def test_question_that_can_not_be_built_fails_alone(stage: Stage, client: Client) -> None:
    def fail(_number: int) -> NoReturn:
        raise ValueError("no such question")

    answer: AnyFuture[Any] = AnyFuture()
    client._session.request(fail, answer)  # noqa: SLF001
    with pytest.raises(ValueError, match="no such question"):
        answer.result(PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client.status)
        stage.say(stage.hear(), Q.Stats, document=b"{}")
        assert status.result(PATIENCE_SECONDS) == {}


def test_task_that_can_not_be_built_is_refused_and_the_others_are_taken(
    stage: Stage, client: Client
) -> None:
    held = hold_up(stage, client)
    good = client.submit(b"", name="good")
    bad = client.submit_encoded("bad", [None], Terms())  # type: ignore[arg-type]
    for each in held:
        stage.say(each, Q.OK)
    taken = stage.hear()
    assert names(taken) == ["good"]
    stage.say(taken, Q.OK)
    assert reason_of(bad).startswith("task bad was refused: ")
    assert not good.done()


def test_task_that_fits_no_message_is_told_where_it_was_written(client: Client) -> None:
    with pytest.raises(UserError, match="task 'big': a payload of 16,777,217 bytes is too large"):
        client.submit(bytes(PAYLOAD_BYTES_MAX + 1), name="big")
    many = ["n" * 1000 + str(number) for number in range(9_000)]
    with pytest.raises(UserError, match=r"task 'join': names of .* are too much"):
        client.submit_encoded("join", b"", Terms(), after=many)


def test_submission_that_fits_no_message_is_told_to_who_made_it(client: Client) -> None:
    payloads = [bytes(PAYLOAD_BYTES_MAX - 1)] * 3
    with pytest.raises(UserError, match="limit is 33,554,432"):
        client.create(Submission([b"a", b"b", b"c"], payloads, [Terms()]))


def test_names_count_where_batches_are_cut(
    stage: Stage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "BYTES_PER_CREATE_MAX", 10_000)
    held = hold_up(stage, client)
    for name in ("a", "b"):
        client.submit_encoded(name, b"", Terms(), after=["n" * 500] * 12)
    for each in held:
        stage.say(each, Q.OK)
    parts = [stage.hear(), stage.hear()]
    assert [names(part) for part in parts] == [["a"], ["b"]]
    for part in parts:
        stage.say(part, Q.OK)


# Waiting, and its end.


def test_timeout_is_kept_while_nobody_answers(
    stage: Stage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.client.requests.GRACE_SECONDS", 0.05)
    future = client.submit(b"", name="a")
    stage.say(stage.hear(), Q.OK)
    with pytest.raises(TimedOut, match=r"1 tasks: the broker did not answer within 0.05 s"):
        client.wait_names(["a"], 0.05)
    with pytest.raises(TimedOut, match="campaign c: the broker did not answer"):
        client.wait_campaign("c", 0.05)
    client.timeout = 0.05
    with pytest.raises(TimedOut, match="the broker did not answer"):
        future.cancel()
    assert not future.done()


def test_question_that_was_given_up_is_not_asked_again(
    stage: Stage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.client.requests.GRACE_SECONDS", 0.0)
    with pytest.raises(TimedOut):
        client.wait_campaign("given-up", 0.05)
    assert stage.hear().scope.campaign == b"given-up"
    stage.process = 2  # whatever is open is sent again
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client.status)
        asked = stage.hear()
        assert asked.type == Q.Stats
        stage.say(asked, Q.Stats, document=b"{}")
        status.result(PATIENCE_SECONDS)
    assert stage.is_quiet()


class Overtaken(deque[Any]):
    """Somebody closes the client just before something is put in."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.closer = threading.Thread(target=client.close)

    def append(self, item: object) -> None:
        self.closer.start()
        self.closer.join(0.1)
        super().append(item)


def test_task_handed_over_while_the_client_is_closed_is_still_taken(
    stage: Stage, client: Client
) -> None:
    parcels = client._session._outbox.tasks = Overtaken(client)  # noqa: SLF001
    future = client.submit(b"", name="late")
    stage.say(stage.hear(), Q.OK)
    parcels.closer.join(PATIENCE_SECONDS)
    with pytest.raises(ClientClosed):
        future.result(PATIENCE_SECONDS)


def test_question_put_while_the_client_is_closed_is_still_asked(
    stage: Stage, client: Client
) -> None:
    questions = client._session._requests.waiting = Overtaken(client)  # noqa: SLF001
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(client.status)
        asked = stage.hear()
        with contextlib.suppress(AssertionError):  # it may have hung up already
            stage.say(asked, Q.Stats, document=b"{}")
        error = status.exception(PATIENCE_SECONDS)
    assert error is None or isinstance(error, ClientClosed)
    questions.closer.join(PATIENCE_SECONDS)


def test_failure_to_connect_is_raised_where_the_client_is_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **_named: object) -> NoReturn:
        raise OSError("too many open files")

    monkeypatch.setattr(sockets, "connect", fail)
    with pytest.raises(NoBroker, match=r"can't connect to ipc://.*: too many open files"):
        Client(stage.wire.endpoint)


def test_closed_client_leaves_no_descriptors(client: Client) -> None:
    waker = client._session._waker  # noqa: SLF001
    client.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        waker.wake()
    client.close()


# Callbacks.


def test_callback_that_waits_for_the_client_is_told_so(stage: Stage, client: Client) -> None:
    future = client.submit(b"", name="a")
    raised: AnyFuture[object] = AnyFuture()

    def look(settled: AnyFuture[Any]) -> None:
        assert isinstance(settled, Future)
        try:
            raised.set_result(settled.state)
        except UserError as error:
            raised.set_result(error)

    future.add_done_callback(look)
    asked = stage.hear()
    stage.say(asked, Q.OK)
    stage.settle(asked, "a", left=0)
    assert "a callback must not wait for the client" in str(raised.result(PATIENCE_SECONDS))


def test_callback_may_submit_however_full_the_outbox_is_and_close(
    stage: Stage, client: Client
) -> None:
    client.submit(b"", name="before")
    stage.say(stage.hear(), Q.OK)  # by now it knows the rules
    client._session._outbox.tasks_max = 0  # noqa: SLF001
    following: AnyFuture[Future] = AnyFuture()

    def go_on(_settled: object) -> None:
        following.set_result(client.submit(b"", name="next"))
        client.submit(b"", name="next-but-one")
        client.close()

    future = client.submit(b"", name="a")
    future.add_done_callback(go_on)
    asked = stage.hear()
    stage.say(asked, Q.OK)
    stage.settle(asked, "a", left=0)
    taken = stage.hear()
    assert names(taken) == ["next", "next-but-one"]
    stage.say(taken, Q.OK)
    with pytest.raises(ClientClosed):
        following.result(PATIENCE_SECONDS).result(PATIENCE_SECONDS)


# Watches.


def test_watch_is_asked_for_again_without_what_is_settled(stage: Stage, client: Client) -> None:
    held = hold_up(stage, client)
    futures = [client.submit(b"payload", name=name) for name in "abcd"]
    for each in held:
        stage.say(each, Q.OK)
    asked = stage.hear()
    stage.say(asked, Q.OK)
    stage.settle(asked, "a", "c", left=2)
    assert futures[2].result(PATIENCE_SECONDS) == b""
    again = {}
    with ThreadPoolExecutor(1) as pool:
        stage.process = 2  # what is open is sent again, to the broker that is there now
        status = pool.submit(client.status)
        stage.say(stage.hear(), Q.Stats, document=b"{}")
        status.result(PATIENCE_SECONDS)
    while asked.request not in again:
        query = stage.hear()
        again[query.request] = query
    assert again[asked.request].type == Q.Watch
    assert names(again[asked.request]) == ["b", "d"]


def test_late_tasks_get_a_watch_of_their_own_when_there_are_enough(
    stage: Stage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "STREAMS_MAX", 1)
    monkeypatch.setattr(watches, "POLLED_STREAM_TASKS_MIN", 3)

    def submit(name: str) -> None:
        client.submit(b"", name=name)
        stage.say(stage.hear(), Q.OK)

    submit("a")
    submit("b")
    asked = stage.hear()
    assert (names(asked), asked.stream) == (["b"], False)
    submit("c")
    submit("d")
    stage.say(asked, Q.Watch, n=1)
    asked = stage.hear()
    assert (sorted(names(asked)), asked.stream) == (["b", "c", "d"], True)


# Lanes by the settings of a service.


def clause(name: bytes, match: bytes, template: bytes = b"") -> Rule:
    return Rule(name, match, LaneOptions(lane_template=template))


def test_service_says_the_lane_of_tasks_that_give_none(stage: Stage, client: Client) -> None:
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
        asked = stage.hear()
        found |= dict(zip(names(asked), asked.batch.lane, strict=True))
        stage.say(asked, Q.OK)
    assert found == {"mail": b"a.org", "own": b"b", "call": b"call"}


def test_task_that_the_template_does_not_fit_is_refused_and_others_go_on(
    stage: Stage, client: Client
) -> None:
    stage.clauses = [clause(b"", b"*", b"{host}")]
    held = hold_up_in_lanes(stage, client)
    bad = [
        client.submit(b"none", name=f"bad-{number}", wait_for_unknown=bool(number % 2))
        for number in range(8)  # each in a message of its own
    ]
    client.submit(b'{"host":"h"}', name="good")
    for each in held:
        stage.say(each, Q.OK)
    good = stage.hear()
    assert (names(good), [*good.batch.lane]) == (["good"], [b"h"])
    told = "the lane of service default is '{host}', but the task has no field 'host' (it has"
    for future in bad:
        assert reason_of(future).startswith(f"task {future.name} was refused: {told}")
    stage.say(good, Q.OK)


def hold_up_in_lanes(stage: Stage, client: Client) -> list[Q]:
    held = []
    for number in range(outbox.CREATES_MAX):
        client.submit(b"", name=f"held-{number}", lane="own")
        held.append(stage.hear())
    return held


def test_rules_are_asked_for_again_when_they_are_old(
    stage: Stage, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(b"", name="first")
    stage.say(stage.hear(), Q.OK)
    stage.clauses = [clause(b"", b"*", b"{name}")]
    client.submit(b"", name="second")
    second = stage.hear()
    assert [*second.batch.lane] == []
    stage.say(second, Q.OK)
    monkeypatch.setattr(lanes, "CACHE_NS", SECOND_NS // 20)
    assert stage.is_quiet()  # for longer than that
    client.submit(b"", name="third")
    assert [*stage.hear().batch.lane] == [b"third"]


def test_broker_that_knows_no_rules_has_none(stage: Stage, client: Client) -> None:
    stage.clauses = None
    client.submit(b"", name="a")
    assert [*stage.hear().batch.lane] == []
