"""Generate docs/api.md: every public name of `taskyard` and `taskyard.testing`.

Reads signatures and docstrings, and the `#:` comments above fields, and adds nothing to them.
Owns what counts as public: the names in `taskyard.__all__`, and their members without an
underscore.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from itertools import groupby
from textwrap import fill
from types import ModuleType
from typing import Any, Final, NamedTuple

import taskyard

_HEAD: Final = """# Python API

Generated from the code by `./yard docs`. [python.md](python.md) and [executor.md](executor.md) show
how to use it. Everything here has types that a checker follows: the package has a `py.typed`.
Other modules of the package are internal, and change without notice.

"""

_ASYNC: Final = """### Members of {owner} that are those of {twin}

They have the same arguments. What waits returns the same to `await`, and what yields is for
`async for`.

"""

_COMMON_HEAD: Final = """Some arguments mean the same everywhere:

| argument | |
|---|---|
"""

#: Arguments that docstrings need not explain again.
COMMON_ARGUMENTS: Final = {
    "args": "positional arguments of a function",
    "callback": "a function that is called with the future",
    "campaign": "the name of a campaign, or empty for tasks outside any campaign",
    "cancel_futures": "whether to cancel calls that no worker has begun",
    "fn": "the function to call",
    "iterables": "arguments of functions: a call gets the next item of each",
    "kwargs": "named arguments of a function",
    "match": "a part of a task's full name",
    "name": "the name of a task: NAME, or CAMPAIGN/NAME of a task in a campaign",
    "names": "the names of tasks",
    "options": "keys of a task, such as `after`, `retries` and `time_limit`",
    "progress": "whether to draw a progress bar, in a terminal or a notebook",
    "return_when": "the condition of `concurrent.futures.wait`, by default `ALL_COMPLETED`",
    "scope": "the tasks to which a method applies: `campaign=`, `service=`, `lane=` or `states=`",
    "timeout": "seconds to wait before `TimedOut` is raised. None waits without a limit",
    "wait_for_unknown": "whether `after` may have names that the broker does not know yet",
    "work": "a command, a function or bytes",
}

#: Methods that the session or the command line calls. They are public in Python's sense only, and
#: their types belong to inner layers.
INNER_MEMBERS: Final = {
    "Future": (*("known_why", "loop", "set_exception", "set_result", "settle", "settle_failed"),),
}

#: Columns of the pages.
_WIDTH: Final = 100

#: A signature that is longer has a line per parameter.
_LINE_MAX: Final = 88


class Entry(NamedTuple):
    """A public name: a module's function or class, or a member of a class."""

    #: With module and class, such as taskyard.Client.submit.
    path: str
    value: object
    #: The whole documentation of the object.
    text: str
    #: As in a program. "" for an exception, and for a class that no program makes.
    signature: str
    #: The parameters that a caller gives.
    parameters: tuple[str, ...] = ()
    #: The class of a member.
    owner: type | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def anchor(self) -> str:
        """The anchor of its heading, as forges make them."""
        return re.sub(r"[^\w]", "", self.path.lower())


def page() -> str:
    """Return the page."""
    common = "".join(f"| `{name}` | {text} |\n" for name, text in COMMON_ARGUMENTS.items())
    parts = [_HEAD, *_index(), _COMMON_HEAD, common, "\n", *_body()]
    return "".join(parts).rstrip() + "\n"


def entries() -> Iterator[Entry]:
    """Yield every public name, each followed by its members."""
    for name in sorted(taskyard.__all__, key=str.lower):
        yield from _with_members(taskyard, name)
    testing = import_module("taskyard.testing")
    for name in _public_names(testing):
        yield from _with_members(testing, name)


def _with_members(module: ModuleType, name: str) -> Iterator[Entry]:
    value = getattr(module, name)
    path = f"{module.__name__}.{name}"
    if not isinstance(value, type):
        yield _callable_entry(path, value)
        return
    yield _class_entry(path, value)
    for member in () if issubclass(value, BaseException) else dir(value):
        if _is_own_member(value, member) and member not in INNER_MEMBERS.get(name, ()):
            yield _member_entry(value, f"{path}.{member}", member)


