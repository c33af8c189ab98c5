"""Check how the prose of the product reads: docstrings, comments, messages and pages.

Owns the words that stand for a noun without naming it ("the rest", "those who"), and the beginnings
of sentences that are not used. `style.py` reports the finds and limits the nouns of a package.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

#: Nouns that name nothing, in 10,000 words of a package or of the pages.
NOUNS_MAX: Final = 40

_BEGINNING: Final = re.compile(r"(?:^|(?<=[.!?:]\s)|(?<=\n\n))(?:One|Ones|Those|Others|Its)\b")
_NONE: Final = re.compile(r"^None: ")
_WORD: Final = re.compile(r"[A-Za-z']+")

#: A relative clause, a preposition, a verb or an end follows a noun. Another word is its subject.
_AFTER: Final = (
    r"(?=\s*(?:[.,;:)]|$|(?:of|that|who|which|whose|with|without|in|from|for|to|on|at|by|under|"
    r"not|are|were|is|was|have|has|it|they|as|and|or)\b))"
)
_BEFORE: Final = (
    r"\b(?:the|that|this|each|every|which|any|another|no|an?|first|last|new|old|other|same|next|"
    r"its|own|only)(?:\s+[a-z-]+)?\s+"
)
_NOUN: Final = re.compile(
    rf"\bones\b|\bothers\b|\bthe rest\b|\bthose\b{_AFTER}|{_BEFORE}one\b{_AFTER}"
    r"|\bone\b(?=\s*(?:[.,;:)]|$|(?:that|which|who|of them|is|was|has|by one|or none|and)\b))",
    re.IGNORECASE,
)


_STRING: Final = re.compile(r'"""(.*?)"""|"([^"\n]*)"', re.DOTALL)


class Passage(NamedTuple):
    """A docstring, a message, some lines of comment, or a paragraph of a page."""

    line: int
    text: str


def passages_of_code(code: str) -> Iterator[Passage]:
    """Yield the prose of a Python file. Strings are found without its syntax tree: that is slow."""
    line = 1
    end = 0
    for found in _STRING.finditer(code):
        line += code.count("\n", end, found.start())
        end = found.start()
        if " " in (text := found[1] or found[2] or ""):
            paragraphs = re.split(r"\n\s*\n", text)
            text = "\n\n".join(re.sub(r"\s*\n\s*", " ", part) for part in paragraphs)
            yield Passage(line, text.strip())
    last = -1
    lines: list[str] = []
    for number, row in enumerate(code.splitlines(), start=1):
        before, mark, comment = row.partition("#")
        if not mark or before.strip():
            continue
        if number != last + 1 and lines:
            yield Passage(last - len(lines) + 1, " ".join(lines))
            lines = []
        lines.append(comment.lstrip(": "))
        last = number
    if lines:
        yield Passage(last - len(lines) + 1, " ".join(lines))


def passages_of_page(text: str) -> Iterator[Passage]:
    """Yield the paragraphs of a page in Markdown, without its blocks of code."""
    line = 1
    is_code = False
    for paragraph in text.split("\n\n"):
        fences = sum(row.lstrip().startswith("```") for row in paragraph.splitlines())
        if not is_code and not fences:
            yield Passage(line, re.sub(r"\s+", " ", paragraph))
        is_code ^= fences % 2 == 1
        line += paragraph.count("\n") + 2


class Survey(NamedTuple):
    """The counts and finds of the prose of a file."""

    words: int
    #: Nouns that name nothing.
    nouns: int
    #: The line of each sentence that begins with a word for nothing, and its first words. Also
    #: of notes that stand in place of a sentence.
    beginnings: tuple[tuple[int, str], ...]


def survey(passages: Iterable[Passage]) -> Survey:
    """Look through the prose of a file."""
    words = nouns = 0
    beginnings: list[tuple[int, str]] = []
    for line, text in passages:
        words += len(_WORD.findall(text))
        nouns += len(_NOUN.findall(text))
        starts = [found.start() for find in (_BEGINNING, _NONE) for found in find.finditer(text)]
        beginnings += [(line, text[start : start + 40]) for start in starts]
    return Survey(words, nouns, tuple(beginnings))
