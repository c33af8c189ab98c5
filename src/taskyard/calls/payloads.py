"""Payloads of `exec` and `call` tasks, values that calls return, and payloads of bundles.

A payload is one JSON object: `{"argv": [...]}` or `{"call": "module:function", "args": [...],
"kwargs": {...}}`, each with optional `env` and `cwd`. Commands also have optional `inputs` and
`outputs`, `stdin` in base64 or the path of a `stdin_file`, and `final_exit_status`. An unknown key
is refused, because half a command is worse than none. Arguments and returned values are plain JSON.
Bytes, sets, times and NaN are refused, not converted. Tuples become lists and keys become strings.

Knows nothing of processes, nor of permissions. `pickled.py` holds pickled calls.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from taskyard.calls import pickled
from taskyard.calls.pickled import PICKLE, Pickled
from taskyard.core.model import shown
from taskyard.errors import NotEncodable, PeerError, UserError

#: The services of tasks that run a program, and of tasks that call a function.
EXEC: Final = b"exec"
CALL: Final = b"call"


#: The largest exit status of a program.
EXIT_STATUS_MAX: Final = 255


class Command(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Run a program by its argv, never through a shell."""

    argv: Annotated[list[str], Meta(min_length=1)]
    #: Added to the environment of its submission, or to the worker's own.
    env: dict[str, str] | None = None
    #: The working directory. None: that of its submission, or the worker's own.
    cwd: str | None = None
    #: Files that must exist before it runs.
    inputs: list[str] | None = None
    #: Files that it makes. If they are newer than all inputs, it does not run.
    outputs: list[str] | None = None
    #: The content of its stdin. msgspec encodes bytes as base64.
    stdin: bytes | None = None
    #: The file that is its stdin, relative to the working directory.
    stdin_file: str | None = None
    #: Tasks whose results replace references in `argv`. See `inputs`.
    results: list[str] | None = None
    #: Exit statuses after which it is not retried.
    final_exit_status: list[Annotated[int, Meta(ge=1, le=EXIT_STATUS_MAX)]] | None = None


