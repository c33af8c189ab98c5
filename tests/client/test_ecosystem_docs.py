"""docs/ecosystem.md: its programs print what it shows. They run in this process."""

from __future__ import annotations

from typing import Any

import pytest

from taskyard import testing
from tests import test_docs_commands as pages

PAGE = "docs/ecosystem.md"

#: Before each program, and before its output.
NOTE = "run by tests/client/test_ecosystem_docs.py"


def programs() -> list[tuple[str, str]]:
    """Return the programs of the page with their outputs."""
    found = [block for block in pages.blocks(PAGE) if block.note == NOTE]
    assert [block.language for block in found] == ["python", "text"] * (len(found) // 2)
    return [(code.body, text.body) for code, text in zip(found[::2], found[1::2], strict=True)]


def run(code: str) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(code, space)  # noqa: S102  # a program of the page


@pytest.mark.parametrize("number", range(4))
def test_program_prints_what_the_page_shows(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = programs()[number]
    with testing.broker() as broker, broker.worker(), broker.client() as client:
        monkeypatch.setenv("TASKYARD_BROKER", broker.endpoint)
        run(code)
        assert capsys.readouterr().out == text
        if "campaign=" in code:
            run(code)
            assert capsys.readouterr().out == text
            tasks = [*client.tasks()]
            assert (len(tasks), {task["attempt"] for task in tasks}) == (18, {1})


def test_all_programs_are_run() -> None:
    assert len(programs()) == 4
    pages.test_every_block_is_run_saved_or_compared(PAGE)
    pages.test_every_note_is_understood(PAGE)
