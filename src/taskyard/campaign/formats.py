"""The rows of a file of any format, which its suffix or its first lines tell.

A row is `(line, raw)`: a dict for `check_task`, or an `InvalidRow`. Rows are read one by one,
except WfCommons, which is one JSON value. JSON lines and dwork's comma lines are read here, the
other formats in a module each.

Shell lines are the one format whose wrong guess does harm, because any text can be run. They need
evidence in the lines themselves, and a text that could be another thing is refused. The error names
the option that decides.
"""

from __future__ import annotations

import re
import shutil
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct, field

from taskyard.campaign import other_systems, shell_lines, tables
from taskyard.campaign.lines import (
    STDIN,
    DamagedFile,
    InvalidCampaign,
    InvalidRow,
    PeekedStream,
    Stream,
    file_label,
    numbered_lines,
    open_input,
    strip_bom,
    text_error,
    text_of,
)
from taskyard.campaign.shell_lines import SkippedLines
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Format(Enum):
    SHELL = "shell"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    WFCOMMONS = "wfcommons"
    DWORK = "dwork"
    ZMAILER = "zmailer"

    @property
    def title(self) -> str:
        """The format's name in messages."""
        return _TITLES[self]


_TITLES: Final = {
    Format.SHELL: "shell commands",
    Format.JSONL: "JSONL",
    Format.CSV: "CSV",
    Format.PARQUET: "Parquet",
    Format.WFCOMMONS: "WfCommons",
    Format.DWORK: "dwork's comma lines",
    Format.ZMAILER: "ZMailer's control file",
}

#: Suffixes that name a format. For other suffixes, such as `.json` and `.txt`, the content decides.
SUFFIXES: Final = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".tsv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".dwork": Format.DWORK,
}

#: Suffixes of scripts, whose lines depend on each other. Never run line by line by a guess.
SCRIPT_SUFFIXES: Final = (".sh", ".bash", ".ksh", ".zsh")

#: Lines that a guess reads.
LINES_READ_MAX: Final = 100

#: The share of lines that must be evident commands. A list may have a program of another machine.
EVIDENT_SHARE_MIN: Final = 0.75

FORCE_HINT: Final = f"--format {'|'.join(form.value for form in Format)} forces another"
_SHELL_HINT: Final = "--shell runs each line as a command, --format names another format"


class FormatChoice(Struct, frozen=True):
    """A format, and the reason to choose it."""

    format: Format
    #: A sentence without its full stop. Empty: the user named the format.
    reason: str = ""
    by_content: bool = False

    def explanation(self) -> str:
        """Return the assumption and how to change it. Empty if the user named the format."""
        if not self.reason:
            return ""
        return f"read as {self.format.title}, because {self.reason} ({FORCE_HINT})"


def choose_by_suffix(path: str) -> FormatChoice | None:
    """Return the format that a file's name decides, or None if its content must."""
    suffix = _suffix(path)
    form = SUFFIXES.get(suffix)
    return None if form is None else FormatChoice(form, f"its name ends in {suffix}")


def _suffix(path: str) -> str:
    return Path(path.lower().removesuffix(".gz")).suffix


def choose_by_content(path: str, start: bytes, *, is_whole: bool) -> FormatChoice:
    """Return the format that the first bytes of a file suggest. Raises `InvalidCampaign`.

    `is_whole`: the file has no more bytes.
    """
    if start.startswith(tables.MAGIC):
        return FormatChoice(Format.PARQUET, "it begins with PAR1", by_content=True)
    if other_systems.START.match(start):
        reason = "it begins like a transport control file"
        return FormatChoice(Format.ZMAILER, reason, by_content=True)
    label = file_label(path)
    text = strip_bom(start, label)
    if _BINARY.search(text):
        raise _unknown_format(label, 1, "is binary, or has NUL bytes")
    whole_lines = text.split(b"\n")
    if not is_whole and len(whole_lines) > 1:
        whole_lines.pop()
    if whole_lines[0].startswith(shell_lines.SHEBANG):
        shell_lines.shell_of(whole_lines[0].rstrip(), label)
    numbered = enumerate([line.rstrip(b"\r") for line in whole_lines], start=1)
    lines = [
        (number, line.decode(errors="surrogateescape").strip())
        for number, line in shell_lines.joined(numbered)
        if isinstance(line, bytes) and line.strip() and not line.lstrip().startswith(b"#")
    ]
    form, reason = _guess(label, _suffix(path), lines[:LINES_READ_MAX])
    return FormatChoice(form, reason, by_content=True)


#: Control characters that no text has. Escape sequences of colours are text.
_BINARY: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")

