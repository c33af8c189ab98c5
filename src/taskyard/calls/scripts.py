"""The words of a command that an interpreter reads as code, such as the script of `sh -c`.

A value that is put into such a word could run as code. Interpreters are found by their names
anywhere in a command, so also behind `env`, `timeout` or `find -exec`. Decides as well whether a
value can be quoted at a place of a shell's script. Is careful: a place that is not certain is
refused. Runs nothing.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Shells whose single quotes take all characters as they are.
_SHELLS: Final = ("sh", "bash", "rbash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh")

#: Words that a program can follow, beside assignments. Another word makes it an argument, such as
#: `ssh` in `grep ssh FILE`.
_STARTERS: Final = re.compile(
    r"(?:.*/)?(?:env|nice|timeout|time|nohup|setsid|stdbuf|ionice|chrt|taskset|sudo|doas|xargs|find|"
    r"flock|strace|srun|mpirun|mpiexec|sshpass|busybox|unshare|exec|command|builtin|"
    r"if|then|elif|else|while|until|do|[!{]|\w+=.*)",
    re.DOTALL,
)

#: Options of shells that take the next word.
_SHELL_WORD_OPTIONS: Final = ("--rcfile", "--init-file")

_AS_A_WORD: Final = "give it as a word of its own"


class Script(NamedTuple):
    """An interpreter whose script is a word of a command."""

    #: The interpreter, for messages.
    program: str
    #: How the script gets a value safely.
    hint: str
    #: Whether values can be quoted for it, see `problem_after`.
    is_shell: bool = False


class _Interpreter(NamedTuple):
    """How a program takes code in its arguments."""

    #: Options whose value is code, as a pattern. The value is what follows, or the next word.
    code: re.Pattern[str] | None
    #: A command that takes a value safely.
    right_form: str = ""
    #: Options that take the next word, as a pattern.
    takes_word: re.Pattern[str] = re.compile(r"(?!)")
    #: Options after which no operand is code.
    takes_file: re.Pattern[str] = re.compile(r"(?!)")
    #: The operands that are code: `first`, `all` or none.
    operands: str = ""
    #: Operands before these.
    operands_before: int = 0
    #: Whether options may follow operands.
    permutes: bool = False


_CODE_E: Final = re.compile(
    r"(?:-[A-Za-z0-9]*[eE]|--eval=?|--print=?|-[A-Za-z]*p(?=$))(.*)", re.DOTALL
)
_COMMAND_C: Final = re.compile(r"(?:-[A-Za-z]*c|--command=?|--session-command=?)(.*)", re.DOTALL)

_PYTHON: Final = _Interpreter(
    re.compile(r"-[A-Za-z]*c(.*)", re.DOTALL), "python3 -c 'import sys; print(sys.argv[1])' {}"
)
_AWK: Final = _Interpreter(
    re.compile(r"(?:-e|--source=?)(.*)", re.DOTALL),
    "awk 'BEGIN { print ARGV[1] }' {}",
    takes_word=re.compile(r"-[Fvil]|--(?:field-separator|assign|include|load)"),
    takes_file=re.compile(r"-[fE].*|--(?:file|exec)(?:=.*)?"),
    operands="first",
)
_SSH: Final = _Interpreter(
    None,
    """bash -c 'ssh HOST "echo ${1@Q}"' bash {}""",
    takes_word=re.compile(r"-[46AaCfGgKkMNnqsTtVvXxYy]*[BbcDEeFIiJLlmOopPQRSWw]"),
    operands="all",
    operands_before=1,
)
_NODE: Final = _Interpreter(_CODE_E, "node -e 'console.log(process.argv[1])' {}")
_OTHER_SHELL: Final = _Interpreter(_COMMAND_C, """sh -c 'echo "$1"' sh {}""")

#: Programs other than shells of the usual syntax.
_INTERPRETERS: Final[dict[str, _Interpreter]] = {
    "python": _PYTHON,
    "pypy": _PYTHON,
    "perl": _Interpreter(_CODE_E, "perl -e 'print $ARGV[0]' {}"),
    "ruby": _Interpreter(_CODE_E, "ruby -e 'puts ARGV[0]' {}"),
    "node": _NODE,
    "nodejs": _NODE,
    "bun": _NODE,
    "php": _Interpreter(re.compile(r"-[BrRE](.*)", re.DOTALL), "php -r 'echo $argv[1];' {}"),
    "ssh": _SSH,
    **dict.fromkeys(("lua", "luajit", "julia", "R", "Rscript", "groovy"), _Interpreter(_CODE_E)),
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk", "original-awk"), _AWK),
    # Other shells, and programs that give a text to a shell.
    **dict.fromkeys(("fish", "csh", "tcsh", "pwsh", "nu", "xonsh", "elvish"), _OTHER_SHELL),
    **dict.fromkeys(
        ("su", "runuser", "sg", "script", "flock"), _OTHER_SHELL._replace(permutes=True)
    ),
    "env": _Interpreter(re.compile(r"(?:-[0iv]*S|--split-string=?)(.*)", re.DOTALL)),
    "sbatch": _Interpreter(re.compile(r"--wrap=?(.*)", re.DOTALL), _OTHER_SHELL.right_form),
    "watch": _Interpreter(
        None,
        """watch -x sh -c 'echo "$1"' sh {}""",
        takes_word=re.compile(r"-[a-z]*[nq]|--(?:interval|equexit)"),
        takes_file=re.compile(r"-[a-z]*x|--exec"),
        operands="all",
    ),
}


def scripts_in(words: Sequence[str]) -> dict[int, Script]:
    """Return the scripts among the words of a command, by their places."""
    found: dict[int, Script] = {}
    for place, word in enumerate(words):
        program = word.rpartition("/")[2]
        if program in _SHELLS:
            script = _shell_script_place(words, place + 1)
            if script is not None:
                hint = f"""write {program} -c 'echo "$1"' {program} {{}}"""
                found.setdefault(script, Script(program, hint, is_shell=True))
        elif interpreter := _INTERPRETERS.get(re.sub(r"[\d.]+$", "", program)):
            if interpreter.operands and place and not _STARTERS.fullmatch(words[0]):
                continue
            hint = f"write {interpreter.right_form}" if interpreter.right_form else _AS_A_WORD
            for code in _code_places(interpreter, words, place + 1):
                found[code] = Script(program, hint)
    return found


def _shell_script_place(words: Sequence[str], place: int) -> int | None:
    """Return the place of the script of a shell whose arguments begin at a place."""
    has_script = False
    while place < len(words):
        word = words[place]
        if not word.startswith(("-", "+")) or word in ("-", "--", "+"):
            place += word in ("-", "--")
            break
        if word.startswith("--"):
            place += word in _SHELL_WORD_OPTIONS
        else:
            has_script |= word[0] == "-" and "c" in word
            place += word.count("o") + word.count("O")  # each takes the name of an option
        place += 1
    return place if has_script and place < len(words) else None


def _code_places(interpreter: _Interpreter, words: Sequence[str], place: int) -> list[int]:
    """Return the places of code in the arguments that begin at a place."""
    found: list[int] = []
    has_file = False
    while place < len(words):
        word = words[place]
        if word == "--" or not (word.startswith("-") or interpreter.permutes):
            break
        code = interpreter.code.fullmatch(word) if interpreter.code else None
        if code is not None:
            place += not code[1]
            found.append(place)
        elif interpreter.takes_word.fullmatch(word):
            place += 1
        has_file |= code is not None or interpreter.takes_file.fullmatch(word) is not None
        place += 1
    place += place < len(words) and words[place] == "--"
    if interpreter.operands == "first" and not has_file:
        found.append(place)
    elif interpreter.operands == "all" and not has_file:
        found += range(place + interpreter.operands_before, len(words))
    return [place for place in found if place < len(words)]


# Places in the script of a shell.

#: The expansions of a parameter, without quotes or other expansions inside.
_PARAMETER: Final = r"""\$(?:[A-Za-z_]\w*|[\d@*\#?$!-]|\{[^'"`\\{}$(]*\})"""

#: The inside of `$(…)`, without parentheses and comments. `case` has parentheses.
_INNER: Final = (
    rf"""(?:[^'"`\\()<$\#]|'[^']*'|"(?:[^"`\\$]|{_PARAMETER})*"|{_PARAMETER}|(?<=\w)\#)*"""
)
_SUBSTITUTION: Final = rf"\$\((?![^)]*\bcase\b){_INNER}\)|`[^`\\'\"]*`"
_DOUBLE_QUOTED: Final = rf"""(?:[^"\\`$]|\\.|{_PARAMETER}|{_SUBSTITUTION}|\$(?=[\s"]))*"""

#: A part of a script that ends outside of quotes for certain.
_TOKEN: Final = re.compile(
    r"""[<>][&|]|&>|(?P<separator>[;&|\n)]|\((?!\())"""
    rf"""|'[^']*'|"{_DOUBLE_QUOTED}"|{_PARAMETER}|{_SUBSTITUTION}"""
    r"""|\\(?:\n(?!\#)|[^\n])"""
    r"""|(?:^|(?<=[\s;&|)]))\#[^\n]*(?=\n)|(?<=[^\s;&|()<>])\#"""
    r"""|<(?!<)|\$(?=\s)|=(?!\()|[^\\'"`$\#<;&|\n()=]""",
    re.DOTALL,
)

#: Commands that read their arguments as code or as arithmetic.
_EVALUATORS: Final = ("eval", "trap", "alias", "let", "[[")

#: A subscript that is not closed, which shells read as arithmetic.
_SUBSCRIPT: Final = re.compile(r"[\w$}@*#?!-]\[[^\]]*$")

_PLACES: Final = (
    ("'", "within '…'"),
    ('"', 'within "…"'),
    ("`", "within `…`"),
    ("$((", "in or after arithmetic"),
    ("((", "in or after arithmetic"),
    ("${", "within or after ${…}"),
    ("<<", "after <<"),
    ("#", "in a comment"),
    ("\\", "after a backslash"),
    ("$", "after $"),
    ("=(", "in or after an array"),
)

#: Stands for a value in the text before another value.
VALUE: Final = "\N{OBJECT REPLACEMENT CHARACTER}"


def problem_after(before: str) -> str | None:
    """Return why a value can't be quoted after the beginning of a shell's script."""
    place, command = 0, 0
    while place < len(before):
        token = _TOKEN.match(before, place)
        if token is None or token.end() == place:
            rest = before[place:]
            if rest.startswith("$(") and not rest.startswith("$(("):
                return problem_after(rest[2:])  # commands again
            return next(
                (text for start, text in _PLACES if rest.startswith(start)), "at this place"
            )
        place = token.end()
        if token["separator"]:
            command = place
    if before.endswith("\\\n") or _SUBSCRIPT.search(before):
        return "at this place"
    try:
        words = shlex.split(before[command:] + VALUE)
    except ValueError:  # quotes within a substitution within quotes
        return "at this place"
    for word in words[:-1]:
        if word in _EVALUATORS:
            return f"after {word}"
    inner = scripts_in(words).get(len(words) - 1)
    return f"in the script of {inner.program}" if inner else None


def quote(value: str) -> str:
    """Quote a value for a shell, always with quotes: `2` before `>` would mean something else."""
    return "'" + value.replace("'", "'\"'\"'") + "'"
