"""What a worker is asked to do: the payloads of `exec` and `call`, and what comes back of a call.
Pickled calls have a file of their own, `pickled`; here they are told from the others.

A payload is one JSON object: `{"argv": [...]}` or `{"call": "module:function", "args": [...],
"kwargs": {...}}`, each with `env` and `cwd` if need be. A key that is not known is refused: to do
half of what was asked is worse than to do nothing. Arguments and returned values are plain JSON:
what JSON has no word for (bytes, sets, times, NaN) is refused, not quietly turned into something
else; tuples become lists and keys become texts.

Knows nothing of processes, nor of what a worker allows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from taskyard.core.model import shown
from taskyard.errors import PeerError, UserError
from taskyard.wire import pickled
from taskyard.wire.pickled import PICKLE, Pickled

#: The service of tasks that run a program, and of those that call a function.
EXEC: Final = b"exec"
CALL: Final = b"call"


class Command(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Run a program: argv, never a shell."""

    argv: Annotated[list[str], Meta(min_length=1)]
    #: Added to the worker's own environment.
    env: dict[str, str] | None = None
    #: Where to run; None for where the worker was started.
    cwd: str | None = None


class Call(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Call a function by its import path, `module:function`."""

    call: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    env: dict[str, str] | None = None
    cwd: str | None = None


class _EncodedCall(Struct, omit_defaults=True):
    """A `Call` whose values are JSON already."""

    call: str
    args: Raw | None = None
    kwargs: Raw | None = None
    env: Mapping[str, str] | None = None
    cwd: str | None = None


class _Kind(Struct):
    """Tells which of the two a payload is."""

    argv: Any = None


_payloads = msgspec.json.Encoder()
_commands = msgspec.json.Decoder(Command)
_calls = msgspec.json.Decoder(Call)
_kinds = msgspec.json.Decoder(_Kind)
# msgspec would turn bytes into base64 and NaN into null; the standard library's refuses them.
_values = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_plain_values = msgspec.json.Decoder()

#: Of these types alone both encoders say the same, and msgspec's is ten times as fast.
_FAST_TYPES: Final = frozenset((str, int, bool, type(None)))

#: What the JSON decoder raises, whatever it is fed: too deep, too long a number, not UTF-8.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, ValueError)


def encode_command(
    argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None
) -> bytes:
    """The payload of `exec`."""
    if not argv or isinstance(argv, str) or not all(isinstance(word, str) for word in argv):
        raise UserError(
            f"{argv!r} is no command: give a list of texts, such as ['convert', 'a.png', 'a.jpg']"
        )
    return _encode(Command(list(argv), None if env is None else dict(env), cwd))


def encode_call(
    call: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> bytes:
    """The payload of `call`."""
    encoded = _EncodedCall(call, env=env, cwd=cwd)
    if args:
        encoded.args = Raw(encode_value(list(args), "list of arguments"))
    if kwargs:
        encoded.kwargs = Raw(encode_value(dict(kwargs), "set of named arguments"))
    return _encode(encoded)


def _encode(payload: Command | _EncodedCall) -> bytes:
    try:
        return _payloads.encode(payload)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"a task's command can't be sent as JSON: {error}; give words that are Unicode text"
        ) from error


def decode_payload(payload: bytes, service: bytes) -> Command | Call | Pickled:
    """What a task of that service is to do; a service of another name may be of any kind."""
    if service == PICKLE or (service not in (EXEC, CALL) and pickled.is_pickled(payload)):
        return pickled.decode_pickled_call(payload)
    try:
        work = _decoder(payload, service).decode(payload)
    except _DECODE_ERRORS as error:
        raise PeerError(
            f"the payload is nothing that a worker of {shown(service)} can do: {error}; submit it "
            "to another service"
        ) from error
    _check(work)
    return work


def decode_call(payload: bytes) -> Call | Pickled:
    """The same of a payload that is known to be a call of either kind."""
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
    """No operating system takes these; told here, where it can be said of what."""
    texts = work.argv if isinstance(work, Command) else [work.call]
    if work.cwd is not None:
        texts = [*texts, work.cwd]
    if work.env:
        texts = [*texts, *work.env, *work.env.values()]
        for name in work.env:
            if not name or "=" in name:
                raise PeerError(f"{name!r} can't be the name of a variable; leave it out of env")
    for text in texts:
        if "\0" in text:
            raise PeerError(f"{text!r} must not have a NUL character: no command can be given one")
    if isinstance(work, Command):
        if not work.argv[0]:
            raise PeerError("the first word of argv is empty: it must name a program")
    elif not all(work.call.partition(":")):
        raise PeerError(f"{work.call!r} names no function: write module:function")


def encode_value(value: Any, what: str = "value") -> bytes:  # noqa: ANN401 - whatever a user has
    """A value as JSON; `what` says in an error what it is."""
    try:
        if _is_fast(value):
            return _payloads.encode(value)
        return _values.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{what} of type {type(value).__name__} can't be sent as JSON: {error}; give plain data"
        ) from error


def _is_fast(value: object) -> bool:
    if type(value) is list:
        return _FAST_TYPES.issuperset(map(type, value))
    return type(value) in _FAST_TYPES


def decode_value(encoded: bytes) -> Any:  # noqa: ANN401 - whatever was sent
    """The value that `encode_value` was given."""
    try:
        return _plain_values.decode(encoded)
    except _DECODE_ERRORS as error:
        raise PeerError(
            f"a value is not JSON: {error}; ask for the result's bytes instead"
        ) from error


class Bundle(Struct):
    """The payload."""

    body: Any
    recipients: list[Any]


class _EncodedBundle(Struct):
    """The same of values that are JSON already."""

    body: Raw
    recipients: Raw


class BundlePart(NamedTuple):
    """What one task of a bundle is about."""

    #: Empty where the name is that in the bundle's own campaign.
    bundle: str
    #: The place of its recipient, from 0 on.
    offset: int
    body: Any
    #: A text, or an object of fields.
    recipient: Any


_bundles = msgspec.json.Decoder(Bundle)


def encode_bundle(body: bytes, recipients: bytes) -> bytes:
    """The payload of a bundle, of its parts as JSON."""
    return msgspec.json.encode(_EncodedBundle(Raw(body), Raw(recipients)))


def decode_bundle(payload: bytes) -> Bundle:
    """What `encode` was given. Raises `PeerError`."""
    try:
        return _bundles.decode(payload)
    except _DECODE_ERRORS as error:
        raise PeerError(
            f"the payload is no bundle's: {error}; see how the task was submitted"
        ) from error


def task_name(bundle: str, offset: int) -> str:
    return f"{bundle}/{offset}"


def bundle_part(name: str, payload: bytes) -> BundlePart:
    """The part of a bundle that the task of this name is. Raises `PeerError` if it is none."""
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
            f"task {name} is no part of its bundle, which has {len(whole.recipients)} recipients; "
            "give its name, BUNDLE/OFFSET"
        )
    return BundlePart(bundle, int(number), whole.body, whole.recipients[int(number)])
