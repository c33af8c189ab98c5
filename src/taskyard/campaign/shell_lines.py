"""Shell lines: a command per line, each run by a shell of its own.

A task runs `sh -c LINE`, or the shell of the `#!` in the first line. Blank lines and comments are
skipped and counted. A line that ends in a backslash is joined with the next one. Certain errors
are found: half of a command, and text that every POSIX shell rejects.

A task is named by the text of its line, never by its number, so lines can be inserted and removed.
Equal lines are counted in order: the first has the plain name, the next one ends in `-2`. The
numbers of a file's lines are a list of these names, in parts that the broker keeps. Does not decide
whether a file has shell lines.
"""

from __future__ import annotations

import re
import shlex
import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.campaign.lines import (
    InvalidCampaign,
    InvalidRow,
    numbered_lines,
    open_input,
    text_error,
    text_of,
)
from taskyard.core.limits import NAME_BYTES_MAX, NUMBERS_PART_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable


#: Bytes of the digest. With 4 bytes, a hundred pairs among a million lines would be equal.
DIGEST_BYTES: Final = 6

#: Characters of the first words in a name.
WORDS_CHARS_MAX: Final = 32

#: Characters of a line that are searched for words: enough for the first words of any command.
_SEARCHED_CHARS: Final = 64

#: Lines in a part of the numbers: their names fit a part even if nothing can be compressed.
LINES_PER_PART: Final = 1024
_PART_TEXT_BYTES_MAX: Final = LINES_PER_PART * NAME_BYTES_MAX

#: A name as `line_name` makes it, with its digest.
_LINE_NAME: Final = re.compile(rf".*-([0-9a-f]{{{2 * DIGEST_BYTES}}})(?:-[1-9]\d*)?", re.DOTALL)

#: The word of a line without any letter or digit, such as `((!))`.
_NO_WORDS: Final = "line"

_WORDS: Final = re.compile(r"[\w.]+")

#: ASCII characters that are not part of a word become spaces. Three times as fast as `_WORDS`.
_ASCII_WORDS: Final = bytes(code if _WORDS.match(chr(code)) else 32 for code in range(256))


def line_name(text: str, occurrence: int = 1) -> str:
    """Return the name of a line: its first words and a digest, as in `gzip-a.txt-0fa31c88d2e7`.

    `occurrence` counts equal lines from 1. Undecodable bytes may be surrogates.
    """
    return _name(text, _digest(text), occurrence)


def is_line_name(name: str) -> bool:
    """Return whether a task may be named by the text of a line."""
    return _LINE_NAME.fullmatch(name) is not None


def is_name_of(name: str, text: str) -> bool:
    """Return whether a name is that of a line with this text, or of an equal line."""
    found = _LINE_NAME.fullmatch(name)
    return found is not None and found[1] == _digest(text).hex()


class LineNames:
    """Names the lines of one file, in its order. Costs about 80 bytes for each, of any length."""

    def __init__(self) -> None:
        #: How often each digest was seen.
        self._counts: dict[int, int] = {}

    def next_name(self, text: str) -> str:
        """Return the name of the next line."""
        digest = _digest(text)
        key = int.from_bytes(digest)
        occurrence = self._counts[key] = self._counts.get(key, 0) + 1
        return _name(text, digest, occurrence)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=DIGEST_BYTES).digest()


def _name(text: str, digest: bytes, occurrence: int) -> str:
    name = f"{_first_words(text[:_SEARCHED_CHARS])}-{digest.hex()}"
    return name if occurrence == 1 else f"{name}-{occurrence}"


def _first_words(text: str) -> str:
    if text.isascii():
        words = b"-".join(text.encode().translate(_ASCII_WORDS).split()).decode()
    else:
        words = "-".join(_WORDS.findall(text))
    return words.lstrip("-._")[:WORDS_CHARS_MAX].rstrip("-._") or _NO_WORDS


# Numbers of lines.


def encode_numbers(named: Iterable[tuple[int, str]]) -> list[bytes]:
    """Return the parts of a file's numbers, from the lines that are tasks and their names."""
    by_line = dict(named)
    starts = range(1, max(by_line, default=0) + 1, LINES_PER_PART)
    return [
        _encode_part([by_line.get(line, "") for line in range(start, start + LINES_PER_PART)])
        for start in starts
    ]


