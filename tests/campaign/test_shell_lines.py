"""Shell lines: commands, skipped and joined lines, and lines that are no whole command."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from taskyard.calls.payloads import EXEC, decode_payload
from taskyard.campaign import shell_lines
from taskyard.campaign.batches import encode_batches
from taskyard.campaign.formats import FileOptions, Format
from taskyard.campaign.reader import LoadedCampaign, read_campaign
from taskyard.campaign.shell_lines import CommandScanner, line_name, syntax_error
from tests.kit.cases import each_case


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(content: bytes) -> LoadedCampaign:
    Path("c").write_bytes(content)
    return read_campaign("c", FileOptions(format=Format.SHELL))


def commands(loaded: LoadedCampaign) -> list[str]:
    return [spec.argv[-1] for spec in loaded.specs if spec.argv]


def complaints(loaded: LoadedCampaign) -> list[str]:
    return [str(rejected) for rejected in loaded.rejected]


def names(lines: Iterable[str]) -> list[str]:
    return [spec.name for spec in load("\n".join(lines).encode()).specs]


def test_each_line_is_a_command_of_its_own_shell() -> None:
    loaded = load(b"# first\n\n  sort a \t\r\n\t# second\n\r\nsort b # not skipped\nsort a")
    assert [(spec.argv, line) for spec, line in zip(loaded.specs, loaded.lines, strict=True)] == [
        (["sh", "-c", "sort a \t"], 3),
        (["sh", "-c", "sort b # not skipped"], 6),
        (["sh", "-c", "sort a"], 7),
    ]
    assert (loaded.skipped.blank, loaded.skipped.comments) == (2, 2)
    assert shell_lines.count_skipped("c") == loaded.skipped


def test_changed_file_keeps_the_names_of_its_other_lines() -> None:
    a, b, a_again = names(["sort a", "sort b", "sort a"])
    assert (a, b, a_again) == (line_name("sort a"), line_name("sort b"), f"{a}-2")
    assert names(["sort c", "sort b", "", "# new", "sort a"])[1:] == [b, a]


@each_case(
    ("first_line", "shell"),
    [
        (b"#!/bin/bash", ["/bin/bash"]),
        (b"#! /bin/sh -eu\r", ["/bin/sh", "-eu"]),
        (b"#!/usr/bin/env zsh", ["zsh"]),
        (b"#!/usr/bin/env -S bash -o pipefail", ["bash", "-o", "pipefail"]),
    ],
)
def test_first_line_chooses_the_shell(first_line: bytes, shell: list[str]) -> None:
    loaded = load(first_line + b"\nsort a\n#!/bin/ksh\n")
    assert [spec.argv for spec in loaded.specs] == [[*shell, "-c", "sort a"]]
    assert loaded.skipped.comments == 1


JOINED = [
    (b"a \\\n  b \\\r\n\tc\nd", ["a   b \tc", "d"]),
    (b"a \\\\\nb", ["a \\\\", "b"]),
    (b"a \\\n\nb", ["a ", "b"]),
    (b"a 'x' \\\n# y", ["a 'x' # y"]),
    (b"a # y \\\nb", ["a # y \\", "b"]),
    (b" # y \\\nb", ["b"]),
    (b'a "x \\\ny" z', ['a "x y" z']),
    (b"a \\", ["a \\"]),
    (b"a \\\n b \\", ["a  b \\"]),
]


@each_case(("content", "expected"), JOINED)
def test_backslash_joins_lines_as_in_a_shell(content: bytes, expected: list[str]) -> None:
    loaded = load(content)
    assert (commands(loaded), loaded.rejected) == (expected, [])


def test_backslash_in_single_quotes_does_not_join() -> None:
    assert complaints(load(b"a 'x \\\ny'"))[0].startswith("c:1: ' is never closed")


WHOLE = [
    "echo 'it''s' \"it's\" \\' $'it\\'s'",
    'echo "$(echo "it\'s" \'"\')" `echo "x"`',
    "echo $((1<<3)) $(( (1 << 2) + 1 )) $(echo $((1)))",
    "echo a # it's",
    "echo a#'b' $# ${#x} \"#\"",
    "cat <<< 'x' <<<y",
    "echo '<<END' \"<<END\"",
    "for i in 1; do echo $i; done",
    "if true; then echo; fi | cat",
    "( for i in 1; do echo; done ) & wait",
    "echo a & # b",
    "setsid daemon &",
    "echo '&>' \"&>\" >x 2>&1 && echo",
    "case x in (x) echo;; esac",
    "{ echo a; echo b; }",
    "dofile; thenx; finish",
    "echo \\| ; echo '|'",
    "! true || exit 0",
    "(echo a; (echo b))",
    "echo $(echo (a)) >/dev/null",
    "ls *.txt && echo {a,b} > 'x y'; awk '{print $1}' a | tee >(cat)",
]
PARTS = [
    ("do echo", "`do` belongs to a command of several lines"),
    ("done", "`done` belongs to a command of several lines"),
    ("fi; echo", "`fi` belongs to a command of several lines"),
    ("}", "`}` belongs to a command of several lines"),
    (") > x", "`)` belongs to a command of several lines"),
    ("| wc -l", "`|` belongs to a command of several lines"),
    ("&& echo", "`&&` belongs to a command of several lines"),
    (";; esac", "`;;` belongs to a command of several lines"),
    ("for i in 1 2; do", "`for` without `done`"),
    ("while read x; do echo $x", "`while` without `done`"),
    ("if true; then", "`if` without `fi`"),
    ("case $x in", "`case` without `esac`"),
    ("echo a |", "ends with `|`"),
    ("echo a && ", "ends with `&&`"),
    ("echo a ||", "ends with `||`"),
    ("echo 'a", "' is never closed"),
    ("echo it's", "' is never closed"),
    ('echo "a', '" is never closed'),
    ("echo $(date", "$( is never closed"),
    ("echo `date", "` is never closed"),
    ("echo $((1 + 2)", "(( is never closed"),
    ("cat <<END", "a here-document has no lines"),
    ("cat > x <<- 'END'", "a here-document has no lines"),
]


BACKGROUND = "(it would be stopped at once, so leave that out, or add `wait`)"
REDIRECTED = "`&>` means another thing in sh (begin the file with #!/bin/bash)"


def test_work_that_would_be_lost_is_rejected() -> None:
    loaded = load(b"echo a &\n(echo a; echo b) & \necho a &> x\necho a &>> x\necho a & wait")
    assert complaints(loaded) == [
        f"c:1: ends with `&` {BACKGROUND}",
        f"c:2: ends with `&` {BACKGROUND}",
        f"c:3: {REDIRECTED}",
        f"c:4: {REDIRECTED}",
    ]
    loaded = load(b"#!/usr/bin/env bash\necho a &> x\necho a &>> x\n")
    assert (commands(loaded), loaded.rejected) == (["echo a &> x", "echo a &>> x"], [])


@each_case("text", WHOLE)
def test_whole_commands_are_accepted(text: str) -> None:
    assert syntax_error(text) is None


@each_case(("text", "reason"), PARTS)
def test_part_of_a_command_is_rejected(text: str, reason: str) -> None:
    hint = "(a command is one line, or lines that end in a backslash)"
    assert complaints(load(text.encode())) == [f"c:1: {reason} {hint}"]


def test_quick_check_accepts_only_what_the_scan_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare both on random texts of the characters that matter."""
    parts = ("'", '"', "`", "\\", "#", "&", "&&", "|", "<", "<<", "$(", "((", "$((", ")", "$'", ">")
    words = ("a", " ", " ", "for ", "done", "if", "fi", "{", "}", ";", "!", "END", "$x", "\n")
    random = Random(7)
    texts = ["".join(random.choices(parts + words, k=random.randint(1, 9))) for _ in range(20_000)]
    quick = [text for text in texts if shell_lines._SURELY_WHOLE.fullmatch(text)]  # noqa: SLF001
    assert len(quick) > 500
    monkeypatch.setattr(shell_lines, "_SURELY_WHOLE", re.compile("(?!)"))
    assert [text for text in quick if syntax_error(text) is not None] == []


