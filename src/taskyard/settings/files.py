"""The settings file: find it, parse it, and find the line of each key. Find the state directory.

Owns `taskyard.toml` as a file, and the search from the working directory upwards. Independent of
the meaning of keys.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE_NAME: Final = "taskyard.toml"

#: The path of the settings file.
CONFIG_VARIABLE: Final = "TASKYARD_CONFIG"

#: The state directory that is searched for in the parent directories.
STATE_NAME: Final = ".taskyard"

#: A larger file is not a settings file. The file is read as a whole.
FILE_BYTES_MAX: Final = 1 << 20

_HEADER = re.compile(r"\s*\[.*\]\s*(?:#.*)?")
_ASSIGNMENT = re.compile(r"(?P<name>[^=#]+)=")
_AT_LINE = re.compile(
    r"(?P<reason>.*) \(at (?:line (?P<line>\d+), column \d+|end of document)\)", re.DOTALL
)

Names = tuple[str, ...]


class InvalidSettings(UserError):
    """Settings that can't be used."""

    code = "invalid-setting"


class Document(Struct, frozen=True):
    """The content of a settings file, empty without a file."""

    file: Path | None
    content: dict[str, Any]
    #: The line of each section and key.
    lines: dict[Names, int]

    def line(self, *path: str) -> int:
        """Return the line of a key, or of the nearest section around it, or 0."""
        lengths = range(len(path), 0, -1)
        return next((self.lines[path[:n]] for n in lengths if path[:n] in self.lines), 0)

    def location(self, *path: str) -> str:
        """Return `FILE:LINE` of a key, or `FILE`."""
        line = self.line(*path)
        return f"{self.file}:{line}" if line else str(self.file)


def find(config: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the given file, else the variable's, else the nearest from here upwards."""
    if config is not None:
        return config
    named = environment.get(CONFIG_VARIABLE)
    return Path(named) if named else _search()


def _search() -> Path | None:
    """Search the working directory and its parents.

    Skip a file of another user in a directory that anyone may write, such as /tmp: it could name a
    broker that spies.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the directory was removed
        return None
    for directory in (here, *here.parents):
        if _is_ours(directory, directory / FILE_NAME):
            return Path(FILE_NAME) if directory == here else directory / FILE_NAME
    return None


def find_state() -> Path:
    """Return the nearest `.taskyard` from the working directory upwards, as git finds its own.

    It must belong to this user: another user could replace its files. The search ends at the root
    of the file system. If there is none, return the one to create here.
    """
    here = Path(STATE_NAME)
    try:
        start = Path.cwd()
        device = start.stat().st_dev
        for directory in (start, *start.parents):
            if directory.stat().st_dev != device:
                break
            state = directory / STATE_NAME
            if state.is_dir():
                return state if directory != start and _is_own(state) else here
    except OSError:  # the directory was removed, or one above it is not accessible
        pass
    return here


def _is_own(path: Path) -> bool:
    """Return whether a path belongs to this user, and the directory behind a link as well."""
    return path.lstat().st_uid == path.stat().st_uid == os.geteuid()


def _is_ours(directory: Path, file: Path) -> bool:
    try:
        found = file.stat()
        is_open = directory.stat().st_mode & stat.S_IWOTH
    except OSError:  # missing, or not accessible
        return False
    return stat.S_ISREG(found.st_mode) and (not is_open or found.st_uid == os.getuid())


def read(file: Path | None) -> Document:
    """Parse a file. Raises `InvalidSettings` if it can't be read or is not TOML."""
    if file is None:
        return Document(None, {}, {})
    text = _text_of(file)
    try:
        content = parse_toml(text)
    except ValueError as wrong:
        raise InvalidSettings(_error_text(file, text, wrong)) from None
    lines: dict[Names, int] = {}
    for path, number in _lines(text, content):
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], number)
    return Document(file, content, lines)


def _text_of(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        hint = f"check --config and {CONFIG_VARIABLE}"
        raise InvalidSettings(f"settings file {file}: {reason} ({hint})") from error
    if len(content) > FILE_BYTES_MAX:
        raise InvalidSettings(f"settings file {file}: larger than {FILE_BYTES_MAX:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as wrong:
        line = content.count(b"\n", 0, wrong.start) + 1
        raise InvalidSettings(f"{file}:{line}: not valid UTF-8") from None


def _error_text(file: Path, text: str, wrong: ValueError) -> str:
    found = _AT_LINE.fullmatch(str(wrong))
    what = "" if isinstance(wrong, TooDeep) else "invalid TOML: "
    if found is None:
        return f"{file}: {what}{wrong}"
    line = found["line"] or len(text.rstrip().splitlines())
    return f"{file}:{line}: {what}{found['reason']}"


def _lines(text: str, content: dict[str, Any]) -> Iterator[tuple[Names, int]]:
    """Yield the lines of keys and sections.

    A line of a multi-line string may look like a key. Then its line number is wrong, but no value.
    """
    section: Names = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if _HEADER.fullmatch(line):
            path = _dotted_names(line)
            if path and _is_in(content, path):
                section = path
                yield path, number
        elif found := _ASSIGNMENT.match(line):
            path = section + _dotted_names(f"{found['name']} = 0")
            if len(path) > len(section) and _is_in(content, path):
                yield path, number


def _dotted_names(line: str) -> Names:
    """Return the names in one line of TOML, outermost first. Empty if it does not parse alone."""
    try:
        inner: object = parse_toml(line)
    except ValueError:
        return ()
    path = []
    while isinstance(inner, dict | list) and inner:
        if isinstance(inner, list):
            inner = inner[0]
        else:
            ((name, inner),) = inner.items()
            path.append(name)
    return tuple(path)


def _is_in(content: object, path: Names) -> bool:
    for name in path:
        if not isinstance(content, dict) or name not in content:
            return False
        content = content[name]
    return True


# TOML of bounded depth: the standard library's parser takes hours for a key of 100,000 parts.

#: Parts of one dotted key. Settings have three.
KEY_PARTS_MAX: Final = 8

#: Lines of a file. Each line that looks like a key is parsed again for its line number.
LINES_MAX: Final = 20_000

#: Multi-line strings and comments, which contain no keys.
_LONG: Final = r'"""(?:[^\\]|\\.)*?(?:"""|\Z)' + r"|'''.*?(?:'''|\Z)" + r"|\#[^\n]*+"
#: A part of a key, or a value. An unclosed quote ends with its line.
_PART: Final = r'(?:[\w+-]++|"(?:[^"\\\n]|\\.)*+"?+' + r"|'[^'\n]*+'?+)"
#: A key with too many parts, unless it is in one of the others.
_DEEP: Final = re.compile(
    rf"{_LONG}|({_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{KEY_PARTS_MAX},}}+)|{_PART}", re.DOTALL
)


class TooDeep(ValueError):
    """A document that would take too long to parse."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a document. Raises `TooDeep`, or `ValueError` for a text that is not TOML."""
    import tomllib  # noqa: PLC0415  # most calls have no file

    check_depth(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TooDeep("lists or tables are nested too deeply") from None


def check_depth(text: str) -> None:
    """Refuse a document with too many lines or key parts. Takes linear time."""
    lines = text.count("\n")
    if lines > LINES_MAX:
        raise TooDeep(f"more than {LINES_MAX:,} lines")
    for found in _DEEP.finditer(text):
        if found[1]:
            line = text.count("\n", 0, found.start()) + 1
            raise TooDeep(f"a key has more than {KEY_PARTS_MAX} parts (at line {line}, column 1)")
