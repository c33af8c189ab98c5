"""The input of `map` without a broker: lists, columns, arrays, templates and the dry run.

`parallel_commands.txt` has the commands that GNU parallel makes of the same words.
"""

from __future__ import annotations

import gzip
import io
import shlex
import subprocess
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.campaign.lines import InvalidCampaign, blocks_of_lines
from taskyard.cli import daemon_options
from taskyard.cli.entry import run, taskyard
from taskyard.cli.input_rows import ListFormat, array_indexes, list_rows, rows, split_lists
from taskyard.cli.templates import InputRow
from tests.cli.yard import Outcome
from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Callable

    Map = Callable[..., Outcome]

FILES: Final = {
    "one.txt": b"a\nb c\n\nd\n",
    "two.txt": b"x\ny\n",
    "nul.txt": b"n\0m o\0\0p",
    "columns.txt": b"a,b\n c , d \ne\n",
}

#: The words after `parallel`, and the commands.
PARALLEL: Final = [
    (words, commands.splitlines())
    for words, _, commands in (
        block.partition("\n")
        for block in (Path(__file__).parent / "parallel_commands.txt").read_text().split("\n$ ")[1:]
    )
]


@pytest.fixture
def dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Map:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)

    def dry_run(*words: str) -> Outcome:
        code = run(taskyard, ["map", "--dry-run", *words])
        out, err = capsysbinary.readouterr()
        return Outcome(code, out.decode(), err.decode())

    return dry_run


@pytest.mark.parametrize(("words", "commands"), PARALLEL, ids=[words for words, _ in PARALLEL])
def test_commands_are_those_of_gnu_parallel(dry_run: Map, words: str, commands: list[str]) -> None:
    outcome = dry_run(*shlex.split(words))
    assert outcome.code == 0, outcome.err
    assert [*map(shlex.split, outcome.out.splitlines())] == [*map(shlex.split, commands)]


@pytest.mark.whole
@pytest.mark.needs("parallel")
@pytest.mark.parametrize(("words", "commands"), PARALLEL, ids=[words for words, _ in PARALLEL])
def test_gnu_parallel_makes_these_commands(tmp_path: Path, words: str, commands: list[str]) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    parallel = ["parallel", "--will-cite", "-k", "-j1", "--dry-run", "-q", *shlex.split(words)]
    made = subprocess.check_output(parallel, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert made.decode().splitlines() == commands


def test_product_holds_its_lists_and_not_the_combinations() -> None:
    values = [str(number) for number in range(10_000)]
    _, lists = split_lists(["echo", ":::", *values, ":::", *values])
    tracemalloc.start()
    try:
        last = next(islice(list_rows(lists, ListFormat(), pytest.fail), 20_001, None))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert last.cells == ("2", "1")
    assert peak_bytes < 5_000_000


def test_values_without_a_partner_and_empty_lists_are_reported(dry_run: Map) -> None:
    outcome = dry_run("echo", ":::", "a", "b", ":::+", "x")
    assert (outcome.code, outcome.out) == (0, "echo a x\n")
    assert outcome.err == (
        "taskyard: warning: ':::+': shorter than the list linked to it, whose rest is not used\n"
    )
    outcome = dry_run("echo", ":::", "a", ":::")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == "taskyard: warning: ':::': no values, so there are no combinations\n"


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("7", [7]),
        ("1-4", [1, 2, 3, 4]),
        ("1,3,5-7", [1, 3, 5, 6, 7]),
        ("0-15:4", [0, 4, 8, 12]),
        ("5-6, 1-10:5,6", [1, 5, 6]),
    ],
)
def test_array_has_the_indexes_of_slurm(text: str, indexes: list[int]) -> None:
    assert [*array_indexes(text)] == indexes


def test_array_is_not_held() -> None:
    assert [*islice(array_indexes("1-999999999999"), 3)] == [1, 2, 3]