def _public_names(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", "") == module.__name__
        if is_own and not name.startswith("_") and callable(value):
            yield name


def _is_own_member(found: type, name: str) -> bool:
    """Return whether a member is defined by Taskyard, not by a base of the standard library."""
    return not name.startswith("_") and _home_of(found, name).startswith("taskyard")


def _home_of(found: type, name: str) -> str:
    """Return the module of the class that defines a member."""
    return next((one for one in found.__mro__ if name in vars(one)), object).__module__


# Entries.


def _class_entry(path: str, value: type) -> Entry:
    """Return the entry of a class. The constructor is shown if it has a docstring of its own."""
    text = inspect.getdoc(value) or ""
    made: Any = getattr(value, "__init__", None)
    is_own = _home_of(value, "__init__").startswith("taskyard")
    if issubclass(value, BaseException) or not is_own or not getattr(made, "__doc__", None):
        return Entry(path, value, text, "")
    signature = f"{value.__name__}{_signature(made, returns=False)}"
    return Entry(path, value, f"{text}\n\n{inspect.getdoc(made)}", signature, _parameters(made))


def _callable_entry(path: str, value: Callable[..., Any]) -> Entry:
    prefix = "async " if inspect.iscoroutinefunction(value) else ""
    signature = f"{prefix}{path.rpartition('.')[2]}{_signature(value)}"
    return Entry(path, value, inspect.getdoc(value) or "", signature, _parameters(value))


def _member_entry(owner: type, path: str, name: str) -> Entry:
    member = inspect.getattr_static(owner, name)
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if callable(member):
        # The attribute of the class inherits docstrings, which its function does not.
        text = inspect.getdoc(getattr(owner, name)) or ""
        made = _callable_entry(path, member)
        return made._replace(text=text, owner=owner)
    if isinstance(member, property):
        text, kind = inspect.getdoc(member) or "", member.fget.__annotations__.get("return", "")
    else:
        text, kind = _comment(owner, name), _annotation(owner, name)
    return Entry(path, member, text, f"{name}: {_name_of(kind)}", owner=owner)


def _comment(owner: type, name: str) -> str:
    """Return the `#:` comment above a field, in its class or a base."""
    form = re.compile(rf"((?:^ +#: .*\n)+) +{name}\b", re.MULTILINE)
    ours = [one for one in owner.__mro__ if one.__module__.startswith("taskyard")]
    found = next(filter(None, (form.search(inspect.getsource(one)) for one in ours)), None)
    return " ".join(found[1].replace("#:", "").split()) if found else ""


def _annotation(owner: type, name: str) -> object:
    """Return the type of a field, as it is written."""
    noted = [vars(one).get("__annotations__", {}) for one in owner.__mro__]
    written = next((notes[name] for notes in noted if name in notes), None)
    return type(inspect.getattr_static(owner, name)) if written is None else written


def _name_of(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


# Signatures.


class _Verbatim(str):
    """An annotation or a default that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _caller_parameters(value: Callable[..., Any]) -> list[inspect.Parameter]:
    found = inspect.signature(value).parameters.values()
    return [one for one in found if one.name not in ("self", "cls") and one.name[0] != "_"]


def _parameters(value: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(one.name for one in _caller_parameters(value))


def _signature(value: Callable[..., Any], *, returns: bool = True) -> str:
    """Return the signature as it is written, without self and cls."""
    signature = inspect.signature(value)
    kept = [
        one.replace(annotation=_shown(one.annotation), default=_shown_value(one.default))
        for one in _caller_parameters(value)
    ]
    returned = _shown(signature.return_annotation) if returns else inspect.Signature.empty
    line = str(signature.replace(parameters=kept, return_annotation=returned))
    return line if len(line) <= _LINE_MAX else _wrapped(line)


def _wrapped(line: str) -> str:
    """Return a long signature with a line per parameter."""
    rows, depth = [""], 0
    inside, end = line[1:].rpartition(")")[0], line.rpartition(")")[2]
    for letter in inside:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            rows.append("")
        else:
            rows[-1] += letter
    return "(\n" + "".join(f"    {row.strip()},\n" for row in rows) + f"){end}"


def _shown(annotation: object) -> object:
    return _Verbatim(annotation) if isinstance(annotation, str) else annotation


def _shown_value(default: object) -> object:
    return _Verbatim(str(default)) if isinstance(default, Enum) else default


# The page.


def _index() -> Iterator[str]:
    """Yield a table of the names without their members."""
    yield "| name | |\n|---|---|\n"
    for one in entries():
        if one.owner is None:
            yield f"| [`{one.path}`](#{one.anchor}) | {_cell(sentence(one.text))} |\n"
    yield "\n"


def _body() -> Iterator[str]:
    found = {one.path: one for one in entries()}
    for _, group in groupby(found.values(), lambda one: one.owner or one.value):
        owner, shared = "", []
        for one in group:
            owner = owner or one.name
            twin = found.get(one.path.replace("taskyard.Async", "taskyard."))
            if twin and twin is not one and _is_like(twin, one):
                shared.append(f"[`{one.name}`](#{twin.anchor})")
            else:
                yield from _section(one)
        if shared:
            yield _ASYNC.format(owner=owner, twin=owner.removeprefix("Async"))
            yield f"{fill(', '.join(shared), _WIDTH)}.\n\n"


def _is_like(twin: Entry, one: Entry) -> bool:
    """Return whether members of two clients differ in waiting only."""
    return bool(one.owner) and twin.text == one.text and twin.parameters == one.parameters


def _section(one: Entry) -> Iterator[str]:
    yield f"{'##' if one.owner is None else '###'} {one.path}\n\n"
    if one.signature:
        yield f"```python\n{one.signature}\n```\n\n"
    for paragraph in one.text.split("\n\n"):
        yield f"{_markdown(paragraph)}\n\n"
    if isinstance(one.value, type) and issubclass(one.value, BaseException):
        yield from _error(one.value)


def _error(value: type[BaseException]) -> Iterator[str]:
    """Yield the bases and the fields of an exception."""
    bases = " and ".join(f"`{base.__name__}`" for base in value.__bases__)
    yield f"An exception, a kind of {bases}."
    fields = re.findall(
        r"((?:^ +#: .*\n)+) +(?:self\.)?(\w+)", inspect.getsource(value), re.MULTILINE
    )
    yield " Fields:\n\n" if fields else "\n\n"
    for comment, name in fields:
        yield f"- `{name}`: {' '.join(comment.replace('#:', '').split())}\n"
    yield "\n" if fields else ""


def _markdown(paragraph: str) -> str:
    """Return a paragraph of a docstring. Indented paragraphs stay as they are, as code."""
    return paragraph if paragraph.startswith("    ") else re.sub(r"([<*])", r"\\\1", paragraph)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def sentence(text: str) -> str:
    """Return the first sentence of a docstring."""
    first, dot, _ = " ".join(text.split()).partition(". ")
    return first + "." if dot else first
