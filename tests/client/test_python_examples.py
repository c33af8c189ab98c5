"""The ported examples: each prints what it should, and its lines are counted right."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.kit.processes import PATIENCE_SECONDS, environment, run

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES: Final = Path(__file__).parents[2] / "examples" / "python"

PRIMES: Final = """\
112272535095293 is prime: True
115797848077099 is prime: True
1099726899285419 is prime: False
"""

#: What each example prints.
PRINTED: Final = {
    "asynchronous": "11\n",
    "fibonacci": "5\n",
    "one_worker": "25\n",
    "power": f"{pow(323, 1235)}\n",
    "primes": PRIMES,
    "scatter": "[1000, 3000, 1000, 4000, 2000]\n",
    "scores": "0\n",
    "squares": "-285\n",
}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a broker and a worker in a directory."""
    directory = tmp_path_factory.mktemp("yard")
    up = ("up", "--detach", "--page", "none", "-j", "1", "--allow-pickle")
    assert run(directory, *up)[0] == 0
    yield directory
    assert run(directory, "down")[0] == 0


def printed_by(directory: Path, name: str, *arguments: str) -> str:
    """Run an example to its end. Return what it prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_its_result(name: str, yard: Path) -> None:
    assert printed_by(yard, name) == PRINTED[name]


def test_example_copies_files(tmp_path: Path) -> None:
    for number in range(1, 5):
        (tmp_path / f"src{number}.txt").write_text(str(number))
    assert printed_by(tmp_path, "copies") == ""
    copied = [(tmp_path / f"dest{number}.txt").read_text() for number in range(1, 5)]
    assert copied == ["1", "2", "3", "4"]


def test_example_reports_pages_and_failures(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("hello")
    page, missing = (tmp_path / "page").as_uri(), (tmp_path / "missing").as_uri()
    first, second = sorted(printed_by(tmp_path, "pages", page, missing).splitlines())
    assert first.startswith(f"{missing}: <urlopen error [Errno 2] No such file")
    assert second == f"{page}: 5 bytes"


def test_lines_of_examples_are_those_of_the_table() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\.py\]\(\w+\.py\) \|.+\| (\d+) \| (\d+) \|.+\|$",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
    counted = {path.stem: lines_of(path) for path in EXAMPLES.glob("*.py")}
    assert {name: int(here) for name, _, here in rows} == counted
    assert all(int(here) <= int(there) for _, there, here in rows)


def lines_of(path: Path) -> int:
    """Count the lines with code: without the docstring, comments and blank lines."""
    text = path.read_text()
    docstring = ast.parse(text).body[0].end_lineno or 0
    lines = text.splitlines()[docstring:]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)
