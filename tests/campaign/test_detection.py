"""Which format a file has: by suffix, by content, and when no guess is safe."""

import contextlib
import gzip
import io
import re
import sys
from pathlib import Path

import pytest

from taskyard.campaign import lines
from taskyard.campaign.formats import (
    FileOptions,
    Format,
    FormatChoice,
    choose_by_content,
    choose_format,
)
from taskyard.campaign.lines import InvalidCampaign, open_input
from taskyard.campaign.reader import read_campaign
from taskyard.campaign.shell_lines import syntax_error
from taskyard.errors import UserError
from tests.kit.cases import each_case

SHELL, JSONL, CSV, DWORK = Format.SHELL, Format.JSONL, Format.CSV, Format.DWORK
TASK = '{"name": "a", "argv": ["true"]}'


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the only programs that exist here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    for name in ("bin/python3", "bin/sort", "bin/sleep", "bin/date", "job.sh"):
        (tmp_path / name).touch(0o755)


def choice_of(name: str, content: bytes) -> FormatChoice:
    Path(name).write_bytes(content)
    with open_input(name) as stream:
        return choose_format(name, stream)[0]


@each_case(
    ("content", "form"),
    [
        # Commands, as other programs take them.
        ("sleep 1\nsleep 2\n", SHELL),
        ("python3 train.py --lr 0.1 --seed 1\npython3 train.py --lr 0.1 --seed 2\n", SHELL),
        ("#!/bin/bash\nblastp -query a.fa -db nr\n", SHELL),
        ("\ufeff# a comment\r\n\r\nsort a.txt\r\n", SHELL),
        ("( cd /data/a && ./simulate ) &> a.log\n( cd /data/b && ./simulate ) &> b.log\n", SHELL),
        ("module load R; Rscript a.R\nmodule load R; Rscript b.R\n", SHELL),
        ("OMP_NUM_THREADS=4 simulate a\nOMP_NUM_THREADS=4 simulate b\n", SHELL),
        ("unknown-program a > a.out\nunknown-program b > b.out\n", SHELL),
        ("./job.sh\n./job.sh\n", SHELL),
        ("for i in 1 2 3; do echo $i; done\n", SHELL),
        ("sort a.txt \\\n  | sort -u \\\n  > b.txt\n", SHELL),
        ("sort 'größe' \xff\n", SHELL),
        ("[ -f x ] && sort x\n[[ -f y ]] && sort y\n", SHELL),
        ("{ sort a; sort b; } > c\n", SHELL),
        ("sort a,b\ncut -d, -f1 x\n", SHELL),
        ("awk '{print $1}' a\nawk '{print $1}' b\n", SHELL),
        ("$PROGRAM a\n${PROGRAM} b\n`which sort` c\n", SHELL),
        ("! sort -c a\n: > b\n", SHELL),
        ("sort a\nsort b\nsort c\nother-program d\n", SHELL),
        ("# nothing but comments\n", SHELL),
        # JSON under another name.
        (TASK, JSONL),
        ("\n" + TASK + "\nsort a\n", JSONL),
        ('{"name": "x" "argv": []}\n', JSONL),
        ("{'name': 'x'}\n", JSONL),
        ('{ "quoted program" x; }\n', JSONL),
        ('{"workflow": {}}\n', Format.WFCOMMONS),
        ("{\n", Format.WFCOMMONS),
        # Tables under another name.
        ("name,argv\na,sort a\n", CSV),
        ("name;argv\na;sort a\n", CSV),
        ('"argv"\t"name"\nsort a\ta\n', CSV),
        # Names with commas, and single words.
        ("a,b,c\n", DWORK),
        ("a\nb,a\nc , a, b\n", DWORK),
        ("sort\njoin,sort\n", DWORK),
        ("img1.png\nimg2.png\n", DWORK),
        ("date\n", SHELL),
        ("data/a.csv\ndata/b.csv\n", DWORK),
    ],
)
def test_content_decides(content: str, form: Format) -> None:
    data = content.encode("latin-1") if "\xff" in content else content.encode()
    choice = choice_of("c.txt", data)
    assert (choice.format, choice.by_content) == (form, True)
    assert choice_of("c.txt.gz", gzip.compress(data)).format is form


