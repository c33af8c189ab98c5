"""The routing of a relay's messages, without sockets and without state except counters.

Below are workers and further relays, each a route of the relay's one listener. Above are managers
and further relays, numbered in the given order. On its way up a message collects its path, the
nearest hop first, because a listener prepends the route. On its way down the relay removes that
route and appends the number of the upstream to the header `back`, which routes the reply to the
same upstream.

READY, BYE and a PING without `back` go to all upstreams. A worker discovers managers by that
PING. Other messages follow the path down and `back` up. Malformed and unroutable messages are
counted and dropped: WMP's peers retry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.errors import Malformed
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

#: Sent to all managers. Those that are not concerned ignore it.
_TO_ALL: Final = (wmp.READY, wmp.BYE)


class Forwarder:
    """The routing of one relay."""

    def __init__(self, upstreams: int) -> None:
        self._upstreams = upstreams
        #: Messages that were malformed, from the wrong side, or with too long a path.
        self.malformed = 0

    def up(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        """Route a message from below, its route first. Returns upstreams with their messages."""
        try:
            return self._up(frames)
        except Malformed:
            self.malformed += 1
            return []

    def down(self, upstream: int, frames: Sequence[bytes]) -> list[bytes] | None:
        """Route a message from above. Returns it with the next route first, or None."""
        try:
            return self._down(upstream, frames)
        except Malformed:
            self.malformed += 1
            return None

    def _up(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        at, command, headers = wmp.split_frames(frames, Side.WORKER)
        if command in _TO_ALL:
            return self._to_all(frames)
        values = wmp.decode_raw_headers(headers)
        back = wmp.back_of(values)
        if command == wmp.PING and not back:
            return self._to_all(frames)
        if not back or back[-1] >= self._upstreams:
            raise Malformed("the header back names no upstream")
        wmp.set_back(values, back[:-1])
        return [(back[-1], _with_headers(frames, at, values))]

    def _to_all(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        return [(upstream, [*frames]) for upstream in range(self._upstreams)]

    def _down(self, upstream: int, frames: Sequence[bytes]) -> list[bytes]:
        at, _, headers = wmp.split_frames(frames, Side.MANAGER)
        if not at:
            raise Malformed("the path is empty")
        values = wmp.decode_raw_headers(headers)
        back = wmp.back_of(values)
        if len(back) >= wmp.PATH_MAX:
            raise Malformed("the path is too long")
        wmp.set_back(values, [*back, upstream])
        return _with_headers(frames, at, values)


def _with_headers(frames: Sequence[bytes], at: int, values: dict[str, Raw]) -> list[bytes]:
    """Return a message with other headers. `at` is the index of its delimiter."""
    headers = at + wmp.HEADERS_AFTER
    return [*frames[:headers], wmp.encode_raw_headers(values), *frames[headers + 1 :]]
