"""Collect the texts of all errors from the source, for docs/errors.md.

A text is the literal where an error is made, with {} for values. Texts that are built elsewhere are
not found. Parses the source without running it.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import taskyard
from taskyard import errors

SOURCE: Final = Path(taskyard.__file__).parent

#: Errors that no user sees: malformed messages of peers, and violated assertions.
_OURS: Final = ("Malformed", "IllegalTransition", "InvariantViolated")

HEAD: Final = """# Errors

Generated from the source by `./yard docs`. {} stands for a value. A message starts with its
subject: a file and its line, a task, a setting. Errors of a damaged state directory (exit 6) also
name `taskyard journal check`, which lists all damage.

"""


class Text(NamedTuple):
    """The text of an error, its place and exit code."""

    place: str
    error: str
    exit_code: int
    text: str


@cache
def collect() -> list[Text]:
    """Return all texts, file by file, in the order of their lines."""
    sources = {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }
    codes = exit_codes([*sources.values()])
    return [found for place, tree in sources.items() for found in _of(place, tree, codes)]


def exit_codes(trees: list[ast.Module]) -> dict[str, int]:
    """Return the exit code of every error that a user may see, by its name."""
    codes = {"TaskyardError": int(errors.TaskyardError.exit_code), "UsageError": 2}
    classes = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
    is_growing = True
    while is_growing:
        found = {one.name: code for one in classes for code in _code(one, codes)}
        is_growing = not found.keys() <= codes.keys()
        codes |= found
    return {name: code for name, code in codes.items() if name not in _OURS}


def _code(found: ast.ClassDef, codes: dict[str, int]) -> list[int]:
    """Return the exit code of a class, its own or its base's, as a list. Empty if it is no
    error."""
    own = getattr(errors, found.name, None)
    if isinstance(own, type) and issubclass(own, errors.TaskyardError):
        return [int(own.exit_code)]
    return [codes[_name(base)] for base in found.bases if _name(base) in codes][:1]


def _of(place: str, tree: ast.Module, codes: dict[str, int]) -> list[Text]:
    found = []
    outer = _texts_by_name(tree.body)
    for statement, known in _functions(tree, outer):
        for node in ast.walk(statement):
            error = _name(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and error in codes:
                text = ": ".join(filter(None, (template(one, known) for one in node.args)))
                found.append((node.lineno, Text(place, error, codes[error], text)))
    return [text for _, text in sorted(dict.fromkeys(found)) if text.text]


def _functions(tree: ast.Module, outer: dict[str, str]) -> list[tuple[ast.AST, dict[str, str]]]:
    """Yield every function with its named texts."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node, outer | _texts_by_name([*ast.walk(node)]))
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def _texts_by_name(nodes: list[ast.stmt] | list[ast.AST]) -> dict[str, str]:
    """Return texts by name: those of `wrong = "…"`."""
    found: dict[str, str] = {}
    for node in nodes:
        target, value = getattr(node, "target", None), getattr(node, "value", None)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(value, ast.expr):
            found[target.id] = template(value, found)
    return {name: text for name, text in found.items() if text}


def _name(node: ast.expr) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def template(node: ast.expr, known: dict[str, str] | None = None) -> str:
    """Return the text with {} for values, or "" if the node has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name):
        return (known or {}).get(node.id, "")
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(one, known) for one in node.values)
    if isinstance(node, ast.BoolOp):
        return template(node.values[-1], known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(template(one, known) or "{}" for one in (node.left, node.right))
    return ""


def _piece(node: ast.expr, known: dict[str, str] | None) -> str:
    if isinstance(node, ast.FormattedValue):
        return template(node.value, known) or "{}"
    return template(node, known)


def page() -> str:
    """Return the page docs/errors.md."""
    lines = [HEAD]
    texts = collect()
    for place in dict.fromkeys(one.place for one in texts):
        lines.append(f"## {place}\n\n| exit | text |\n|---|---|\n")
        rows = sorted({(one.exit_code, one.text) for one in texts if one.place == place})
        lines += [f"| {code} | {_cell(text)} |\n" for code, text in rows]
        lines.append("\n")
    return "".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
