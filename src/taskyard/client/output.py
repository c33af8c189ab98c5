"""Requests for stdout and stderr of attempts, part by part, while they run or later.

Each function returns an exchange, as those in `requests`. A part is bounded, so that neither the
broker nor a client that prints it needs memory for the whole.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from taskyard.campaign.batches import encode_text
from taskyard.client.exchanges import Query, checked_reply
from taskyard.core.blobs import Result
from taskyard.core.output import Stream
from taskyard.errors import BytesMissing, UnknownName
from taskyard.wire.native import peer, streams

if TYPE_CHECKING:
    from taskyard.client.exchanges import Exchange
    from taskyard.wire.native.streams import OutputPage


def whole_result(name: str, kept: Result) -> Exchange[Result]:
    """Return a result as a whole. A long one is in a file of the broker."""
    if kept.blob is None:
        return kept
    return Result((yield from stream(name)))


def stream(name: str, *, stderr: bool = False, attempt: int | None = None) -> Exchange[bytes]:
    """Return stdout or stderr of an attempt, by default the latest, as far as it is there.

    Raises `BytesMissing` if it was removed, `BytesTruncated` if only a part is kept, and
    `BytesDamaged` if it is not what the worker sent.
    """
    parts: list[bytes] = []
    pages = streams.StreamPages(name)
    while True:
        page = yield from output_page(name, pages.offset, stderr=stderr, attempt=attempt)
        parts.append(page.data)
        if pages.add(page):
            return b"".join(parts)
        attempt = page.attempt


def output_page(
    name: str,
    offset: int = 0,
    *,
    stderr: bool = False,
    attempt: int | None = None,
    count: int | None = None,
) -> Exchange[OutputPage]:
    """Return a part of stdout or stderr of an attempt: from `offset` on, at most `count` bytes.

    Raises `BytesMissing` if the output was removed.
    """
    number = Stream.STDERR if stderr else Stream.STDOUT
    where: Any = {"offset": offset, "attempt": attempt, "count": count}
    build = partial(streams.output, name=encode_text(name), stream=number, **where)
    reply = yield from checked_reply(Query(build))
    if reply.kind != peer.NOT_FOUND:
        return reply.page
    if reply.reason:
        raise BytesMissing(reply.reason)
    raise UnknownName(f"unknown task {name!r} (see `taskyard list`)")
