"""docs/executor.md: its programs are run, as those of the README and the tutorial are."""

from pathlib import Path

import pytest

from taskyard.calls.pickled import EXCEPTION_BYTES_MAX
from taskyard.core.limits import BLOB_BYTES_MIN
from tests import test_docs_commands as pages

PAGE = "docs/executor.md"

clone = pages.clone


def test_commands_of_the_page_print_what_it_shows(clone: Path, pytestconfig: pytest.Config) -> None:
    pages.test_commands_do_what_the_page_says(PAGE, clone, pytestconfig)


def test_everything_on_it_is_run() -> None:
    pages.test_every_block_is_run_saved_or_compared(PAGE)
    pages.test_every_note_is_understood(PAGE)


def test_limits_are_those_of_the_code() -> None:
    page = (pages.ROOT / PAGE).read_text()
    assert f"from {BLOB_BYTES_MIN >> 10} KiB on they are files" in page
    assert f"more than about {EXCEPTION_BYTES_MAX * 3 // 4 >> 10} KiB" in page
