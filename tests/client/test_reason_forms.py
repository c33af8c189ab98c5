"""Reasons that differ in numbers, paths and quoted names have one form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskyard.client.task_filters import form_of


@pytest.mark.parametrize(
    ("reason", "form"),
    [
        ("exit status 1: row 17", "exit status 1: row #"),
        ("exit status 2: row 17", "exit status 2: row #"),
        ("signal 9", "signal 9"),
        ("can't read /data/img4.png: row 4", "can't read /…: row #"),
        ("no such file: ./out/x.csv", "no such file: /…"),
        ("unknown column 'user id' in \"t 1\"", "unknown column '…' in \"…\""),
        ("timed out after 3.25 s", "timed out after # s"),
        ("GET https://example.org/a?b=1 failed", "GET … failed"),
        ("object at 0x7f3a", "object at #"),
        ("key 3f2504e0-4f89-11d3-9a0c-0305e82c3301", "key #"),
        ("and/or fails", "and/or fails"),
        ("defaced facade", "defaced facade"),
        ("", ""),
    ],
)
def test_form_of_a_reason(reason: str, form: str) -> None:
    assert form_of(reason) == form


@settings(max_examples=500)
@given(st.text(st.sampled_from("ab1 9/.'\"`:#…x-"), max_size=400))
def test_form_of_a_form_is_itself(reason: str) -> None:
    form = form_of(reason)
    assert form_of(form) == form
