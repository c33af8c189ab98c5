"""Count what the product weighs: code lines and files of each package, commands, options, members.

The numbers are in `tests/style_allowed.txt` and in a table of docs/architecture.md. They may only
fall: a commit that adds a capability raises them by what it needs, and names what it replaces.
`tools/style.py --update` writes both. Code lines are lines with a token that is no comment, without
docstrings and generated files.
"""

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from option_counts import option_counts
from taskyard.client.client import Client

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src"
PAGE: Final = ROOT / "docs" / "architecture.md"

#: The rules whose counts are a weight, in the order of the table's columns.
CODE_LINES: Final = "code lines"
FILES: Final = "files"
MEMBERS: Final = "public members"

#: The owners of weights that are no package.
CLIENT: Final = "taskyard.Client"
COMMAND_LINE: Final = "taskyard --help"

#: Around the table in the page.
_BEGIN, _END = "<!-- budget -->\n", "<!-- /budget -->\n"

_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE: Final = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def weights() -> Counter[tuple[str, str]]:
    """Return every weight by its owner and rule."""
    found: Counter[tuple[str, str]] = Counter()
    for path in SOURCE.rglob("*.py"):
        if not path.stem.endswith("_pb2"):
            owner = package_of(path)
            found[owner, FILES] += 1
            found[owner, CODE_LINES] += code_lines(path)
    found[CLIENT, MEMBERS] = sum(not name.startswith("_") for name in dir(Client))
    for rule, count in option_counts()._asdict().items():
        found[COMMAND_LINE, rule] = count
    return found


def package_of(path: Path) -> str:
    """Return the package of a file: a folder of `taskyard`, or the top package."""
    top, *parts = path.relative_to(SOURCE).parts
    return f"{top}.{parts[0]}" if len(parts) > 1 else top


def code_lines(path: Path) -> int:
    """Count the code lines of a file."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines.difference(_docstring_lines(ast.parse(path.read_bytes()))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def table(found: Counter[tuple[str, str]]) -> str:
    """Return the weights as a table for the page."""
    owners = sorted(owner for owner, rule in found if rule == FILES)
    rows = [(f"`{owner}`", found[owner, CODE_LINES], found[owner, FILES]) for owner in owners]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    lines = [f"| {owner} | {code:,} | {files} |" for owner, code, files in rows]
    options = option_counts()
    head = ["| package | code lines | files |", "|---|---|---|"]
    sentences = [
        f"`Client` has {found[CLIENT, MEMBERS]} public members. Of {options.commands} commands,",
        f"{options.listed} are in the first list of `taskyard --help`. Beside the common options",
        f"they explain {options.options} and accept {options.accepted}.",
    ]
    return "\n".join([*head, *lines, "", *sentences, ""])


def page_with(table_text: str) -> str:
    """Return the page with this table."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return f"{before}{_BEGIN}{table_text}{_END}{rest.partition(_END)[2]}"
