"""Names belong to campaigns: the core's lookups against a naive model of pairs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core import identity
from taskyard.core.effects import (
    Accepted,
    Refused,
    TaskPage,
)
from taskyard.core.events import (
    DuplicatePolicy,
    ListRequested,
    Scope,
    SubmitRequested,
    TasksReturned,
    UnknownPolicy,
)
from taskyard.core.model import Refusal, Submission
from taskyard.core.records import Submitted
from taskyard.core.states import TaskState
from taskyard.journal.state_check import ledger_fingerprint
from tests.core.kit import Yard
from tests.kit.snapshots import reopened

READY, DONE, CANCELLED = TaskState.READY, TaskState.DONE, TaskState.CANCELLED


def test_spelling_and_split_are_inverse_for_text_and_bytes() -> None:
    assert identity.spelling("nightly", "a/b") == "nightly/a/b"
    assert identity.spelling(b"", b"a/b") == b"a/b"
    assert identity.split("nightly/a/b", "nightly") == "a/b"
    assert identity.split(b"a/b", b"") == b"a/b"
    assert identity.split(b"a", b"old") == b"a"


# The same names in several campaigns.


def after_of(yard: Yard) -> list[list[bytes]] | None:
    (record,) = yard.records
    assert isinstance(record, Submitted)
    return record.submission.after


def test_same_names_in_two_campaigns_are_different_tasks() -> None:
    yard = Yard()
    for campaign in (b"mon", b"tue"):
        replies = yard.submit(b"a", b"b", after=[[], [b"a"]], campaign=campaign)
        assert replies == [Accepted(b"client", 0, new=2)]
        assert after_of(yard) == [[], [campaign + b"/a"]]
    assert sorted(yard.scheduler.ledger.tasks) == [b"mon/a", b"mon/b", b"tue/a", b"tue/b"]
    again = yard.submit(b"a", b"b", after=[[], [b"a"]], campaign=b"tue")
    assert again == [Accepted(b"client", 0, new=0, existing=2)]


def test_name_in_after_is_of_its_own_campaign_then_of_none_then_split() -> None:
    yard = Yard()
    yard.submit(b"x", b"y", b"other/z")
    yard.submit(b"x", campaign=b"own")
    yard.submit(b"x", b"w", campaign=b"far")
    yard.submit(b"t", after=[[b"x", b"y", b"other/z", b"far/w"]], campaign=b"own")
    assert after_of(yard) == [[b"own/x", b"y", b"other/z", b"far/w"]]


def test_name_that_is_only_in_another_campaign_is_not_known() -> None:
    yard = Yard()
    yard.submit(b"x", campaign=b"far")
    (refused,) = yard.submit(b"t", after=[[b"x"]], campaign=b"own")
    assert isinstance(refused, Refused)
    assert refused.text.startswith("unknown predecessor x ")


def test_unknown_name_that_is_waited_for_is_of_its_own_campaign() -> None:
    yard = Yard()
    yard.submit(b"x", campaign=b"far")
    how: dict[str, Any] = {"unknown": UnknownPolicy.WAIT, "campaign": b"own"}
    yard.submit(b"t", after=[[b"later", b"far/later"]], **how)
    assert after_of(yard) == [[b"own/later", b"far/later"]]
    yard.submit(b"later", campaign=b"else")
    assert yard.scheduler.ledger.awaited.tasks.keys() == {b"own/later", b"far/later"}
    yard.submit(b"later", campaign=b"own")
    yard.submit(b"later", campaign=b"far")
    assert yard.scheduler.ledger.awaited.tasks == {}
    assert yard.scheduler.ledger.awaited.keys_by_name == {}


def test_unknown_name_that_is_waited_for_may_come_outside_any_campaign() -> None:
    yard = Yard()
    how: dict[str, Any] = {"unknown": UnknownPolicy.WAIT, "after": [[b"later"]]}
    yard.submit(b"t", campaign=b"own", **how)
    yard.submit(b"known", campaign=b"own")
    yard.submit(b"u", campaign=b"other", unknown=UnknownPolicy.WAIT, after=[[b"own/later"]])
    yard.submit(b"later")
    assert yard[b"later"].dependents == [yard[b"own/t"]]
    assert yard.scheduler.ledger.awaited.tasks == {b"own/later": [yard[b"other/u"]]}
    yard.submit(b"later", campaign=b"own")
    assert yard[b"own/later"].dependents == [yard[b"other/u"]]


def test_unknown_name_is_not_waited_for_after_a_restart_if_only_ended_tasks_did() -> None:
    yard = Yard()
    how: dict[str, Any] = {"unknown": UnknownPolicy.WAIT, "after": [[b"later"]]}
    yard.submit(b"t", campaign=b"own", **how)
    yard.cancel(b"own/t")
    restored = reopened(yard.scheduler.ledger)
    assert restored.awaited.tasks == {}
    assert ledger_fingerprint(restored) == ledger_fingerprint(yard.scheduler.ledger)


def test_unknown_name_of_a_campaign_that_comes_later_may_be_waited_for() -> None:
    yard = Yard()
    yard.submit(b"t", campaign=b"own", unknown=UnknownPolicy.WAIT, after=[[b"far/x"]])
    restored = reopened(yard.scheduler.ledger)
    assert (
        restored.awaited.keys_by_name
        == yard.scheduler.ledger.awaited.keys_by_name
        == {b"far/x": {b"own/far/x": None}}
    )
    yard.submit(b"x", campaign=b"far")
    assert yard[b"far/x"].dependents == [yard[b"own/t"]]


def test_cycle_through_a_name_that_is_waited_for_is_refused() -> None:
    yard = Yard()
    yard.submit(b"t", campaign=b"own", unknown=UnknownPolicy.WAIT, after=[[b"later"]])
    (refused,) = yard.submit(b"later", after=[[b"own/t"]])
    assert isinstance(refused, Refused)
    assert refused.refusal is Refusal.CYCLE


def test_name_in_after_never_means_a_task_that_only_looks_alike() -> None:
    yard = Yard()
    yard.submit(b"own/x")
    (refused,) = yard.submit(b"t", after=[[b"x"]], campaign=b"own", unknown=UnknownPolicy.WAIT)
    assert isinstance(refused, Refused)
    assert refused.text == (
        "predecessor own/x: the name is that of a task outside any campaign (give one of them "
        "another name)"
    )
    assert yard.records == []


@pytest.mark.parametrize("repeat", DuplicatePolicy)
def test_full_name_of_another_task_is_refused_both_ways(repeat: DuplicatePolicy) -> None:
    yard = Yard()
    yard.submit(b"b", campaign=b"a", payloads=[b"same"])
    (refused,) = yard.submit(b"a/b", payloads=[b"same"], repeat=repeat)
    assert isinstance(refused, Refused)
    assert refused.text.startswith("task a/b: the name is that of task b of campaign a")
    yard.submit(b"c/d", payloads=[b"same"])
    (refused,) = yard.submit(b"d", campaign=b"c", payloads=[b"same"], repeat=repeat)
    assert isinstance(refused, Refused)
    assert refused.text.startswith("task c/d: the name is that of a task outside any campaign")
    yard.cancel(b"a/b")
    (refused,) = yard.submit(b"a/b", payloads=[b"same"], repeat=repeat)
    assert isinstance(refused, Refused)


def test_partial_submission_loses_only_what_is_another_task() -> None:
    yard = Yard()
    yard.submit(b"b", campaign=b"a")
    asked = SubmitRequested(
        *(0, b"client", Submission([b"a/b", b"c"]), 0, UnknownPolicy.DONE, DuplicatePolicy.EXTEND),
        partial=True,
    )
    assert yard.handle(asked) == [Accepted(b"client", 0, 1, 0, 1)]
    assert sorted(yard.scheduler.ledger.tasks) == [b"a/b", b"c"]


def test_returned_task_waits_for_tasks_of_its_own_campaign() -> None:
    yard = Yard()
    yard.join(b"w")
    yard.submit(b"t", campaign=b"own")
    yard.take(b"w")
    yard.submit(b"x", campaign=b"own")
    yard.submit(b"x")
    yard.handle(TasksReturned(0, b"w", [b"own/t"], [[b"x"]]))
    assert yard[b"own/x"].dependents is yard[b"own/t"]


def test_name_is_listed_in_every_campaign() -> None:
    yard = Yard()
    yard.submit(b"x")
    yard.submit(b"x", b"y", campaign=b"mon")
    yard.submit(b"x", campaign=b"tue")
    scope = Scope(names=(b"x",), any_campaign=True)
    (listed,) = yard.handle(ListRequested(0, b"client", scope))
    assert isinstance(listed, TaskPage)
    assert [view.name for view in listed.views] == [b"tue/x", b"mon/x", b"x"]


# The naive model: pairs.

NAMES = (b"a", b"b", b"a/b", b"b/a", b"a/a/b")
CAMPAIGNS = (b"", b"a", b"b", b"c")


class Pairs:
    """Tasks as pairs of campaign and name, with naive lookups."""

    def __init__(self) -> None:
        self.pairs: set[tuple[bytes, bytes]] = set()

    def knows(self, campaign: bytes) -> bool:
        return any(existing == campaign for existing, _ in self.pairs)

    def find(self, name: bytes) -> tuple[bytes, bytes] | None:
        if (b"", name) in self.pairs:
            return b"", name
        campaign, _, rest = name.partition(b"/")
        return (campaign, rest) if campaign and (campaign, rest) in self.pairs else None

    def before(self, campaign: bytes, name: bytes) -> tuple[bytes, bytes] | None:
        return (campaign, name) if (campaign, name) in self.pairs else self.find(name)

    def may_create(self, campaign: bytes, name: bytes) -> bool:
        spelled = b"/".join(filter(None, (campaign, name)))
        others = self.pairs - {(campaign, name)}
        return spelled not in [b"/".join(filter(None, pair)) for pair in others]


STEPS = st.lists(
    st.tuples(st.sampled_from(CAMPAIGNS), st.sampled_from(NAMES), st.sampled_from((b"", *NAMES))),
    max_size=12,
)


@given(STEPS)
def test_core_finds_what_a_naive_model_of_pairs_finds(
    steps: list[tuple[bytes, bytes, bytes]],
) -> None:
    yard, model = Yard(), Pairs()
    for campaign, name, before in steps:
        if (campaign, name) in model.pairs or before == name:
            continue  # a known task's `after` is not looked at, and its own name is a cycle
        expected = model.before(campaign, before) if before else None
        after = [[before]] if before else None
        (reply, *_) = yard.submit(name, after=after, campaign=campaign, payloads=[b""])
        sound = model.may_create(campaign, name) and (not before or expected is not None)
        assert isinstance(reply, Accepted if sound else Refused)
        if sound:
            model.pairs.add((campaign, name))
            assert after_of(yard) == (expected and [[identity.spelling(*expected)]])
        for one in (*NAMES, *(identity.spelling(*pair) for pair in model.pairs)):
            found, meant = yard.scheduler.ledger.tasks.get(one), model.find(one)
            pair = found and (
                found.terms.campaign,
                identity.split(found.name, found.terms.campaign),
            )
            assert pair == meant


def test_part_of_a_name_is_searched_in_the_given_campaign() -> None:
    assert identity.matches(b"thumbs/a", b"b", None)
    assert not identity.matches(b"thumbs/a", b"b", b"thumbs")
    assert identity.matches(b"thumbs/ab", b"b", b"thumbs")
    assert identity.matches(b"bees", b"b", b"thumbs")
