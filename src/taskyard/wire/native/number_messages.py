"""Native messages about the numbers of lines: Number records them, and Numbers finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import line_numbers
from taskyard.core.limits import NUMBERS_PART_BYTES_MAX, NUMBERS_PARTS_MAX
from taskyard.core.model import shown
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native.frames import check_name, check_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.events import Event
    from taskyard.wire.native.peer import Reply
    from taskyard.wire.native.pending import PendingRequests, Request

_Q: Final = pb.QueryMsg

#: Bytes of a path, as on Linux.
_PATH_BYTES_MAX: Final = 4096


def number(request: int, campaign: bytes, path: bytes, first: int, parts: Sequence[bytes]) -> bytes:
    """Encode a Number: parts of the numbers of a file, from `first` on."""
    query = _Q(type=_Q.Number, request=request, name=path, n=first)
    query.scope.campaign = campaign
    query.batch.text.extend(parts)
    return query.SerializeToString()


def numbers(request: int, campaign: bytes = b"", path: bytes = b"", index: int = 0) -> bytes:
    """Encode a Numbers: the files of a campaign or with the end of a path, and a part."""
    query = _Q(type=_Q.Numbers, request=request, n=index)
    if campaign:
        query.scope.campaign = campaign
    if path:
        query.name = path
    return query.SerializeToString()


def decode_number(pending: PendingRequests, incoming: Request) -> Sequence[Event]:
    """Decode a Number. Raise Malformed."""
    query, parts = incoming.query, incoming.query.batch.text[:]
    check_name(query.scope.campaign, "a campaign")
    _check_path(query.name)
    if not query.name or query.n < 0:
        raise Malformed("a Number needs a path and an index")
    if len(parts) > NUMBERS_PARTS_MAX or any(len(one) > NUMBERS_PART_BYTES_MAX for one in parts):
        limits = f"{NUMBERS_PARTS_MAX} parts of {NUMBERS_PART_BYTES_MAX} bytes"
        raise Malformed(f"a Number must have at most {limits}")
    fields = (incoming.route, query.scope.campaign, query.name, query.n, parts)
    return [line_numbers.NumberRequested(0, *fields, request=pending.add(incoming))]


def decode_numbers(pending: PendingRequests, incoming: Request) -> Sequence[Event]:
    """Decode a Numbers. Raise Malformed."""
    query = incoming.query
    _check_path(query.name)
    if query.n < 0 or not (query.name or query.scope.campaign):
        raise Malformed("a Numbers needs a campaign or a path")
    fields = (incoming.route, query.scope.campaign, query.name, query.n)
    return [line_numbers.NumbersRequested(0, *fields, request=pending.add(incoming))]


def _check_path(path: bytes) -> None:
    if len(path) > _PATH_BYTES_MAX:
        raise Malformed(f"a path must have at most {_PATH_BYTES_MAX} bytes")
    if path:
        check_text((path,), "paths")


def files_of(reply: Reply) -> list[tuple[str, str]]:
    """Return the campaigns and paths of a reply, the newest load first."""
    return [*zip(map(shown, reply.names), map(shown, reply.texts), strict=True)]