@each_case(
    ("content", "reason"),
    [
        (b"\x7fELF\x02\x01\x01\0\0", "1: the file is binary, or has NUL bytes"),
        (b"PK\x03\x04", "1: the file is binary, or has NUL bytes"),
        (b"sort a\0\n", "1: the file is binary, or has NUL bytes"),
        (b"<?xml version='1.0'?>\n<adag>\n", "1: the file looks like XML"),
        (b'sort a\n{"name": "a"}\nsort b\nsort c\n', "2: the file looks like JSON"),
        (b"<html><body>", "1: the file looks like XML"),
        (b"---\ntasks:\n", "1: the file looks like YAML or Markdown"),
        (b"- rm -rf x\n", "1: the file looks like YAML or Markdown"),
        (b"tasks:\n  - sort a\n", "1: the file looks like YAML or a list of settings"),
        (b"key = value\n", "1: the file looks like a list of settings"),
        (b"import os\nos.remove('x')\n", "1: the file looks like Python"),
        (b"from a import b\n", "1: the file looks like Python"),
        (b"print('x')\n", "1: the file looks like a program"),
        (b"int main() {\n", "1: the file is in no format"),
        (b"> I wrote to you\n", "1: the file looks like quoted text or a table"),
        (b"| a | b |\n|---|---|\n", "1: the file looks like quoted text or a table"),
        (b"id,cmd\n1,sort a b\n", "1: the file looks like a table"),
        (b"1\tsort a\n2\tsort b\n", "1: the file looks like a table"),
        (b"Dear all,\nplease sort the files.\n", "1: the file is in no format"),
        (b"Hello!\nsort a\n", "1: the file looks like prose"),
        (b"sort a\nThis is a text\nof some lines\n", "2: the file is in no format"),
        (b"unknown-program 1\nunknown-program 2\n", "1: the file is in no format"),
        (b"date\nimg.png\n", "2: the file is in no format"),
        (b"sort a\nnotes on b\n", "2: the file is in no format"),
        (b"RUN rm -rf /x\nENV A=1 B=$A\n", "1: the file is in no format"),
        (b"root:x:0:0:root:/root:/bin/sh\nroot x\n", "1: the file is in no format"),
        (b"numpy==1.2\nscipy >= 3\n", "1: the file looks like a list of packages"),
        (b"$ sort a\n", "1: the file looks like a session of a terminal"),
        (b"[tool.ruff]\nx = 1\n", "1: the file looks like a list of settings"),
        (b"sort a\ncd data\nsort b\n", "2: the file looks like a script: `cd` has no effect"),
        (b"set -e\nsort b\n", "1: the file looks like a script: `set` has no effect"),
        (b"N=5\nsort $N\n", "1: the file looks like a script: a variable that is set has no"),
        (b"OUT=$(date)\nsort $OUT\n", "1: the file looks like a script: a variable that is set"),
        (b"sort a &\nwait\n", "2: the file looks like a script: `wait` has no effect"),
    ],
)
def test_text_that_may_be_another_thing_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(InvalidCampaign) as refused:
        choice_of("c.txt", content)
    assert str(refused.value).startswith(f"c.txt:{reason}")
    assert str(refused.value).endswith(
        "(--shell runs each line as a command, --format names another format)"
    )


def test_list_is_refused_with_advice() -> None:
    for content in (b'["a"]', b"[\n", b'[ "a" ]'):
        with pytest.raises(InvalidCampaign, match=r"c\.txt:1: a JSON list"):
            choice_of("c.txt", content)


def test_script_runs_line_by_line_only_on_request() -> None:
    content = b"#!/bin/sh\nsort a\nsort b\n"
    with pytest.raises(InvalidCampaign, match=r"c\.sh:1: the file is a script \(\.sh\), "):
        choice_of("c.sh", content)
    with pytest.raises(InvalidCampaign, match="the file is a script"):
        choice_of("c.sh.gz", gzip.compress(content))
    loaded = read_campaign("c.sh", FileOptions(format=SHELL))
    assert [spec.argv for spec in loaded.specs] == [
        ["/bin/sh", "-c", "sort a"],
        ["/bin/sh", "-c", "sort b"],
    ]


