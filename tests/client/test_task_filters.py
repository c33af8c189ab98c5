"""The filter box has the grammar of `taskyard list`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.client.task_filters import SORTS, Filter, parse
from taskyard.core.events import Scope
from taskyard.core.states import TaskState
from taskyard.errors import UserError

_STATES = [state.name.lower() for state in TaskState]

texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]))
any_filter = st.builds(
    Filter,
    campaign=texts,
    service=texts,
    lane=texts,
    match=texts,
    reason=texts,
    reason_like=texts,
    worker=texts,
    only=st.lists(st.sampled_from(_STATES), unique=True).map(tuple),
    sort=st.sampled_from(SORTS),
    reverse=st.booleans(),
)


@given(any_filter)
def test_text_of_a_filter_parses_to_an_equal_filter(one: Filter) -> None:
    assert parse(one.text) == one


def test_words_of_the_command_line() -> None:
    found = parse("--campaign 'my thumbs' --failed --only ready fetch --sort duration --reverse")
    assert found == Filter(
        campaign="my thumbs",
        match="fetch",
        only=("failed", "ready"),
        sort="duration",
        reverse=True,
    )
    assert found.scope == Scope(
        campaign=b"my thumbs",
        states=(TaskState.FAILED, TaskState.READY),
        match=b"fetch",
    )


def test_value_after_an_equals_sign_may_be_empty() -> None:
    assert parse("--lane=") == Filter(lane="")


def test_options_of_the_page_have_no_scope() -> None:
    assert parse("--reason refused").scope is None
    assert parse("--reason-like 'row #'").scope is None
    assert parse("--worker local-1").scope is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--bogus x", "unknown option --bogus"),
        ("--only gone", "unknown state 'gone'"),
        ("--sort colour", "unknown order 'colour'"),
        ("--lane", "--lane needs a value"),
        ("--lane a --lane b", "takes one value"),
        ("one two", "takes one value"),
        ("'open", "no closing quotation"),
    ],
)
def test_malformed_filter_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse(text)
