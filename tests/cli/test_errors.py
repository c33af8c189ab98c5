"""Every error that the command line can print says what to do, and is on the page of errors."""

from __future__ import annotations

import ast
import re
from typing import Final

import pytest

from tests.cli.error_texts import ROOT, collect, page, template

#: What advice looks like: an order, or a command that tells more.
ADVICE: Final = re.compile(
    r"`taskyard |\b(give|say|use|start|see|write|save|leave|mend|ask|submit|open|goes? with|must)\b"
)

#: Texts whose advice stands in one of their values, or that need none; and why.
WITHOUT: Final = {
    "{}: {}": "a place and what is wrong there, from a table of reasons",
    "{}:{}: {}": "the same with a line",
    "{}:1: {}": "the same in the first line",
    "{}: {} ({})": "what the broker says, and what was submitted before it",
    "{}:{}: {} The first: {}": "a bad line, with the first of many",
    "{}: the table {}": "what is wrong with the table, from a list",
}

#: Texts that say what is wrong and leave what to do to the reader. None may be added.
TO_MEND: Final = {
    "task {} has no result, it is {}{}",
    "the broker could not understand the request",
    "{} is not settled after {} s",
    "{}: {} not settled after {} s",
    "only WfCommons can be replayed, and this is {}",
    "there is no dialect {}; the dialects are {}",
    "the dialect {} comes later; this version speaks {}",
    "{} has {}; nothing was submitted",
    "--command {} is no command: {}",
    "{}: has no column {}; {}",
    "{}: makes no command that can be run: {}",
    "argument {} of the call is neither JSON nor one place such as {}",
    "argument {} of the call, {}, is no JSON; a text is written '{}'",
    "`up` (process {}) is not ready after {} s",
    "{} cut short after {} s, to be done again after the next start: {}{}",
    "--agent comes later; this version runs programs and functions",
    "{}:1: has more than {} bytes",
    "{}: can't be read: {}",
    "{}: is no file name",
    "{}:{}: is no whole Parquet file: {}",
    "{}: can't be written: {}",
    '{}: the header has no "name"; it has {}',
    "{}: the header has {} twice",
    "{}:1: has no workflow.specification (schema {}); {}",
    "{}:1: is no WfCommons document: {}",
    "workers and slots are of an executor that starts its own broker",
    "args and kwargs go with a function, given as 'module:function'",
}


def test_page_of_errors_is_made_from_the_source() -> None:
    kept = (ROOT / "docs" / "errors.md").read_text()
    assert page() == kept, "say what to do in it, then: python -m tests.cli.error_texts"


def test_every_error_says_what_to_do() -> None:
    silent = [one for one in collect() if not ADVICE.search(one.text)]
    assert [one for one in silent if one.text not in WITHOUT and one.text not in TO_MEND] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('f"no task is called {name}; give another"', "no task is called {}; give another"),
        ('reason or "nobody knows"', "nobody knows"),
        ("text", ""),
    ],
)
def test_text_is_read_out_of_the_source(code: str, text: str) -> None:
    parsed = ast.parse(code, mode="eval")
    assert template(parsed.body) == text