def test_slots_may_be_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_options, "usable_cores", lambda: 3)
    convert = daemon_options.SlotCount().convert
    shares = ("4", 4), ("50%", 1), ("1%", 1), ("200%", 6)
    assert [(text, convert(text, None, None)) for text, _ in shares] == [*shares]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("echo {3} ::: a ::: b", "unknown template {3}: columns are numbered, use {} {#} {1} to"),
        ("echo {-3} ::: a ::: b", "unknown template {-3}"),
        ("echo {0} ::: a", "unknown template {0}"),
        ("echo {name} ::: a", "unknown template {name}"),
        ("--payload {2} ::: a", "unknown template {2}"),
        ("--payload x ::: a", "payload: does not use the input"),
        (
            "--lines one.txt echo {1}",
            "unknown template {1}: lines have no columns without --colsep",
        ),
        ("--array 1-3_7 -- echo", "--array '1-3_7': expected indexes such as 1-10"),
        ("-j 0 echo ::: a", "expected a number from 1 to 100000, or a share of the cores"),
        ("-j x% echo ::: a", "expected a number from 1 to 100000, or a share of the cores"),
        ("--array 1-3 -- echo {.}", "unknown template {.}: an index has no parts, use {} or {#}"),
        ("--colsep , echo {2} ::: a,b c", "row 2: unknown column '2' (it has 1 columns)"),
        ("--colsep ( echo {2} ::: a,b c", "--colsep '(': not a regular expression"),
        ("--lane {2} echo ::: a", "row 1: the lane is '{2}', but the task has no field '2'"),
        ("::: a", "missing command before :::"),
        ("echo :::+ a", "':::+': no list before it to link to (begin with :::)"),
        ("echo ::::", "'::::': missing file name"),
        ("echo :::: none.txt", "none.txt: No such file"),
        ("echo :::: - -", "'::::': stdin (-) can be read once only"),
        ("--lines one.txt echo ::: a", "--lines and ::: exclude each other"),
        ("--csv one.txt --array 1 -- echo {}", "--csv and --array exclude each other"),
        ("--array 3-1 -- echo {}", "--array '3-1': 3 is greater than 1"),
        ("--array 1-3:0 -- echo {}", "the step must not be 0"),
        ("--array 1-9%2 -- echo {}", "(write --array 1-9 -j 2)"),
        ("--null --csv one.txt -- echo {}", "--null works with --lines, stdin or lists"),
        ("--null echo ::: a", "--null works with --lines, stdin and :::: files, but none is read"),
        ("--pipe wc ::: a", "--pipe works with --lines or stdin, not with :::"),
        ("--pipe --lines one.txt -- wc {}", "unknown template {}: a block has no text, use {#}"),
        ("--pipe --stdin --lines one.txt wc", "--pipe and --stdin exclude each other"),
        ("--pipe --lines one.txt --call m:f", "--pipe needs a command, not --call"),
        ("--block 1M --lines one.txt -- wc {}", "--block needs --pipe"),
        ("--stdin wc ::: a ::: b", "--stdin works with one list, not with several"),
        ("-n 2 echo ::: a ::: b", "--max-args works with one list, not with several"),
        ("-n 2 --pipe --lines one.txt wc", "--pipe and --max-args exclude each other"),
        ("-n 2 echo {2} ::: a b c", "row 3: unknown column '2' (it has 1 columns)"),
        ("--json-lines --call m:f ::: a", "row 1: 'a': not valid JSON"),
        ("'echo {}' ::: a", "command 'echo {}': one word, and no shell splits it"),
    ],
)
def test_bad_input_is_refused_with_a_reason(dry_run: Map, words: str, message: str) -> None:
    outcome = dry_run(*shlex.split(words))
    assert outcome.code == 2
    assert message in outcome.err


def test_value_that_is_not_utf8_is_refused(dry_run: Map) -> None:
    outcome = dry_run("echo", ":::", "a\udcff")
    assert outcome.code == 2
    assert "is not valid UTF-8" in outcome.err


