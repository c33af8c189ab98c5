"""The syntax of one shell command: how its line ends, and errors that make it no whole command.

Finds only certain errors: a line that every POSIX shell rejects, that is half of a command, or that
would seem to be done without its work. All else is left to the shell that runs it. Runs nothing.
"""

from __future__ import annotations

import re
from typing import Final

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
