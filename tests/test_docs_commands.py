"""Run the commands of README.md and the tutorial, block by block, as a reader would.

A page runs from top to bottom in an empty directory:

    ```sh                       is run by a shell, and must exit with 0
    ```text                     is the output of the block of commands before it
    <!-- exits N -->            before a block: its exit code is N
    <!-- file: NAME -->         before a block of any language: it is saved under that name
    <!-- not run: REASON -->    before a block: it is skipped
    <!-- run by TEST -->        before a block: that test runs it, or compares it

A command that runs a saved file with Spark is run with --whole, and its program without.
Values that differ from run to run (times, process ids, generated names) are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = ("README.md", "docs/tutorial.md", "docs/python.md", "docs/lanes.md")

#: The limit for expected output, on any busy machine.
TIMEOUT_SECONDS: Final = 120

#: Blocks of a page that no test runs: each is an unchecked promise.
NOT_RUN_MAX: Final = 2

#: A page of `up` takes two seconds of CPU. `tests/web/test_up_page.py` starts them.
NO_PAGE = {"TASKYARD_BROKER_PAGE": "none"}

#: The import by which a program uses Spark.
SPARK: Final = "from taskyard.spark import "

_BLOCK: Final = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

#: Patterns of output that differs from run to run, and replacements.
_VARYING: Final = (
    (re.compile(r"\b\d+(?:\.\d+)? s\b"), "# s"),
    (re.compile(r"\bprocess \d+"), "process #"),
    (re.compile(r"\b(task|map)-[0-9a-f]{10,16}\b"), r"\1-#"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"), "TIME"),
)

#: Printed on a busy machine: a broker takes long to start, or tasks take long to run.
_BUSY: Final = re.compile(r"waiting for a broker at |campaign \S+: \d+ of \d+ done, ")


class Block(NamedTuple):
    """One fenced block, with the comment right before it."""

    line: int
    note: str
    language: str
    body: str

    @property
    def is_run(self) -> bool:
        return self.language == "sh" and not self.note.startswith(("not run: ", "run by "))

    @property
    def is_run_elsewhere(self) -> bool:
        """Return whether another test runs it, which looks for this very note."""
        test = ROOT / self.note.removeprefix("run by ")
        return self.note.startswith("run by ") and self.note in test.read_text()

    @property
    def exit_code(self) -> int:
        found = re.fullmatch(r"exits (\d+)", self.note)
        return int(found[1]) if found else 0

    @property
    def file(self) -> str:
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else ""


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body"))
        found.append(Block(line, match["note"] or "", match["language"], match["body"]))
    return found


def compared(text: str) -> list[str]:
    """Return the lines of an output, without parts that differ from run to run."""
    for varying, fixed in _VARYING:
        text = varying.sub(fixed, text)
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return [line for line in lines if not _BUSY.match(line)]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """Return a directory like a reader's: a clone that is set up, with an active environment."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    taskyard = f'#!/bin/sh\nexec "{sys.executable}" -m taskyard.cli "$@"\n'
    python = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    for path, script in (
        (tmp_path / "yard", taskyard),
        (binaries / "taskyard", taskyard),
        (binaries / "python", python),
    ):
        path.write_text(script)
        path.chmod(0o755)
    try:
        yield tmp_path
    finally:
        typed(tmp_path, "test ! -e .taskyard/up.pid || taskyard down --grace 1s")


def typed(directory: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Run commands in a shell. Return all their output in one stream."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TASKYARD_")}
    return subprocess.run(
        ["/bin/sh", "-eu", "-c", commands],
        cwd=directory,
        env=own | {"PATH": f"{directory}/.venv/bin:{own['PATH']}", **NO_PAGE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )


def without_spark(found: list[Block]) -> list[Block]:
    """Leave out commands that start Spark, with their output. Each costs 20 s of CPU for a JVM.

    `tests/pipeline/test_map_rows.py` runs these programs in its own session.
    """
    programs = [one.file for one in found if one.file and SPARK in one.body]
    kept, is_left_out = [], False
    for block in found:
        if block.language != "text":
            is_left_out = block.is_run and any(name in block.body for name in programs)
        if not is_left_out:
            kept.append(block)
    return kept


@pytest.mark.parametrize("page", PAGES)
def test_commands_do_what_the_page_says(
    page: str, clone: Path, pytestconfig: pytest.Config
) -> None:
    printed = ""
    found = blocks(page)
    for block in found if pytestconfig.getoption("--whole") else without_spark(found):
        place = f"{page}:{block.line}"
        if block.file:
            (clone / block.file).write_text(block.body)
        elif block.is_run:
            done = typed(clone, block.body)
            printed = done.stdout
            assert done.returncode == block.exit_code, f"{place}: {printed}"
        elif block.language == "text" and not block.is_run_elsewhere:
            assert compared(printed) == compared(block.body), place


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_saved_or_compared(page: str) -> None:
    found = blocks(page)
    assert len(found) == len(re.findall("^```$", (ROOT / page).read_text(), re.MULTILINE))
    used = [one for one in found if one.is_run or one.file or one.is_run_elsewhere]
    idle = [one for one in found if one not in used and one.language != "text"]
    assert all(one.note.startswith("not run: ") for one in idle), [one.line for one in idle]
    assert len(idle) <= NOT_RUN_MAX


@pytest.mark.parametrize("page", PAGES)
def test_every_note_is_understood(page: str) -> None:
    form = re.compile(r"exits \d+|file: [\w.-]+|not run: \w.+|run by tests/[\w/]+\.py")
    notes = re.findall("<!-- (.*?) -->", (ROOT / page).read_text())
    assert [note for note in notes if not form.fullmatch(note)] == []
    assert notes == [block.note for block in blocks(page) if block.note]