def test_other_interpreter_is_refused_even_on_request() -> None:
    Path("c").write_bytes(b"#!/usr/bin/env python3\nsort a\n")
    for options in (None, FileOptions(format=SHELL)):
        with pytest.raises(InvalidCampaign, match=r"c:1: 'python3' is not a shell .*known: sh, "):
            read_campaign("c", options)


def test_suffix_decides_before_the_content() -> None:
    assert choice_of("c.jsonl", b"sort a\n") == FormatChoice(JSONL, "its name ends in .jsonl")
    assert choice_of("c.TSV.gz", b"sort a\n").format is CSV


def test_option_decides_before_the_suffix() -> None:
    Path("c.jsonl").write_bytes(b"sort a\n")
    loaded = read_campaign("c.jsonl", FileOptions(format=SHELL))
    assert (len(loaded.specs), loaded.choice) == (1, FormatChoice(SHELL))


def test_wrong_guess_is_explained() -> None:
    Path("c.txt").write_bytes(b"name,cmd\n")
    with pytest.raises(UserError) as refused:
        read_campaign("c.txt")
    assert str(refused.value) == (
        "c.txt:1: the table has an unknown column 'cmd' (did you mean \"argv\"?); read as CSV, "
        "because its first line has a column name "
        "(--format shell|jsonl|csv|parquet|wfcommons|dwork|zmailer forces another)"
    )
    Path("c.csv").write_bytes(b"sort a\n")
    with pytest.raises(UserError, match=re.escape("read as CSV, because its name ends in .csv (")):
        read_campaign("c.csv")


class SlowPipe(io.RawIOBase):
    """Returns one byte per read."""

    def __init__(self, content: bytes) -> None:
        self._left = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        one = self._left.read(1)
        buffer[: len(one)] = one
        return len(one)


def test_stdin_is_detected_however_slowly_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, form, tasks in ((b"sort a\nsort b\n", SHELL, 2), (TASK.encode(), JSONL, 1)):
        reader = io.TextIOWrapper(io.BufferedReader(SlowPipe(content)))
        monkeypatch.setattr(sys, "stdin", reader)
        loaded = read_campaign("-")
        assert (loaded.choice.format, loaded.file, loaded.rejected) == (form, "stdin", [])
        assert len(loaded.specs) == tasks


def test_whole_file_is_read_after_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "START_BYTES", 50)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 7)
    content = b"".join(b"sort file-%d.txt\n" % number for number in range(100))
    for pack in (bytes, gzip.compress):
        Path("c.txt").write_bytes(pack(content))
        loaded = read_campaign("c.txt")
        assert [spec.argv[2] for spec in loaded.specs if spec.argv] == [
            f"sort file-{number}.txt" for number in range(100)
        ]


@each_case("unit", ["a=", "a= ", "'", "$(", "a |", "[ ", "a\t", "<< ", "a,"])
def test_long_line_of_one_pattern_takes_no_long_time(unit: str) -> None:
    """An expression that backtracks would take hours."""
    text = "a=1 " + unit * 20_000 + " |"
    syntax_error(text)
    with contextlib.suppress(InvalidCampaign):
        choose_by_content("c.txt", text.encode(), is_whole=True)


def test_line_that_is_not_read_to_its_end_is_no_evidence() -> None:
    start = b"sort file\nunkn"
    assert choose_by_content("c.txt", start, is_whole=False).format is SHELL
    with pytest.raises(InvalidCampaign):
        choose_by_content("c.txt", start, is_whole=True)


def test_damage_after_the_first_bytes_is_reported_where_it_is() -> None:
    content = gzip.compress(b"".join(b"sort file-%d.txt\n" % n for n in range(2000)))
    Path("c.txt").write_bytes(content[:-100])
    with pytest.raises(
        InvalidCampaign, match=r"c\.txt:[1-9]\d+: the compressed file is truncated$"
    ):
        read_campaign("c.txt")