#: Lines with their numbers, without blank lines and comments.
_Lines = list[tuple[int, str]]


def _unknown_format(label: str, number: int, problem: str) -> InvalidCampaign:
    return InvalidCampaign(f"{label}:{number}: the file {problem} ({_SHELL_HINT})")


def _guess(label: str, suffix: str, lines: _Lines) -> tuple[Format, str]:
    """Return the format of these lines and the reason."""
    if not lines:
        return Format.SHELL, "it has no lines but comments"
    texts = [line for _, line in lines]
    guess = _guess_json(label, lines) or _guess_table(texts[0])
    if guess is None:
        _refuse_other_text(label, lines, _OTHER_TEXT)
        guess = _guess_comma_lines(texts)
    if guess is not None:
        return guess
    if suffix in SCRIPT_SUFFIXES:
        problem = f"is a script ({suffix}), whose lines would run at the same time and on their own"
        raise _unknown_format(label, 1, problem)
    _refuse_other_text(label, lines, _TABLES)
    _refuse_script(label, lines)
    evident = sum(is_evident_command(line) for line in texts)
    if evident < EVIDENT_SHARE_MIN * len(texts):
        number = next(number for number, line in lines if not is_evident_command(line))
        raise _unknown_format(label, number, "is in no format that can be recognized")
    return Format.SHELL, "its lines look like commands"


# JSON.

#: A brace and a space begin a group of commands. JSON has a quote or nothing there.
_COMMAND_GROUP: Final = re.compile(r"""\{\s+[^\s"'}]""")

#: `[section]` of TOML and of other settings.
_SECTION: Final = re.compile(r"\[\[?[A-Za-z][^\[\]]*\]\]?")

#: `[ -f x ] && …` is a command.
_TEST_COMMAND: Final = re.compile(r"\[\[?\s.*\s\]\]?(?=[\s;&|]|$)")


def _guess_json(label: str, lines: _Lines) -> tuple[Format, str] | None:
    number, line = lines[0]
    if line.startswith("{") and not _COMMAND_GROUP.match(line):
        return _guess_object(line, [line for _, line in lines])
    if line.startswith("[") and (_is_json(line) or not _TEST_COMMAND.match(line)):
        if _SECTION.fullmatch(line) and not _is_json(line):
            raise _unknown_format(label, number, "looks like a list of settings")
        raise InvalidCampaign(f"{label}:{number}: a JSON list (write one task per line, as JSONL)")
    return None


def _is_json(line: str) -> bool:
    try:
        msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return False
    return True


def _guess_object(line: str, lines: Sequence[str]) -> tuple[Format, str]:
    """Return WfCommons for a JSON document over many lines, or with a workflow, else JSONL."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        has_workflow = any('"workflow"' in one or '"schemaVersion"' in one for one in lines)
        if has_workflow or line.endswith(("{", ",", "[")):
            return Format.WFCOMMONS, "it is a JSON object over several lines"
        return Format.JSONL, "its first line begins like a JSON object"
    if "workflow" in value:
        return Format.WFCOMMONS, 'its JSON object has "workflow"'
    return Format.JSONL, "its first line is a JSON object"


# Tables and comma lines.

_TABLE_CELL: Final = re.compile(r'\s*"?[A-Za-z][\w ]*"?\s*')
_COMMA_LINE: Final = re.compile(r"[^\s,]+(\s*,\s*[^\s,]+)*")


def _guess_table(line: str) -> tuple[Format, str] | None:
    cells = re.split(r"[,;\t]", line)
    if "name" not in [cell.strip(' "') for cell in cells]:
        return None
    if not all(_TABLE_CELL.fullmatch(cell) for cell in cells):
        return None
    return Format.CSV, "its first line has a column name"


def _guess_comma_lines(lines: Sequence[str]) -> tuple[Format, str] | None:
    """Return dwork's format for lines of words without spaces, unless they may be commands."""
    fitting = [line for line in lines if _COMMA_LINE.fullmatch(line)]
    is_all = len(fitting) == len(lines)
    if any("," in line for line in fitting):
        is_mixed = 2 * len(fitting) <= len(lines) or any(map(is_evident_command, lines))
        return (Format.DWORK, "its lines are names with commas") if is_all or not is_mixed else None
    if not is_all or any(map(shutil.which, lines)):
        return None
    return Format.DWORK, "its lines are single words, and none is a program here"


# Other text.

