"""The rules of style that ruff does not have, over the whole tree, and names of machines.

The rules are in tools/style.py. `style_allowed.txt` lists the finds that are left, by file and
rule. A count that rises or falls fails. After a fix: `python tools/style.py --update`.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import budget
import style
from tests.kit.requirements import need

ROOT = Path(__file__).parent.parent

#: Package indexes and mirrors. An address in a file would tie every user to one network.
HOST = re.compile(r"files\.pythonhosted|pypi\.org/simple|registry\.npmjs|deb\.debian")
#: Directories of one machine.
MACHINE_PATH = re.compile(r"(?<![\w.-])/(?:work|root|home|Users|farm|opt)/")


def test_finds_are_those_that_are_allowed() -> None:
    found = style.finds()
    counts, allowed = style.counts(found), style.allowed_counts()
    new = [str(find) for find in found if counts[key(find)] > allowed[key(find)]]
    assert not new, "\n".join(new)
    counts += budget.weights() + style.noun_weights()
    heavier = [f"{' '.join(place)}: {count}" for place, count in (counts - allowed).items()]
    assert not heavier, f"heavier than allowed: {heavier}"
    gone = {place: f"{count}, found {counts[place]}" for place, count in (allowed - counts).items()}
    assert not gone, f"fewer finds than allowed; run `python tools/style.py --update`: {gone}"


def test_page_has_the_weights() -> None:
    assert budget.page_with(budget.table(budget.weights())) == budget.PAGE.read_text()


def test_code_lines_have_a_token_that_is_no_comment(planted: Path) -> None:
    planted.write_text(
        '"""A file."""\n\n# one\nx = (\n    1,\n)\ndef f():\n    """Do."""\n    y = """\n"""\n'
    )
    assert budget.code_lines(planted) == 6  # x has three, f has three


def key(find: style.Find) -> tuple[str, str]:
    return style.shown(find.path), find.rule


def test_test_files_open_with_a_docstring() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert [path for path in files if not path.read_text().startswith('"""')] == []


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return tmp_path / "planted.py"


@pytest.mark.parametrize(
    "code",
    [
        "courier = 1",
        "new_courier = 1",
        "class CourierThread: ...",
        "class NewCourier: ...",
        "COURIERS_MAX = 1",
        '"""Return the courier."""',
        "x = 'no courier'",
        "# Two couriers",
    ],
)
def test_invented_word_is_found_in_any_spelling(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert len(list(style.invented_words(planted))) == 1


@pytest.mark.parametrize("code", ["lucky = 1", "pluck = 1", "PLUCK = 1", "# a sentence"])
def test_longer_word_is_not_an_invented_one(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert list(style.invented_words(planted)) == []


def test_replaced_names_are_found_in_classes_and_modules_only(tmp_path: Path) -> None:
    module = tmp_path / "agenda.py"
    module.write_text("class _Told: ...\nagenda = told = 1\n")
    assert [find.text for find in style.old_names(module)] == ["agenda", "_Told"]


@pytest.mark.parametrize("word", ["job", "vertex", "thread", "ring", "proc", "transporter", "role"])
def test_glossary_keeps_words_of_other_systems_out_of_core(word: str) -> None:
    assert word in style.words_not_in_core()


@pytest.mark.parametrize("name", ["job", "job_count", "JobQueue", "JOBS_MAX", "proxies"])
def test_word_of_another_system_is_found_in_any_spelling(planted: Path, name: str) -> None:
    planted.write_text(f"{name} = 1")
    assert len(list(style.words_of_other_systems(planted))) == 1


@pytest.mark.parametrize(
    "docstring", ["Who waits is told.", "Return it. Nobody reads it.", "A file: What it holds."]
)
def test_sentence_without_subject_is_found(planted: Path, docstring: str) -> None:
    planted.write_text(f'def f():\n    """{docstring}"""\n')
    assert len(list(style.sentences_without_subject(planted))) == 1


@pytest.mark.parametrize("docstring", ["Return what was sent.", "Who holds the lock? Its owner."])
def test_question_or_object_is_no_sentence_without_subject(planted: Path, docstring: str) -> None:
    planted.write_text(f'"""{docstring}"""\n')
    assert list(style.sentences_without_subject(planted)) == []


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        ("The lock. Its owner has it.", 1),
        ("Two files. One is empty, the other is not.", 1),
        ("Those of a pair.", 1),
        ("A lock has its owner, one of three.", 0),
        ("Onesimus wrote it.", 0),
    ],
)
def test_sentence_that_begins_with_a_word_for_nothing_is_found(
    planted: Path, prose: str, count: int
) -> None:
    planted.write_text(f'def f():\n    """{prose}"""\n# {prose}\n')
    assert len(list(style.sentence_beginnings(planted))) == 2 * count


