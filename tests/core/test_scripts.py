"""Scripts among the words of a command, and places in them where a value can be quoted."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskyard.calls import scripts

#: Commands whose words `CODE` are read as code by an interpreter.
SCRIPTS = [
    ["sh", "-c", "CODE", "sh", "word"],
    ["/bin/bash", "-lc", "CODE"],
    ["bash", "-euo", "pipefail", "-c", "CODE"],
    ["bash", "--rcfile", "f", "-O", "extglob", "-ec", "--", "CODE"],
    ["zsh", "+x", "-c", "CODE", "word"],
    ["env", "-i", "A=b", "nice", "-n", "5", "dash", "-c", "CODE"],
    ["timeout", "5", "nohup", "ksh", "-c", "CODE"],
    ["find", ".", "-exec", "sh", "-c", "CODE", "sh", "word", ";"],
    ["./wrapper", "--flag", "sh", "-c", "CODE"],
    ["python3.11", "-Bc", "CODE", "word"],
    ["python3", "-cCODE"],
    ["perl", "-lane", "CODE", "word"],
    ["ruby", "-e", "CODE", "-e", "CODE", "word"],
    ["node", "--eval=CODE"],
    ["node", "-p", "CODE"],
    ["php", "-r", "CODE", "word"],
    ["Rscript", "-e", "CODE"],
    ["fish", "-c", "CODE"],
    ["su", "-", "user", "-c", "CODE"],
    ["flock", "word", "-c", "CODE"],
    ["awk", "CODE", "word"],
    ["gawk", "-F", ",", "-v", "a=b", "CODE", "word"],
    ["gawk", "-e", "CODE", "word"],
    ["LC_ALL=C", "awk", "--", "CODE", "word"],
    ["ssh", "word", "CODE", "CODE"],
    ["timeout", "5", "ssh", "-p", "22", "-vo", "A=b", "word", "CODE"],
    ["env", "-S", "CODE"],
    ["env", "-iSCODE"],
    ["sbatch", "--wrap=CODE"],
    ["watch", "-n", "1", "CODE"],
]

#: Commands that have no script among their words.
WITHOUT_SCRIPTS = [
    ["sh", "script.sh", "-c", "word"],
    ["bash", "-s", "word"],
    ["sh", "-c"],
    ["python3", "script.py", "-c", "word"],
    ["perl", "script.pl", "-e", "word"],
    ["awk", "-f", "program.awk", "word"],
    ["ssh", "word"],
    ["grep", "ssh", "word", "word"],
    ["grep", "-r", "awk", "word"],
    ["watch", "-x", "ls", "word"],
    ["echo", "python3", "word"],
]


@pytest.mark.parametrize("words", [*SCRIPTS, *WITHOUT_SCRIPTS], ids=" ".join)
def test_words_that_are_code_are_found(words: list[str]) -> None:
    code = [place for place, word in enumerate(words) if "CODE" in word]
    assert [*scripts.scripts_in(words)] == code


#: Beginnings of scripts after which a value can be quoted.
SAFE = [
    "",
    "echo ",
    "echo a",
    "x=",
    "echo 'a' \"b\" ",
    'echo "$HOME ${x%.*} $(date) `date` \\" 5$" ',
    "echo $x ${y} $1 $# $(date +%s) `date` ",
    'n="$(basename "$f" .txt)"; cp ',
    "x=$(basename ",
    "a && b || ",
    "a | b > ",
    "cat < ",
    "echo 2>&1 ",
    "{ ",
    "f() { ",
    "(cd a; ",
    "if true; then ",
    "case x in a) ",
    "# it's a comment\necho ",
    "echo a#b ",
    "eval x; echo ",
    "[ -f ",
    "[[ -f x ]] && echo ",
    "awk '{print $1}' ",
    "python3 -c 'x' ",
    "sh -c 'echo \"$1\"' sh ",
    "ssh ",
    "grep ssh ",
]

#: Beginnings of scripts after which a value would be code, or might be.
UNSAFE = {
    "echo '": "within '…'",
    'echo "': 'within "…"',
    'echo "$(cat ': 'within "…"',
    "echo `cat ": "within `…`",
    "cat <<END\n": "after <<",
    "cat <<< ": "after <<",
    "eval ": "after eval",
    "x=1 eval 2>&1 ": "after eval",
    "trap ": "after trap",
    "[[ ": "after [[",
    "echo \\": "after a backslash",
    "# ": "in a comment",
    "echo $((": "in or after arithmetic",
    "((x=": "in or after arithmetic",
    "echo ${x:-": "within or after ${…}",
    "echo $'": "after $",
    "a=(": "in or after an array",
    "echo a\\\n#'": "after a backslash",
    "a[": "at this place",
    "a[0 + ": "at this place",
    'echo "$(case x in a) echo "': 'within "…"',
    "cd x && bash -euo pipefail -c ": "in the script of bash",
    "ssh host ": "in the script of ssh",
    "if true; then awk ": "in the script of awk",
    "python3 -c": "in the script of python3",
}


@pytest.mark.parametrize("before", SAFE)
def test_value_can_be_quoted_after(before: str) -> None:
    assert scripts.problem_after(before) is None


@pytest.mark.parametrize(("before", "problem"), UNSAFE.items())
def test_value_can_not_be_quoted_after(before: str, problem: str) -> None:
    assert scripts.problem_after(before) == problem


VALUES = st.text(
    st.one_of(st.sampled_from("'\"`$(){}[]<>|&;#\\!*?~=-\n\t 2a"), st.characters(codec="utf-8")),
    max_size=20,
).filter(lambda text: "\0" not in text)


@pytest.mark.parametrize("shell", ["sh", "bash"])
@settings(max_examples=25, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=20))
def test_quoted_value_is_one_word(shell: str, values: list[str]) -> None:
    script = "".join(f"printf '%s\\0' x{scripts.quote(value)}y\n" for value in values)
    done = subprocess.run([shell, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [f"x{value}y" for value in values]
    assert [shlex.split(scripts.quote(value)) for value in values] == [[one] for one in values]


#: Leaves a file wherever a part of it runs.
HOSTILE = "$(>RAN)`>RAN`;>RAN\n>RAN\n';>RAN;'\";>RAN;\"|>RAN #"

PARTS = [
    *("echo ", "'", '"', "`", "$(", ")", "(", "{ ", "\\", "\n", "#", " # ", "$x", "${x:-", "$(("),
    *("))", "((", "<<E\n", "<", ">f ", "2>&1 ", " && ", ";", "case x in x) ", "$", "it's", "x="),
    *("[[ ", "[ ", "]", "eval ", " if true; then ", "!", "=(", "a[", "$["),
]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.sampled_from(PARTS), max_size=8),
    after=st.lists(st.sampled_from(PARTS), max_size=3),
)
def test_no_value_runs_in_a_script_that_is_accepted(
    shell: str, before: list[str], after: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    start = "".join(before)
    if scripts.problem_after(start) is not None:
        return
    directory: Path = tmp_path_factory.mktemp("script")
    script = start + scripts.quote(HOSTILE) + "".join(after)
    nothing = subprocess.DEVNULL
    subprocess.run([shell, "-c", script], cwd=directory, stdin=nothing, check=False)
    assert not (directory / "RAN").exists(), script