#: Patterns of a line that is no command, and what it is a sign of.
_OTHER_TEXT: Final = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"<[?!/A-Za-z]", "XML"),
        (r"""[{\[]\s*["{\[]""", "JSON"),
        (r"---|[-*]\s", "YAML or Markdown"),
        (r"[^\s:'\"$]+:(\s|$)", "YAML or a list of settings"),
        (r"\S+\s+=(\s|$)", "a list of settings"),
        (r"[\w.,\[\]-]+\s*[=<>~!]=", "a list of packages"),
        (r"[$%]\s", "a session of a terminal"),
        (r"(import|from)\s+[\w.]+(\s+(as|import)\s.*|\s*,.*)?$", "Python"),
        (r"[>|]", "quoted text or a table"),
        (r"\w[\w.]*\(", "a program"),
        (r"[^\s$'\"`=]*[!?]+(\s|$)", "prose"),
    )
)

#: Patterns of a row of a table. Commas also separate names of dwork's lines.
_TABLES: Final = (
    (re.compile(r"""[^\s'"=$({]*,"""), "a table"),
    (re.compile(r"[^\t]+(\t[^\t]+)+$"), "a table"),
)


def _refuse_other_text(
    label: str, lines: _Lines, patterns: Sequence[tuple[re.Pattern[str], str]]
) -> None:
    """Raise `InvalidCampaign` for a line that matches a pattern."""
    for number, line in lines:
        for pattern, kind in patterns:
            if pattern.match(line) and line.split()[0] not in _COMMAND_WORDS:
                raise _unknown_format(label, number, f"looks like {kind}")


# Scripts.

#: Commands that only change their own shell. Alone on a line they have no effect.
_SHELL_STATE: Final = re.compile(
    r"(cd|export|set|source|\.|alias|unset|shopt|trap|umask|ulimit|pushd|popd|module|wait|declare"
    r"|readonly|local|function|conda\s+activate)(?=\s|$)[^;&|]*$"
)
_VALUE: Final = r"""(?:"[^"]*+"|'[^']*+'|\$\([^)]*+\)|[^\s;&|"'`$(]|\$[\w{])*+"""
_ASSIGNMENT: Final = re.compile(rf"\w+={_VALUE}(?:\s+\w+={_VALUE})*+")


def _refuse_script(label: str, lines: _Lines) -> None:
    """Raise `InvalidCampaign` for a line that is meant for the lines after it."""
    for number, line in lines:
        found = _SHELL_STATE.match(line)
        if found is not None or _ASSIGNMENT.fullmatch(line):
            what = f"`{found[1]}`" if found else "a variable that is set"
            problem = f"looks like a script: {what} has no effect on the other lines"
            raise _unknown_format(label, number, problem)


# Commands.

#: Commands that are not programs, or that begin with a mark of other text.
_COMMAND_WORDS: Final = frozenset(
    (
        *(":", "!", "(", "{", "[", "[[", "((", "eval", "exec", "exit", "command", "builtin", "cd"),
        *("for", "while", "until", "if", "case", "time", "true", "false", "test", "echo", "read"),
        *("printf", "type", "ulimit", "umask", "wait", "kill", "export", "source", "set", "trap"),
    )
)

#: Variables set for one command: `LANG=C sort x`.
_SETTINGS: Final = re.compile(r"""(?:\w+=(?:"[^"]*"|'[^']*'|[^\s"'])*\s+)+""")

#: Operators, options and variables. Prose has none of them.
_OPERATORS: Final = re.compile(
    r"""\s--?[A-Za-z0-9][\w-]*|&&|\|\||\S\s*\|\s*\w|\d?>>?\s*[\w./$&-]|\s<\s*[\w./$]|\$[\w{(]|;\s+\w|\s&$"""
)

#: A program by its path: `/usr/bin/x`, `./x`, `~/x`, `bin/x`.
_PATH: Final = re.compile(r"(?:~|[\w.-]*/)[^:]*")


def is_evident_command(line: str) -> bool:
    """Return whether a line is a command, by its syntax or because its program exists here."""
    rest = _SETTINGS.sub("", line, count=1) if _SETTINGS.match(line) else line
    if rest != line or line.startswith(("( ", "((", "$", "`")):
        return True
    word = (rest.split() or [""])[0].lstrip("(").strip("'\"")
    if word in _COMMAND_WORDS or _PATH.fullmatch(word) or shutil.which(word) is not None:
        return True
    # Words in capitals are keywords of Dockerfiles, SQL and more.
    return not word.isupper() and _OPERATORS.search(line) is not None


class FileOptions(Struct, frozen=True):
    """Options for reading a file."""

    #: None if it is to be detected.
    format: Format | None = None
    #: WfCommons only: sleep for a task's run time instead of running it.
    replay: bool = False
    #: Speed of a replay, relative to the recorded run.
    speedup: float = 1.0
    #: Value of {campaign} in a lane template.
    campaign: str = ""
    #: Keys of tasks that do not set them.
    defaults: dict[str, object] = {}