@pytest.mark.parametrize("size", ["0", "x", "-1", "1T", "13M"])
def test_block_size_has_limits(dry_run: Map, size: str) -> None:
    assert "expected a size up to 12224K" in dry_run("--pipe", "--block", size, "wc").err


def test_command_is_printed_in_one_line_that_a_shell_reads(dry_run: Map) -> None:
    values = ["a\nb'c\\", "\x01\x7f9", "é\t"]
    outcome = dry_run("printf", "%s;", ":::", *values)
    assert len(outcome.out.splitlines()) == 3
    printed = subprocess.check_output([need("bash"), "-c", outcome.out])
    assert printed.decode() == "".join(f"{value};" for value in values)


def test_other_work_is_printed_too(dry_run: Map) -> None:
    assert dry_run("--call", "m:f", ":::", "1", "x").out == "m:f '\"1\"'\nm:f '\"x\"'\n"
    assert dry_run("--call", "m:f", "--json-lines", ":::", "1", ":::", "[2]").out == "m:f 1 '[2]'\n"
    assert dry_run("--payload", "<{1}\n{2/}>", ":::", "a", ":::", "b/c").out == "<a\\nc>\n"
    assert dry_run("--stdin", "wc", "-l", ":::", "a", "b c").out == "wc -l < a\nwc -l < 'b c'\n"
    assert dry_run("--array", "3-5:2", "--", "./job", "{#}").out == "./job 1\n./job 2\n"


def test_dry_run_has_a_document(dry_run: Map) -> None:
    words = ["--json", "--campaign", "c", "--lane", "{2}", "echo", ":::", "a", ":::", "x", "y"]
    document = dry_run(*words).document()
    assert (document["campaign"], document["planned"]) == ("c", 2)
    assert [(task["argv"], task["lane"]) for task in document["tasks"]] == [
        (["echo", "a", "x"], "x"),
        (["echo", "a", "y"], "y"),
    ]
    pipe = dry_run("--json", "--pipe", "--lines", "one.txt", "--block", "3", "--", "wc")
    assert [task["stdin_bytes"] for task in pipe.document()["tasks"]] == [2, 4, 3]
    stdin = dry_run("--json", "--stdin", "wc", ":::", "f").document()["tasks"]
    assert stdin == [{"name": None, "lane": "", "argv": ["wc"], "stdin_file": "f"}]
    payload = dry_run("--json", "--payload", "{}", ":::", "f").document()["tasks"]
    assert payload == [{"name": None, "lane": "", "payload": "f"}]
    call = dry_run("--json", "--call", "m:f", ":::", "f").document()["tasks"]
    assert call == [{"name": None, "lane": "", "call": "m:f", "args": ["f"]}]


@given(
    st.lists(st.sampled_from([b"a", b"\n", b"bc\xff\0", b"\r\n"])).map(b"".join), st.integers(1, 9)
)
def test_blocks_are_the_exact_input_cut_at_line_ends(content: bytes, block_bytes: int) -> None:
    stream = io.BufferedReader(io.BytesIO(content), buffer_size=3)
    blocks = [*blocks_of_lines(stream, "stdin", block_bytes, 1000)]
    assert b"".join(blocks) == content
    assert all(block.endswith(b"\n") for block in blocks[:-1])
    assert all(len(block) <= block_bytes or block.count(b"\n") <= 1 for block in blocks)


def test_line_that_is_longer_than_any_block_is_refused() -> None:
    stream = io.BufferedReader(io.BytesIO(b"a\n" + b"b" * 20 + b"\nc\n"))
    blocks = blocks_of_lines(stream, "stdin", 4, 10)
    assert next(blocks) == b"a\n"
    with pytest.raises(InvalidCampaign, match="stdin:2: the line has more than 10 bytes"):
        next(blocks)


def test_compressed_input_is_passed_on_as_it_is(dry_run: Map, tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(b"a\n"))
    tasks = dry_run("--json", "--pipe", "--lines", "packed", "--", "gunzip").document()["tasks"]
    sizes = [task["stdin_bytes"] for task in tasks]
    assert sum(sizes) == len((tmp_path / "packed").read_bytes())


