"""Collects what the command line can say when something is wrong, out of the source.

    python -m tests.cli.error_texts > docs/errors.md

A text is as it stands in a `raise`, with {} where a value goes. What is built elsewhere and handed
to the error is not seen here.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("cli", "client")

#: Errors that reach a user as a line, and their exit codes.
ERRORS: Final = {
    "UserError": 2,
    "Refused": 2,
    "BadCampaign": 2,
    "NoBroker": 3,
    "TimedOut": 4,
    "TaskFailed": 1,
    "UsageError": 2,
}

HEAD: Final = """# What can go wrong, in the command line's words

Made by `python -m tests.cli.error_texts`; a test compares. {} stands for a value. Each says what
happened, to what, and what to do.
"""


class Text(NamedTuple):
    """What is said, and where."""

    place: str
    error: str
    text: str


def collect() -> list[Text]:
    found: list[Text] = []
    for package in PACKAGES:
        for path in sorted((ROOT / "src" / "taskyard" / package).rglob("*.py")):
            place = str(path.relative_to(ROOT / "src" / "taskyard"))
            for node in ast.walk(ast.parse(path.read_text())):
                found += _of(place, node)
    return found


def _of(place: str, node: ast.AST) -> list[Text]:
    if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
        return []
    called = node.exc.func
    error = getattr(called, "id", getattr(called, "attr", ""))
    text = template(node.exc.args[0])
    return [Text(place, error, text)] if error in ERRORS and text else []


def template(node: ast.expr) -> str:
    """The text with {} for values; "" if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{}" if isinstance(one, ast.FormattedValue) else template(one) for one in node.values
        )
    if isinstance(node, ast.BoolOp):
        return template(node.values[-1])
    return ""


def page() -> str:
    lines = [HEAD]
    texts = collect()
    for place in dict.fromkeys(one.place for one in texts):
        lines.append(f"## {place}\n\n| exit | text |\n|---|---|")
        rows = [(ERRORS[one.error], one.text) for one in texts if one.place == place]
        lines += [f"| {code} | {text.replace('|', chr(92) + '|')} |" for code, text in sorted(rows)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
