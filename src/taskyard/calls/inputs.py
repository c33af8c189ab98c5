"""Inputs of a task: results of other tasks that replace references in its work.

A reference is a future, or `taskyard.result(NAME)`, in the arguments of a call, and `{result:NAME}`
or `{result_file:NAME}` in a command. The name goes into `after` of the task and into `results` of
its payload. The worker fetches these results, and puts them in place of the references.

In a pickle, a reference is a call of `resolve`. In JSON it is `{"$result": [NAME, KIND]}`. Only
payloads with `results` have such objects, and objects of users that look alike are wrapped there.
Knows no sockets and no processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from msgspec import Struct, structs

from taskyard.calls import payloads, pickled, plain_pickles
from taskyard.calls.scripts import scripts_in
from taskyard.errors import NotEncodable, UserError

#: Kinds of results: the text of a program, the value of a function by path, and of a pickled call.
#: All other kinds are bytes. An empty kind is that of the task's service.
TEXT: Final = "text"
JSON: Final = "json"
PICKLED: Final = "pickle"
BYTES: Final = "bytes"

_KINDS: Final = {payloads.EXEC: TEXT, payloads.CALL: JSON, pickled.PICKLE: PICKLED}

_RESULT_KEY: Final = "$result"
#: Wraps an object of a user that would look like a reference or like this.
_LITERAL_KEY: Final = "$literal"
_KEYS: Final = (_RESULT_KEY, _LITERAL_KEY)

#: A reference in a word of a command.
_PLACEHOLDER: Final = re.compile(r"\{result(_file)?:([^{}]+)\}")

#: In every word with a reference.
_START: Final = "{result"

#: In every payload of a command that needs a result as a file.
FILE_MARK: Final = b"{result_file:"

#: Longer results are too long for a word of a command (Linux: MAX_ARG_STRLEN).
_WORD_BYTES_MAX: Final = 128 * 1024 - 1


def kind_of(service: bytes) -> str:
    """Return the kind of the results of a service."""
    return _KINDS.get(service, BYTES)


@runtime_checkable
class Reference(Protocol):
    """Stands for the result of a task: a future, or `taskyard.result`."""

    def result_reference(self) -> tuple[str, str]:
        """Return the full name of the task, and the kind of its result."""


class TaskResult:
    """Stands for the result of a task that was submitted earlier, by its name."""

    def __init__(self, full_name: str) -> None:
        self._full_name = full_name

    def result_reference(self) -> tuple[str, str]:
        return self._full_name, ""

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_reference(self)

    def __repr__(self) -> str:
        return f"taskyard.result({self._full_name!r})"


def result(full_name: str) -> Any:  # noqa: ANN401  # in the call it is the task's own value
    """Return a stand-in for the result of a task, for the arguments of a call.

    `full_name` is CAMPAIGN/NAME, or NAME outside any campaign. The call waits for that task, and
    gets its result in place of the stand-in.
    """
    given: object = full_name  # programs without a type checker pass anything
    if not isinstance(given, str) or not given:
        raise UserError(f"name of a task: must be a text, not {full_name!r}")
    return TaskResult(full_name)


class Input(Struct, frozen=True, omit_defaults=True):
    """The result of another task, as the worker fetched it."""

    #: As in `results` of the payload.
    name: str
    service: bytes
    data: bytes = b""
    #: The file that holds a long result. Empty: `data` is all of it.
    path: str = ""
    #: It may be unpickled, which runs code of the sender.
    allow_pickle: bool = False

    def content(self) -> bytes:
        return Path(self.path).read_bytes() if self.path else self.data

    def value(self, kind: str = "") -> Any:  # noqa: ANN401  # a task's own value
        """Return the value that a future of the task returns. Raises `UserError`."""
        kind, content = kind or kind_of(self.service), self.content()
        if kind == JSON and plain_pickles.looks_pickled(content):
            kind = PICKLED
        if kind not in (TEXT, JSON, PICKLED, BYTES):
            raise UserError(f"result of {self.name}: unknown kind {kind!r}")
        if kind == TEXT:
            return content.decode(errors="surrogateescape")
        if kind == BYTES:
            return content
        if kind == PICKLED and not self.allow_pickle and not pickled.is_guarded():
            raise UserError(
                f"result of {self.name} is pickled (start the worker with --allow-pickle)"
            )
        try:
            return payloads.decode_value(content) if kind == JSON else pickled.unpickle(content)
        except Exception as error:
            text = f"result of {self.name} can't be decoded: {type(error).__name__}: {error}"
            raise UserError(text) from error


def references(value: object) -> Iterator[Reference]:
    """Yield the references in a value, as far as it consists of lists, tuples and dicts."""
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from references(one)
    elif isinstance(value, dict):
        yield from references([*value.values()])


# In pickles.

_inputs: ContextVar[Mapping[str, Input]] = ContextVar("taskyard_inputs")


@contextmanager
def available(inputs: Iterable[Input]) -> Iterator[None]:
    """Let `resolve`, `fill` and `place_inputs` use these results."""
    before = _inputs.set({one.name: one for one in inputs})
    try:
        yield
    finally:
        _inputs.reset(before)


def resolve(name: str, kind: str) -> Any:  # noqa: ANN401  # a task's own value
    """Return the value of a result. Pickles of calls name this function."""
    given: Sequence[object] = name, kind  # a sender may pass anything
    if not all(isinstance(one, str) for one in given):
        raise UserError("result of a task: its name and its kind must be texts")
    found = _inputs.get({}).get(name)
    if found is None:
        raise UserError(f"result of {name}: not fetched")
    return found.value(kind)


def reduce_reference(reference: Reference) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
    """Reduce a future while a call is pickled. Raises `TypeError` at any other time."""
    name, kind = reference.result_reference()
    if not pickled.note_result(name):
        raise TypeError(
            f"future of task {name}: can't be pickled, except in the arguments of a submitted call"
        )
    return resolve, (name, kind)


# In JSON.


def encode_call(
    call: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> tuple[bytes, list[str]]:
    """Encode the payload of a `call` task. Return it with the names of results that it needs.

    Raise UserError.
    """
    try:
        return payloads.encode_call(call, args, kwargs, env, cwd), []
    except NotEncodable:
        names: dict[str, None] = {}
        args, kwargs = _marked([*args], names), _marked(dict(kwargs or {}), names)
        if not names:
            raise
    return payloads.encode_call(call, args, kwargs, env, cwd, results=[*names]), [*names]


def _marked(value: object, names: dict[str, None]) -> Any:  # noqa: ANN401  # any value of a user
    """Return a value with objects of JSON in place of references, whose names are added."""
    if isinstance(value, Reference):
        name, kind = value.result_reference()
        names[name] = None
        return {_RESULT_KEY: [name, kind]}
    if isinstance(value, list | tuple):
        return [_marked(one, names) for one in value]
    if isinstance(value, dict):
        marked = {key: _marked(one, names) for key, one in value.items()}
        is_like_ours = len(marked) == 1 and not marked.keys().isdisjoint(_KEYS)
        return {_LITERAL_KEY: marked} if is_like_ours else marked
    return value


def fill(value: Any) -> Any:  # noqa: ANN401  # any value of a user
    """Return a value of JSON with results in place of references. Raises `UserError`."""
    if isinstance(value, list):
        return [fill(one) for one in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value)) if len(value) == 1 else ""
    if key == _RESULT_KEY:
        return resolve(*value[key])
    if key == _LITERAL_KEY:
        value = value[key]
    return {name: fill(one) for name, one in value.items()}


# In commands.


def place_inputs(command: payloads.Command) -> payloads.Command:
    """Return a command with available results in place of references. Raises `UserError`.

    `{result:NAME}` becomes the text of a result without its last newline, and `{result_file:NAME}`
    the path of a file with its bytes.
    """
    if not command.results:
        return command
    found = _inputs.get({})

    def replace(match: re.Match[str]) -> str:
        one = found.get(match[2])
        if one is None:
            return match[0]
        return one.path if match[1] else _word(one)

    argv = [_PLACEHOLDER.sub(replace, word) for word in command.argv]
    return structs.replace(command, argv=argv)


def _word(one: Input) -> str:
    """Return a result as a part of a word."""
    size = Path(one.path).stat().st_size if one.path else len(one.data)
    if size > _WORD_BYTES_MAX:
        raise UserError(
            f"result of {one.name}: {size:,} bytes are too long for a word of a command (use "
            f"{{result_file:{one.name}}})"
        )
    text = one.content().decode(errors="surrogateescape").removesuffix("\n")
    if "\0" in text:
        raise UserError(f"result of {one.name}: contains a NUL character (use a result_file)")
    return text


def names_in(argv: Sequence[str]) -> list[str]:
    """Return the names of results that a command refers to. Raises `UserError`.

    Leaves words that are not text to the encoder of the command, which refuses them.
    """
    names: dict[str, None] = {}
    for place, word in enumerate(argv):
        for match in _PLACEHOLDER.finditer(word) if _has_start(word) else ():
            if not match[1] and place in scripts_in([str(one) for one in argv]):
                raise UserError(
                    f"{match[0]}: its text would be a part of the script (use "
                    f"{{result_file:{match[2]}}}, or give it to the script as a word)"
                )
            names[match[2]] = None
    return [*names]


def _has_start(word: object) -> bool:
    return isinstance(word, str) and _START in word