def _encode_part(names: list[str]) -> bytes:
    text = "\n".join(names).rstrip("\n").encode(errors="surrogateescape")
    part = zlib.compress(text)
    assert len(part) <= NUMBERS_PART_BYTES_MAX  # noqa: S101  # by the length of line names
    return part


def part_of(line: int) -> int:
    """Return the index of the part that has a line."""
    return (line - 1) // LINES_PER_PART


def decode_part(part: bytes) -> list[str]:
    """Return the names of the lines of a part. Empty: a line without a task.

    Raises `ValueError`: another program may have written it.
    """
    try:
        text = zlib.decompressobj().decompress(part, _PART_TEXT_BYTES_MAX).decode()
    except zlib.error as error:
        raise ValueError(str(error)) from None
    return text.split("\n")


_ONE_LINE: Final = "a command is one line, or lines that end in a backslash"

#: Words and operators that never begin a command.
_INNER_PART: Final = re.compile(
    r"(?:do|done|then|else|elif|fi|esac|\}|\)|;;?|&&?|\|\|?)(?=[\s;&|)]|$)"
)

#: A word that begins a block, with the word that ends it.
_BLOCK_START: Final = re.compile(r"(?:[({!]\s+)*(for|while|until|select|if|case)\s")
_BLOCK_ENDS: Final = {"if": "fi", "case": "esac"}

#: Operators that need another command after them. A backslash makes them plain text.
_OPEN_END: Final = re.compile(r"(?<![\\&|])(&&|\|\|?)\s*$")

#: The worker ends the processes that a command leaves behind. `setsid` starts one on purpose.
_BACKGROUND_END: Final = re.compile(r"(?<![\\&>|<])&\s*$")
_BACKGROUND_HINT: Final = "it would be stopped at once, so leave that out, or add `wait`"

_BASH_REDIRECTION: Final = "`&>` means another thing in sh (begin the file with #!/bin/bash)"

#: A text without any of the problems below: most commands, in a tenth of the time.
_SURELY_WHOLE: Final = re.compile(
    r"""(?!(?:do|done|then|else|elif|fi|esac|for|while|until|select|if|case)\b|[({!;)}&|])"""
    r"""(?:[^'"`\\#&|<($]++|'[^']*+'|"[^"`\\$]*+"|\$[\w{?@*!-]|>&(?=[\d-])"""
    r"""|(?:&&|\|\|?)(?=\s*[^\s&|]))*"""  # not *+, with which Python 3.11.2 skips the lookahead
)

# The next place that changes the state, by state. `#` begins a comment only before a word.
_COMMAND: Final = re.compile(
    r"""\\.|\$'|'|"|`|\$\(\(|\$\(|\(\(|\(|\)|&&|&>|<<<|<<-?(?=\s*["'\\]?[A-Za-z_])|(?:^|(?<=[\s;&|(]))\#""",
    re.DOTALL,
)
_ARITHMETIC: Final = re.compile(r"""\\.|'|"|`|\$\(\(|\$\(|\(|\)""", re.DOTALL)
_STATES: Final = {
    "": _COMMAND,
    "$(": _COMMAND,
    "`": _COMMAND,
    "((": _ARITHMETIC,
    "'": re.compile("'"),
    "$'": re.compile(r"\\.|'", re.DOTALL),
    '"': re.compile(r"""\\.|"|`|\$\(\(|\$\(""", re.DOTALL),
}

#: Texts that open a state, or two at once.
_OPENERS: Final = {one: [one] for one in ("'", "$'", '"', "`", "$(")} | {
    one: ["((", "(("] for one in ("$((", "((")
}

#: States in which parentheses come in pairs.
_NESTED_STATES: Final = ("$(", "((")

_CLOSERS: Final = {"'": "'", "$'": "'", '"': '"', "`": "`", "$(": ")", "((": ")"}