def test_sh_rejects_the_same_lines() -> None:
    """A here-document without lines is only a warning to a shell, so it is not compared."""
    parts = [text for text, _ in PARTS if "<<" not in text]
    posix = [text for text in WHOLE if not any(part in text for part in ("<<<", "$'", ">(", "(a)"))]
    for text, is_whole in [*((one, False) for one in parts), *((one, True) for one in posix)]:
        done = subprocess.run(["/bin/sh", "-n", "-c", text], capture_output=True, check=False)
        assert (done.returncode == 0) is is_whole, text


def test_lines_that_can_not_be_run_are_rejected() -> None:
    long = b"echo " + b"x" * shell_lines.COMMAND_BYTES_MAX
    loaded = load(b"\n".join([b"echo \xff", b"echo \0", long, b"sort a \\", long, b"sort b"]))
    size = shell_lines.COMMAND_BYTES_MAX
    assert complaints(loaded) == [
        "c:1: not valid UTF-8 (byte 6)",
        "c:2: the line has NUL bytes; was the file written to its end?",
        f"c:3: the command has {size + 5} bytes, the limit is {size}",
        f"c:4: the command has {size + 12} bytes, the limit is {size}",
    ]
    assert commands(loaded) == ["sort b"]
    assert [rejected.raw for rejected in loaded.rejected[:2]] == ["echo \\xff", "echo \0"]


def test_longest_command_can_be_run() -> None:
    text = "#" * shell_lines.COMMAND_BYTES_MAX
    assert subprocess.run(["/bin/sh", "-c", text], check=False).returncode == 0


def test_endless_command_is_not_kept_in_memory() -> None:
    line = b"x" * 1000 + b"\\"
    held = shell_lines._HeldCommand(1)  # noqa: SLF001  # its memory is the point
    for _ in range(1000):
        held.add(line)
    assert sum(map(len, held._pieces)) < shell_lines.COMMAND_BYTES_MAX + 2000  # noqa: SLF001


def test_state_of_quotes_is_kept_between_pieces() -> None:
    scanner = CommandScanner()
    for piece in ('a "b $(c ', "'d) \" ", "' e"):
        scanner.feed(piece)
    assert scanner.open == ['"', "$("]
    scanner = CommandScanner()
    scanner.feed("$( (a) $((1 + (2)) ")
    assert scanner.open == ["$(", "(("]


def test_payload_has_the_command_as_it_was_written() -> None:
    text = "printf '%s\\n' \"größe\" 名前 $'\\t' <<< \"x\" | cat && echo *"
    (batch,) = encode_batches(load(text.encode()).specs, b"c", 0)
    work = decode_payload(batch.text_of(0), EXEC)
    assert work.argv == ["sh", "-c", text]  # type: ignore[union-attr]