def test_note_in_place_of_a_sentence_is_found(planted: Path) -> None:
    planted.write_text("#: None: unknown.\nx = None  # None: unknown\n")
    assert [find.line for find in style.sentence_beginnings(planted)] == [1]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the rest", 1),
        ("Send the others to those who wait.", 2),
        ("the newest one, and this one", 2),
        ("one broker, those brokers, one of a pair, the one broker", 0),
        ("```\nthe rest\n```", 0),
    ],
)
def test_nouns_that_name_nothing_are_counted(tmp_path: Path, text: str, count: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert style.prose_of(page).nouns == count


def test_star_tuple_and_arguments_of_any_type_are_found(planted: Path) -> None:
    planted.write_text("f(*(1, x))\nf(*x)\ndef g(*a, **b: Any): ...\ndef h(**b: int): ...\n")
    assert [find.line for find in style.star_tuples(planted)] == [1]
    assert [find.line for find in style.any_dicts(planted)] == [3]


def test_semicolon_is_found_in_comments_only(planted: Path) -> None:
    planted.write_text('x = ";"; y = 1  # one\n# one; two\n')
    assert [find.line for find in style.comment_semicolons(planted)] == [2]


@pytest.mark.parametrize(
    "text", ["'no work; give some'", "f'{x}: bad. Use y'", "'x: bad.'", "f'{x}: a' '; b'"]
)
def test_error_with_several_sentences_is_found(planted: Path, text: str) -> None:
    planted.write_text(f"raise UserError({text})")
    assert len(list(style.error_sentences(planted))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "raise UserError(f'{x}: bad (use y.z, or a.b)')",
        "raise TaskyardError(f'internal error: {x}. Please report it.')",
        "raise UserError('; '.join(x))",
        "print('a; b.')",
    ],
)
def test_error_of_one_sentence_is_no_find(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert list(style.error_sentences(planted)) == []


@pytest.mark.parametrize("code", ["PingPong = 1", "# as in dwork", "x = 'round-robin'"])
def test_dialect_is_found_in_core(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert len(list(style.dialect_names(planted))) == 1


@pytest.mark.parametrize(
    "code", ["{1}", "set()", "frozenset([1])", "{x for x in y}", "a: set[int]"]
)
def test_set_is_found_however_it_is_made(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert list(style.sets(planted))


@pytest.mark.parametrize(
    "code", ["spark.sparkContext", "frame.rdd", "frame.sparkSession._jvm", "context.broadcast(x)"]
)
def test_name_that_needs_the_driver_is_found(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert len(list(style.driver_only_names(planted))) == 1


@pytest.mark.parametrize("code", ["f.broadcast(frame)", "F.broadcast(frame)", "rdd = 1"])
def test_hint_for_a_join_does_not_need_the_driver(planted: Path, code: str) -> None:
    planted.write_text(code)
    assert list(style.driver_only_names(planted)) == []


def test_long_function_is_found(planted: Path) -> None:
    planted.write_text("def f():\n" + "    pass\n" * style.FUNCTION_LINES_MAX)
    assert len(list(style.long_functions(planted))) == 1


@pytest.mark.parametrize(("name", "count"), [("looking", 1), ("testing", 0), ("queues", 0)])
def test_module_named_for_an_activity_is_found(tmp_path: Path, name: str, count: int) -> None:
    assert len(list(style.activity_modules(tmp_path / f"{name}.py"))) == count


def test_small_file_with_one_importer_is_found(tmp_path: Path) -> None:
    for name, code in {
        "small": "",
        "shared": "",
        "one": "import small, shared",
        "two": "import shared",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    found = style.small_files(sorted(tmp_path.glob("*.py")))
    assert [find.path.stem for find in found] == ["small"]


def test_import_cycle_is_found_through_types_and_functions(tmp_path: Path) -> None:
    for name, code in {
        "a": "from b import B",
        "b": "if TYPE_CHECKING:\n    from c import C",
        "c": "def f():\n    import a",
        "d": "import a",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    found = list(style.import_cycles(sorted(tmp_path.glob("*.py"))))
    assert [find.path.stem for find in found] == ["a", "b", "c"]
    assert found[0].text == "with b, c"


def test_list_of_allowed_finds_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "ALLOWED", tmp_path / "allowed.txt")
    path = style.ROOT / "src" / "x.py"
    found = [style.Find(path, line, "small file", "") for line in (1, 2)]
    style.write_allowed(style.counts(found))
    assert (tmp_path / "allowed.txt").read_text() == "src/x.py: small file: 2\n"
    assert style.allowed_counts() == Counter({("src/x.py", "small file"): 2})


def committed_files() -> list[Path]:
    """Return every file that is, or is about to be, committed."""
    need("git")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    paths = [ROOT / name for name in listed.split("\0") if name]
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


def test_constraints_have_the_command_that_makes_them_and_no_host() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert constraints.startswith("# ")
    assert "uv pip compile" in constraints
    assert "://" not in constraints