class CommandScanner:
    """Reads a command in pieces, and keeps its open quotes and substitutions."""

    def __init__(self) -> None:
        #: The innermost comes last.
        self.open: list[str] = []
        self.in_comment = False
        self.has_here_document = False
        self.has_bash_redirection = False

    def feed(self, text: str) -> None:
        """Read the next piece of a command."""
        place = 0
        while not self.in_comment:
            state = self.open[-1] if self.open else ""
            found = _STATES[state].search(text, place)
            if found is None:
                return
            place = found.end()
            self._apply(state, found[0])

    def _apply(self, state: str, found: str) -> None:
        if _CLOSERS.get(state) == found:
            self.open.pop()
        elif found in _OPENERS:
            self.open += _OPENERS[found]
        elif found == "(" and state in _NESTED_STATES:
            self.open.append(state)  # closed by a parenthesis of its own
        elif found == "#":
            self.in_comment = True
        elif found == "&>":
            self.has_bash_redirection = True
        elif found.startswith("<<") and found != "<<<":
            self.has_here_document = True

    def continues(self, text: str) -> bool:
        """Return whether a piece that was read continues on the next line: it ends in a backslash.

        In a comment or in single quotes a backslash is plain text.
        """
        backslashes = len(text) - len(text.rstrip("\\"))
        in_quotes = bool(self.open) and self.open[-1] == "'"
        return backslashes % 2 == 1 and not self.in_comment and not in_quotes


def syntax_error(text: str, *, is_posix: bool = True) -> str | None:
    """Return why a text is not one whole command, or None if that is not certain.

    `is_posix`: the shell may lack the extensions of bash.
    """
    if _SURELY_WHOLE.fullmatch(text) is not None:
        return None
    problem = _block_error(text)
    if problem is not None:
        return f"{problem} ({_ONE_LINE})"
    if "#" not in text and "setsid" not in text and _BACKGROUND_END.search(text):
        return f"ends with `&` ({_BACKGROUND_HINT})"
    return _quote_error(text, is_posix=is_posix)


def _block_error(text: str) -> str | None:
    """Return which block or chain of commands is not complete."""
    if part := _INNER_PART.match(text):
        return f"`{part[0]}` belongs to a command of several lines"
    if block := _BLOCK_START.match(text):
        end = _BLOCK_ENDS.get(block[1], "done")
        if not re.search(rf"\b{end}\b", text) and "}" not in text:
            return f"`{block[1]}` without `{end}`"
    last = None if "#" in text else _OPEN_END.search(text)
    return f"ends with `{last[1]}`" if last else None


def _quote_error(text: str, *, is_posix: bool) -> str | None:
    """Return which quote, substitution or redirection is not complete."""
    scanner = CommandScanner()
    scanner.feed(text)
    if scanner.open:
        return f"{scanner.open[0]} is never closed ({_ONE_LINE})"
    if scanner.has_here_document:
        return f"a here-document has no lines ({_ONE_LINE})"
    return _BASH_REDIRECTION if is_posix and scanner.has_bash_redirection else None


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Line = tuple[int, bytes | InvalidRow]

#: Linux accepts no longer argument of a program (MAX_ARG_STRLEN, with its final NUL).
COMMAND_BYTES_MAX: Final = 128 * 1024 - 1

#: Shells whose lines this module can join and check.
SHELLS: Final = ("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh")

#: Shells that may lack the extensions of bash.
_POSIX_SHELLS: Final = ("sh", "dash", "ash")

SHEBANG: Final = b"#!"


class SkippedLines(Struct):
    """How many lines without a command were skipped."""

    blank: int = 0
    comments: int = 0

    def take(self, command: bytes) -> bool:
        """Count a line that has no command. Return whether it has none."""
        if command.startswith(b"#"):
            self.comments += 1
        elif not command or command.isspace():
            self.blank += 1
        else:
            return False
        return True


def rows(lines: Iterable[Line], label: str, skipped: SkippedLines) -> Iterator[tuple[int, object]]:
    """Yield the command of each line as a task, with its number. Count skipped lines."""
    names = LineNames()
    shell, is_posix = ["sh"], True
    for number, line in joined(lines):
        if isinstance(line, InvalidRow):
            yield number, line
            continue
        command = line.lstrip(b" \t")
        if number == 1 and command.startswith(SHEBANG):
            shell = shell_of(command, label)
            is_posix = shell[0].rpartition("/")[2] in _POSIX_SHELLS
        elif not skipped.take(command):
            yield number, _row(command, shell, names, is_posix=is_posix)