class Call(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Call a function by its import path, `module:function`."""

    call: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    env: dict[str, str] | None = None
    cwd: str | None = None
    #: Tasks whose results replace references in the arguments. See `inputs`.
    results: list[str] | None = None


class _EncodedCall(Struct, omit_defaults=True):
    """A `Call` whose values are encoded as JSON already."""

    call: str
    args: Raw | None = None
    kwargs: Raw | None = None
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    results: Sequence[str] | None = None


class _Kind(Struct):
    """Detects whether a payload is a command or a call."""

    argv: Any = None


_payloads = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(Command)
_calls = msgspec.json.Decoder(Call)
_kinds = msgspec.json.Decoder(_Kind)
# msgspec would encode bytes as base64 and NaN as null. The standard library refuses them.
_values = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_plain_values = msgspec.json.Decoder()

#: How an encoded command begins.
_COMMAND_START: Final = b'{"argv":'

#: Both encoders agree on these types, and msgspec's is ten times as fast.
_FAST_TYPES: Final = frozenset((str, int, bool, type(None)))

#: All errors of the JSON decoder: too deep, too long a number, not UTF-8.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, ValueError)


def encode_command(  # noqa: PLR0913  # the keys of a command
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    *,
    stdin: bytes | None = None,
    stdin_file: str | None = None,
    results: Sequence[str] | None = None,
    final_exit_status: Sequence[int] | None = None,
) -> bytes:
    """Encode the payload of an `exec` task. Raise UserError."""
    if not argv or isinstance(argv, str) or not all(isinstance(word, str) for word in argv):
        raise UserError(
            f"command {argv!r}: must be a list of strings, such as ['convert', 'a.png', 'a.jpg']"
        )
    command = Command(list(argv), None if env is None else dict(env), cwd)
    command.inputs = list(inputs) if inputs else None
    command.outputs = list(outputs) if outputs else None
    command.stdin, command.stdin_file = stdin, stdin_file
    command.results = list(results) if results else None
    command.final_exit_status = list(final_exit_status) if final_exit_status else None
    return _encode(command)


def is_command(payload: bytes) -> bool:
    """Return whether `encode_command` has encoded a payload."""
    return payload.startswith(_COMMAND_START)


def encode_call(  # noqa: PLR0913  # the keys of a call
    call: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    *,
    results: Sequence[str] | None = None,
) -> bytes:
    """Encode the payload of a `call` task. Raise UserError."""
    encoded = _EncodedCall(call, env=env, cwd=cwd, results=results)
    if args:
        encoded.args = _encode_arguments(list(args), enumerate(args, start=1))
    if kwargs:
        encoded.kwargs = _encode_arguments(dict(kwargs), kwargs.items())
    return _encode(encoded)


def _encode_arguments(arguments: object, named: Iterable[tuple[object, object]]) -> Raw:
    """Encode arguments. Raise `NotEncodable` that names the argument that can't be sent."""
    try:
        return Raw(encode_value(arguments, "arguments"))
    except NotEncodable:
        for name, value in named:
            encode_value(value, f"argument {name!r}")
        raise


def _encode(payload: Command | _EncodedCall) -> bytes:
    try:
        return _payloads.encode(payload)
    except (TypeError, ValueError) as error:
        raise NotEncodable(f"command can't be sent as JSON: {error}") from error


def decode_payload(payload: bytes, service: bytes) -> Command | Call | Pickled:
    """Decode the payload of a task of a service. Services of other names take any kind."""
    if service == PICKLE or (service != EXEC and pickled.is_pickled(payload)):
        return pickled.decode_pickled_call(payload)
    try:
        work = _decoder(payload, service).decode(payload)
    except _DECODE_ERRORS as error:
        raise PeerError(f"payload is not valid for service {shown(service)}: {error}") from error
    _check(work)
    return work


def decode_call(payload: bytes) -> Call | Pickled:
    """Decode the payload of a call, plain or pickled, that was checked before."""
    if pickled.is_pickled(payload):
        return pickled.decode_pickled_call(payload)
    return _calls.decode(payload)


def _decoder(
    payload: bytes, service: bytes
) -> msgspec.json.Decoder[Command] | msgspec.json.Decoder[Call]:
    if service == EXEC:
        return _commands
    if service == CALL or _kinds.decode(payload).argv is None:
        return _calls
    return _commands


def _check(work: Command | Call) -> None:
    """Raise PeerError for values that no operating system accepts, naming the value."""
    texts = [work.call] if isinstance(work, Call) else [*work.argv, *_files(work)]
    if work.cwd is not None:
        texts = [*texts, work.cwd]
    if work.env:
        texts = [*texts, *work.env, *work.env.values()]
        for name in work.env:
            if not name or "=" in name:
                raise PeerError(f"env: invalid variable name {name!r}")
    for text in texts:
        if "\0" in text:
            raise PeerError(f"{text!r}: contains a NUL character")
    if isinstance(work, Command):
        _check_command(work)
    elif not all(work.call.partition(":")):
        raise PeerError(f"call {work.call!r}: must be module:function")


def _files(command: Command) -> list[str]:
    files = [*(command.inputs or ()), *(command.outputs or ())]
    if not all(files):
        raise PeerError("inputs and outputs: a path is empty")
    return files


def _check_command(command: Command) -> None:
    if not command.argv[0]:
        raise PeerError("argv: the first word, the program, is empty")
    if command.stdin_file is None:
        return
    if command.stdin is not None:
        raise PeerError("stdin and stdin_file exclude each other")
    if not command.stdin_file or "\0" in command.stdin_file:
        raise PeerError(f"stdin_file {command.stdin_file!r}: not a file name")


def encode_value(value: Any, what: str = "value") -> bytes:  # noqa: ANN401 - any value of a user
    """Encode a value as JSON. `what` names it in errors. Raise UserError."""
    try:
        if _is_fast(value):
            return _payloads.encode(value)
        return _values.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotEncodable(
            f"{what} of type {type(value).__name__} can't be sent as JSON: {error}"
        ) from error


def _is_fast(value: object) -> bool:
    if type(value) is list:
        return _FAST_TYPES.issuperset(map(type, value))
    return type(value) in _FAST_TYPES


def decode_value(encoded: bytes) -> Any:  # noqa: ANN401 - any value of a user
    """Decode a value that `encode_value` has encoded. Raise PeerError."""
    try:
        return _plain_values.decode(encoded)
    except _DECODE_ERRORS as error:
        raise PeerError(f"value is not valid JSON: {error}") from error


# Bundles: a fan-out of one payload to many recipients, with a task for each. The payload is
# `{"body": …, "recipients": […]}`. Task `BUNDLE/N` is for recipient N, counted from 0, so a worker
# needs only the name and the payload.
class Bundle(Struct):
    """The payload of all tasks of a bundle."""

    body: Any
    recipients: list[Any]


class _EncodedBundle(Struct):
    """A `Bundle` whose values are encoded as JSON already."""

    body: Raw
    recipients: Raw


class BundlePart(NamedTuple):
    """The part of a bundle that one task delivers."""

    #: Empty if the name is relative to the bundle's own campaign.
    bundle: str
    #: The index of the recipient, from 0.
    offset: int
    #: The payload that all recipients share.
    body: Any
    #: A string, or an object with fields.
    recipient: Any


_bundles = msgspec.json.Decoder(Bundle)


def encode_bundle(body: bytes, recipients: bytes) -> bytes:
    """Encode the payload of a bundle from JSON parts."""
    return msgspec.json.encode(_EncodedBundle(Raw(body), Raw(recipients)))


def decode_bundle(payload: bytes) -> Bundle:
    """Decode the payload of a bundle. Raise `PeerError`."""
    try:
        return _bundles.decode(payload)
    except _DECODE_ERRORS as error:
        raise PeerError(f"payload is not a bundle: {error}") from error


def task_name(bundle: str, offset: int) -> str:
    return f"{bundle}/{offset}"


def bundle_part(name: str, payload: bytes) -> BundlePart:
    """Return the part of a bundle that the task of this name delivers.

    `payload` is the task's payload, a JSON object. Raises `PeerError` if it is no bundle with such
    a part.
    """
    bundle, _, number = name.rpartition("/")
    whole = decode_bundle(payload)
    is_offset = (
        bool(bundle or "/" not in name)
        and number.isascii()
        and number.isdigit()
        and len(number) <= len(str(2**63))
    )
    if not is_offset or int(number) >= len(whole.recipients):
        raise PeerError(
            f"task {name!r}: not BUNDLE/N of a bundle with {len(whole.recipients)} recipients"
        )
    return BundlePart(bundle, int(number), whole.body, whole.recipients[int(number)])
