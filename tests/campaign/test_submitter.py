"""Batches are submitted in order, one ahead, and counted. A refusal ends it."""

import threading
from collections.abc import Iterable, Iterator, Sequence

import pytest

from taskyard.campaign.submitter import BatchSubmitter, SubmitCounts, problem_of
from taskyard.core.events import UnknownPolicy
from taskyard.core.model import Submission, Terms
from taskyard.errors import NoBroker, Refused, TaskProblem

#: Tasks at fault that a reply lists.
LISTED_MAX = 2


class FakeClient:
    """Records requests. Refuses tasks called "bad…", and has tasks called "old…"."""

    def __init__(self, templates: dict[str, str] | None = None) -> None:
        self.templates = templates or {}
        self.asked: list[list[str]] = []
        self.created: list[tuple[list[bytes], UnknownPolicy, bool]] = []
        #: `create` waits for the first, and sets the second when it goes on.
        self.may_answer, self.has_answered = threading.Event(), threading.Event()
        self.may_answer.set()

    def lane_templates(self, services: Iterable[str]) -> dict[str, str]:
        self.asked.append([*services])
        return self.templates

    def create(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        *,
        after_campaigns: Sequence[str] = (),
        check_only: bool = False,
        restart: bool = False,
    ) -> int:
        assert not after_campaigns
        assert not restart
        self.created.append((submission.names, unknown, check_only))
        self.may_answer.wait(20)
        self.has_answered.set()
        bad = [name.decode() for name in submission.names if name.startswith(b"bad")]
        problems = [TaskProblem(f"c/{name}", "conflict", f"task {name} is bad") for name in bad]
        if problems:
            first = tuple(problems[:LISTED_MAX])
            raise Refused(first[0].text, "conflict", tuple(one.name for one in first), first)
        return sum(not name.startswith(b"old") for name in submission.names)


def batch(*names: str, service: bytes = b"s", payload: bytes = b"") -> Submission:
    return Submission(
        names=[name.encode() for name in names],
        payloads=[payload],
        terms=[Terms(service=service, campaign=b"c")],
    )


def test_new_and_existing_tasks_are_counted_in_order() -> None:
    client, seen = FakeClient(), list[tuple[int, int]]()
    submitter = BatchSubmitter(client, UnknownPolicy.WAIT)
    counts = submitter.submit(
        [batch("a", "b"), batch("old"), batch("c", "old2")],
        lambda counts: seen.append((counts.new, counts.existing)),
    )
    assert counts == SubmitCounts(3, 2)
    assert seen == [(2, 0), (2, 1), (3, 2)]
    assert [names for names, *_ in client.created] == [[b"a", b"b"], [b"old"], [b"c", b"old2"]]
    assert {created[1:] for created in client.created} == {(UnknownPolicy.WAIT, False)}


def test_batch_is_built_while_the_one_before_it_is_in_flight() -> None:
    client = FakeClient()
    client.may_answer.clear()

    def batches() -> Iterator[Submission]:
        yield batch("a")
        client.may_answer.set()  # the first is only answered because the second is built now
        yield batch("b")

    assert BatchSubmitter(client).submit(batches()) == SubmitCounts(2, 0)


def test_nothing_is_sent_after_a_refusal() -> None:
    client = FakeClient()
    submitter = BatchSubmitter(client)
    with pytest.raises(Refused, match="task bad is bad") as refused:
        submitter.submit([batch("a", "old"), batch("b", "bad"), batch("c")])
    assert refused.value.names == ("c/bad",)
    assert [names for names, *_ in client.created] == [[b"a", b"old"], [b"b", b"bad"]]
    assert submitter.counts == SubmitCounts(1, 1)
    assert submitter.counts.partial_note() == "1 task before it was submitted"


def test_interrupt_does_not_wait_for_a_broker_that_does_not_answer() -> None:
    client = FakeClient()
    client.may_answer.clear()

    def batches() -> Iterator[Submission]:
        yield batch("a")
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            BatchSubmitter(client).submit(batches())
        assert not client.has_answered.is_set()
    finally:
        client.may_answer.set()


def test_lane_templates_are_requested_once_for_each_service() -> None:
    client = FakeClient({"mail": "{host}"})
    submitter = BatchSubmitter(client)
    mail = batch("a", service=b"mail", payload=b'{"host": "h"}')
    submitter.submit(
        [batch("x"), mail, batch("y"), batch("b", service=b"mail", payload=b'{"host":1}')]
    )
    assert client.asked == [["s"], ["mail"]]
    assert mail.lanes == [b"h"]


def test_task_that_its_lane_template_does_not_fit_is_not_sent() -> None:
    client = FakeClient({"s": "{host}"})
    submitter = BatchSubmitter(client)
    with pytest.raises(
        Refused, match=r"task c/a: the lane of service s is '\{host\}', but"
    ) as refused:
        submitter.create(batch("a"))
    assert (refused.value.code, refused.value.names) == ("bad-name", ("c/a",))
    assert [one.name for one in submitter.lane_problems(batch("a", "b"))] == ["c/a", "c/b"]
    assert client.created == []


def test_check_changes_nothing_and_accepts_unknown_dependencies() -> None:
    client = FakeClient()
    assert BatchSubmitter(client).check(batch("a", "old")) == 1
    assert client.created == [([b"a", b"old"], UnknownPolicy.WAIT, True)]


def test_each_task_at_fault_has_its_own_sentence() -> None:
    client = FakeClient()
    problems = BatchSubmitter(client).problems(batch("a", "bad1", "bad2", "bad3"))
    assert problems == [
        TaskProblem(f"c/bad{number}", "conflict", f"task bad{number} is bad")
        for number in (1, 2, 3)
    ]
    assert [names for names, *_ in client.created][1:] == [[b"a", b"bad3"], [b"a"]]
    assert all(check_only for _, _, check_only in client.created)
    assert BatchSubmitter(client).problems(batch("a")) == []


def test_problem_without_a_name_is_that_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise Refused("the broker is full", "full")

    client = FakeClient()
    monkeypatch.setattr(client, "create", refuse)
    full = TaskProblem("", "full", "the broker is full")
    assert BatchSubmitter(client).problems(batch("a", "b")) == [full]
    assert problem_of(NoBroker("gone")) == TaskProblem("", "", "gone")