def count_skipped(path: str) -> SkippedLines:
    """Count the blank lines and comments of a file that other processes read."""
    skipped = SkippedLines()
    with open_input(path) as stream:
        for number, line in joined(numbered_lines(stream, path)):
            if isinstance(line, bytes) and not (number == 1 and line.startswith(SHEBANG)):
                skipped.take(line.lstrip(b" \t"))
    return skipped


def command_on(path: str, number: int) -> str | None:
    """Return the command that begins on a line of a file. None: the file can't be read.

    Empty: a blank line, a comment, or a part of the command before it.
    """
    try:
        with open_input(path) as stream:
            for line_number, line in joined(numbered_lines(stream, path)):
                if line_number == number and isinstance(line, bytes):
                    command = line.lstrip(b" \t")
                    return "" if SkippedLines().take(command) else text_of(command)
    except InvalidCampaign:
        return None
    return ""


def shell_of(line: bytes, label: str) -> list[str]:
    """Return the shell of a `#!` line, with its options. Raises `InvalidCampaign`."""
    try:
        words = shlex.split(text_of(line.removeprefix(SHEBANG)))
    except ValueError:
        words = []
    if words and words[0].rpartition("/")[2] == "env":
        words = words[2:] if words[1:2] == ["-S"] else words[1:]
    if not words or words[0].rpartition("/")[2] not in SHELLS:
        program = words[0] if words else text_of(line)
        raise InvalidCampaign(
            f"{label}:1: {program!r} is not a shell that runs commands line by line "
            f"(known: {', '.join(SHELLS)})"
        )
    return words


def _row(command: bytes, shell: list[str], names: LineNames, *, is_posix: bool) -> object:
    """Return the task of a command, or the reason why there is none."""
    if len(command) > COMMAND_BYTES_MAX:
        reason = f"the command has {len(command)} bytes, the limit is {COMMAND_BYTES_MAX}"
        return InvalidRow(reason, text_of(command))
    try:
        text = command.decode()
    except UnicodeDecodeError:
        return InvalidRow(text_error(command) or "", text_of(command))
    problem = text_error(command) if "\0" in text else syntax_error(text, is_posix=is_posix)
    if problem is not None:
        return InvalidRow(problem, text)
    return {"name": names.next_name(text), "argv": [*shell, "-c", text]}


def joined(lines: Iterable[Line]) -> Iterator[Line]:
    """Join lines that end in a backslash. A command has the number of its first line."""
    held: _HeldCommand | None = None
    for number, line in lines:
        if isinstance(line, InvalidRow):
            yield (number if held is None else held.number), line
            held = None
        elif held is None:
            if line.endswith(b"\\"):
                held = _HeldCommand(number)
                if held.add(line):
                    continue
                held = None
            yield number, line
        elif not held.add(line):
            yield held.number, held.command()
            held = None
    if held is not None:
        yield held.number, held.command()


class _HeldCommand:
    """The first lines of a command that is not complete yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._scanner = CommandScanner()
        self._pieces: list[bytes] = []
        self._length = 0
        self._continues = False

    def add(self, line: bytes) -> bool:
        """Add a line. Return whether the command continues after it."""
        self._scanner.feed(line.decode("latin-1"))
        self._continues = self._scanner.continues(line.decode("latin-1"))
        if self._continues:
            line = line[:-1]
        self._length += len(line)
        # Drop pieces beyond the limit: a command without an end must not fill memory.
        if self._length - len(line) <= COMMAND_BYTES_MAX:
            self._pieces.append(line)
        return self._continues

    def command(self) -> bytes | InvalidRow:
        """Return the joined lines. A backslash at the end of the file is part of the command."""
        if self._length > COMMAND_BYTES_MAX:
            reason = f"the command has {self._length} bytes, the limit is {COMMAND_BYTES_MAX}"
            return InvalidRow(reason, text_of(self._pieces[0][:200]))
        return b"".join(self._pieces) + (b"\\" if self._continues else b"")
