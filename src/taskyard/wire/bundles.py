"""Bundles: one payload for many recipients, and a task for each of them.

All tasks of a bundle have the same payload, a JSON object: `{"body": …, "recipients": […]}`. Task
number N, from 0 on, is called `BUNDLE/N` and is for the Nth of the recipients: a worker knows whom
its task is for by the name and the payload alone. Knows nothing of lanes, nor of who delivers.
"""

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

from taskyard.errors import PeerError

#: What JSON's decoder raises, whatever it is fed.
_DECODE_ERRORS: Final = (msgspec.MsgspecError, RecursionError, ValueError)


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


_payloads = msgspec.json.Decoder(Bundle)


def encode_bundle(body: bytes, recipients: bytes) -> bytes:
    """The payload of a bundle, of its parts as JSON."""
    return msgspec.json.encode(_EncodedBundle(Raw(body), Raw(recipients)))


def decode_bundle(payload: bytes) -> Bundle:
    """What `encode` was given. Raises `PeerError`."""
    try:
        return _payloads.decode(payload)
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
