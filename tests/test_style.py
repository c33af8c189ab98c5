"""The rules of style that the linter does not know."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    ROOT / "yard",
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "tools").rglob("*.py")),
]
CORE = sorted((ROOT / "src" / "taskyard" / "core").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

#: More does not fit a screen.
FUNCTION_LINES_MAX = 50

#: Package indexes and mirrors: an address in a file would tie everybody to one machine's network.
HOST = re.compile(r"files\.pythonhosted|pypi\.org/simple|registry\.npmjs|deb\.debian")
#: Directories of somebody's machine.
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:work|root|home|Users|farm|opt)/")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 1)}"


def test_every_file_opens_with_a_docstring() -> None:
    silent = [path for path in [*SOURCES, *TESTS] if not ast.get_docstring(tree_of(path))]
    assert silent == []


def test_functions_fit_a_screen() -> None:
    assert [found for path in SOURCES for found in long_functions(path)] == []


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{place(path, node)}: {node.name} has {lines} lines"


def test_core_uses_no_sets_because_their_order_is_not_deterministic() -> None:
    assert [found for path in CORE for found in sets_in(path)] == []


def sets_in(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        named = isinstance(node, ast.Name) and node.id in ("set", "frozenset")
        if named or isinstance(node, ast.Set | ast.SetComp):
            yield place(path, node)


def test_core_speaks_the_words_of_the_glossary() -> None:
    forbidden = forbidden_words()
    assert [found for path in CORE for found in words_in(path, forbidden)] == []


def forbidden_words() -> list[str]:
    """The words in backticks in the third column of the glossary's first table, and plurals."""
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    table = [line for line in glossary.splitlines() if line.startswith("| **")]
    words = [word for line in table for word in re.findall(r"`(\w+)`", line.split("|")[3])]
    return words + [word + "s" for word in words] + ["vertices", "proxies"]


def words_in(path: Path, forbidden: list[str]) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        for name in names_of(node):
            for word in words_of(name):
                if word in forbidden:
                    yield f"{place(path, node)}: {word} in {name}"


def names_of(node: ast.AST) -> list[str]:
    """The names that a node brings in: of variables, attributes, arguments, functions, modules."""
    fields = ("id", "attr", "arg", "name", "asname")
    names = [getattr(node, field, None) for field in fields]
    return [name for name in names if isinstance(name, str)]


def words_of(name: str) -> list[str]:
    """`LaneThread_id` is lane, thread, id."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@pytest.mark.parametrize("word", ["job", "vertex", "thread", "ring", "proc", "transporter", "role"])
def test_glossary_forbids_what_other_systems_say(word: str) -> None:
    assert word in forbidden_words()


@pytest.mark.parametrize("name", ["job", "job_count", "JobQueue", "JOBS_MAX", "thread2ring"])
def test_forbidden_word_is_found_in_any_spelling(name: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"{name} = 1")
    assert list(words_in(planted, forbidden_words()))


@pytest.mark.parametrize(
    "code", ["{1}", "set()", "frozenset([1])", "{x for x in y}", "a: set[int]"]
)
def test_set_is_found_however_it_is_made(code: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(code)
    assert list(sets_in(planted))


def test_long_function_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n" + "    pass\n" * FUNCTION_LINES_MAX)
    assert list(long_functions(planted))


def committed_files() -> list[Path]:
    """Every file that is, or is about to be, committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"what is committed is known in a git checkout alone: {done.stderr.strip()}")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("pattern", [HOST, MACHINE_PATH], ids=["host", "machine path"])
def test_no_committed_file_names_a_machine(pattern: re.Pattern[str]) -> None:
    assert [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in committed_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ] == []


def test_no_lock_file_is_committed_because_it_names_hosts() -> None:
    assert [path for path in committed_files() if path.name == "uv.lock"] == []


def test_constraints_say_how_they_are_made_and_where_nothing_comes_from() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert constraints.startswith("# ")
    assert "uv pip compile" in constraints
    assert "://" not in constraints