def test_parts_of_fields_are_templates(dry_run: Map, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("file,file/\na/b.png,own\n")
    assert dry_run("--csv", "t.csv", "--", "echo", "{file.} {file/.} {file//} {file/}").out == (
        "echo 'a/b b a own'\n"
    )


def test_rows_are_recognised_by_their_values(tmp_path: Path) -> None:
    def identity(kind: str, text: str) -> str:
        (tmp_path / "f").write_text(text)
        return next(rows(kind, str(tmp_path / "f"))).identity()

    def cells(*values: str) -> str:
        return InputRow(1, "", " ".join(values), [*values], cells=values).identity()

    assert cells("a b", "c") != cells("a", "b c")
    assert cells("a") == identity("lines", "\na\n")
    assert identity("csv", 'a,b\n1,"2"\n') == identity("csv", "b,a\n2,1\n")
    assert identity("jsonl", '{"a": 1, "b": 2}') == identity("jsonl", '{"b":2,"a":1}')
    assert identity("csv", "a,b\n1,23\n") != identity("csv", "a,b\n12,3\n")
    assert msgspec.structs.replace(InputRow(1, "", "", None), block=b"x").identity() != (
        InputRow(1, "", "", None, block=b"y").identity()
    )


@pytest.mark.parametrize(
    ("script", "filled"),
    [
        ("echo {} x{}y", "echo 'a; b' x'a; b'y"),
        (
            "x=$(basename {}); awk '{print $1}' <{/}",
            "x=$(basename 'a; b'); awk '{print $1}' <'a; b'",
        ),
        ('echo {#} "row {#}" {{}} ${x}', 'echo 1 "row 1" {} ${x}'),
    ],
)
def test_value_is_quoted_in_the_script_of_a_shell(dry_run: Map, script: str, filled: str) -> None:
    out = dry_run("nice", "bash", "-ec", script, ":::", "a; b").out
    assert shlex.split(out)[-1] == filled


def test_each_column_is_quoted_in_the_script_of_a_shell(dry_run: Map) -> None:
    out = dry_run("sh", "-c", "cp {} {2/}", ":::", "a b", ":::", "c/d").out
    assert shlex.split(out)[-1] == "cp 'a b' 'c/d' 'd'"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["sh", "-c", "{}"], "the whole script of sh (write sh -c 'echo \"$1\"' sh {})"),
        (["env", "A=b", "bash", "-lc", 'echo "{}"'], 'within "…" in the script of bash, where it'),
        (["sh", "-c", "eval {}"], "after eval in the script of sh, where it can't be quoted"),
        (["sh", "-c", "ssh {1} {2}"], "in the script of ssh in the script of sh"),
        (["python3", "-c", "print({})"], "a part of the script of python3 (write python3 -c 'im"),
        (["awk", "/{}/", "file"], "a part of the script of awk (write awk 'BEGIN"),
        (["ssh", "host", "echo", "{}"], "a part of the script of ssh (write bash -c 'ssh HOST"),
    ],
)
def test_template_that_would_be_code_is_refused(
    dry_run: Map, words: list[str], problem: str
) -> None:
    outcome = dry_run(*words, ":::", "a", ":::", "b")
    assert (outcome.code, outcome.out) == (2, "")
    assert problem in outcome.err


def test_numbers_are_no_code(dry_run: Map) -> None:
    out = dry_run("--array", "3-4", "--", "python3", "-c", "print({} + {#})").out
    assert out == "python3 -c 'print(3 + 1)'\npython3 -c 'print(4 + 2)'\n"


def test_text_of_awk_is_no_template_although_fields_may_have_spaces(
    dry_run: Map, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("print x,name\n1,2\n")
    words = ("awk", "{print x}", "{name}")
    assert dry_run("--csv", "t.csv", "--", *words).out == "awk '{print x}' 2\n"