class FileReport(Struct):
    """Facts about a file beside its rows. Complete when all rows are read."""

    #: The first row sets it.
    choice: FormatChoice = FormatChoice(Format.JSONL)
    skipped: SkippedLines = field(default_factory=SkippedLines)


def rows(
    path: str, options: FileOptions, report: FileReport | None = None
) -> Iterator[tuple[int, object]]:
    """Yield the rows of a file. Raises `InvalidCampaign` if the file can't be read.

    An error in the content names the format that was assumed, unless an option named it.
    """
    report = FileReport() if report is None else report
    with open_input(path) as file:
        report.choice, stream = choose_format(path, file, options.format)
        check_options(options, report.choice.format)
        try:
            yield from _rows(path, stream, options, report)
        except DamagedFile:
            raise
        except InvalidCampaign as problem:
            explanation = report.choice.explanation()
            raise InvalidCampaign(f"{problem}; {explanation}" if explanation else problem) from None


def _rows(
    path: str, stream: Stream, options: FileOptions, report: FileReport
) -> Iterator[tuple[int, object]]:
    label = file_label(path)
    form = report.choice.format
    if form is Format.PARQUET:
        if path == STDIN:
            raise DamagedFile("stdin: Parquet can only be read from a file")
        return tables.parquet_rows(path)
    if form is Format.WFCOMMONS:
        return other_systems.wfcommons_rows(
            stream, label, replay=options.replay, speedup=options.speedup
        )
    if form is Format.ZMAILER:
        return other_systems.zmailer_rows(stream, path)
    lines = numbered_lines(stream, label)
    if form is Format.SHELL:
        return shell_lines.rows(lines, label, report.skipped)
    if form is Format.CSV:
        return tables.csv_rows(lines, label)
    return dwork_rows(lines) if form is Format.DWORK else jsonl_rows(lines)


def check_options(options: FileOptions, form: Format) -> None:
    """Raise `UserError` for options that do not apply to the format."""
    if not options.speedup > 0:
        raise UserError(f"speedup: must be more than 0, not {options.speedup}")
    if options.replay and form is not Format.WFCOMMONS:
        raise UserError(f"replay: only for WfCommons, not for {form.value}")
    if options.speedup != 1 and not options.replay:
        raise UserError("speedup: only for a replay")


def choose_format(
    path: str, stream: Stream, given: Format | None = None
) -> tuple[FormatChoice, Stream]:
    """Return the format of an open file, and a stream of its whole content.

    The format is the given one, that of the file's suffix, or that of its first lines.
    """
    choice = choose_by_suffix(path) if given is None else FormatChoice(given)
    if choice is not None:
        return choice, stream
    whole = PeekedStream(stream)
    return choose_by_content(path, whole.start, is_whole=whole.is_whole), whole


def jsonl_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """Yield the JSON object of each line, with its number. Skip blank lines."""
    decode = msgspec.json.Decoder().decode
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield number, line
        elif line and not line.isspace():
            try:
                raw = decode(line)
            except (ValueError, RecursionError) as problem:
                raw = InvalidRow(_json_error(line, problem), text_of(line))
            yield number, raw


def _json_error(line: bytes, problem: Exception) -> str:
    """Return the reason why a line is not JSON."""
    if problem_text := text_error(line):
        return problem_text
    if isinstance(problem, RecursionError):
        return "the JSON is nested too deeply"
    if line.lstrip().startswith((b"#", b"//")):
        return "not JSON; comments are not allowed"
    if "truncated" in str(problem):
        return "the JSON ends too early; a task is one line"
    return str(problem)


def dwork_rows(lines: Iterable[tuple[int, bytes | InvalidRow]]) -> Iterator[tuple[int, object]]:
    """Yield the task of each line `task,dependency,…`, with its number. Skip blank lines.

    A task has no payload: its worker acts on the name. Spaces around a name are ignored.
    """
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield number, line
        elif line and not line.isspace():
            yield number, _dwork_task(line)


def _dwork_task(line: bytes) -> object:
    if problem_text := text_error(line):
        return InvalidRow(problem_text, text_of(line))
    text = line.decode()
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        return InvalidRow("a name is missing between commas", text, words[0])
    spaced = next((word for word in words if len(word.split()) > 1), None)
    if spaced is not None:
        return InvalidRow(f"a name has spaces: {spaced!r}; a line is task,dependency,…", text)
    return {"name": words[0], "payload": "", "after": words[1:]}
