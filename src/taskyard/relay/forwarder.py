"""What a relay does with a message: where it goes, and what is noted on it. No sockets, no state
but counts.

Below are workers and further relays, each a route of the relay's one listener; above are managers
and further relays, numbered in the order in which they were given. On its way up a message brings
its path along, the nearest hop first, because a listener puts the route in front of what arrives.
On its way down the relay takes that route off again, and notes the number of the upstream at the
end of the header `back`, which brings the answer up to the same one.

READY and BYE go to all, and so does a PING without `back`, by which a worker finds out who is
there. Everything else follows the path down and `back` up. What makes no sense, or leads nowhere,
is counted and dropped: WMP's ends ask again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.errors import Malformed
from taskyard.wire.wmp import frames as wmp
from taskyard.wire.wmp.frames import Side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

#: Said to all managers: whoever is not concerned does not mind.
_TO_ALL: Final = (wmp.READY, wmp.BYE)


class Forwarder:
    """One relay."""

    def __init__(self, upstreams: int) -> None:
        self._upstreams = upstreams
        #: Messages that made no sense, came from the wrong side, or had too long a path.
        self.malformed = 0

    def up(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        """A message from below, its route first: which upstreams get it, and as what."""
        try:
            return self._up(frames)
        except Malformed:
            self.malformed += 1
            return []

    def down(self, upstream: int, frames: Sequence[bytes]) -> list[bytes] | None:
        """A message from above as it goes on below, the next route first; None: it does not."""
        try:
            return self._down(upstream, frames)
        except Malformed:
            self.malformed += 1
            return None

    def _up(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        at, command, headers = wmp.split_frames(frames, Side.WORKER)
        if command in _TO_ALL:
            return self._to_all(frames)
        told = wmp.decode_raw_headers(headers)
        back = wmp.back_of(told)
        if command == wmp.PING and not back:
            return self._to_all(frames)
        if not back or back[-1] >= self._upstreams:
            raise Malformed("it does not say to which upstream")
        wmp.set_back(told, back[:-1])
        return [(back[-1], _with_headers(frames, at, told))]

    def _to_all(self, frames: Sequence[bytes]) -> list[tuple[int, list[bytes]]]:
        return [(upstream, [*frames]) for upstream in range(self._upstreams)]

    def _down(self, upstream: int, frames: Sequence[bytes]) -> list[bytes]:
        at, _, headers = wmp.split_frames(frames, Side.MANAGER)
        if not at:
            raise Malformed("it has come to the end of its path")
        told = wmp.decode_raw_headers(headers)
        back = wmp.back_of(told)
        if len(back) >= wmp.PATH_MAX:
            raise Malformed("it has come too far")
        wmp.set_back(told, [*back, upstream])
        return _with_headers(frames, at, told)


def _with_headers(frames: Sequence[bytes], at: int, told: dict[str, Raw]) -> list[bytes]:
    """The same message with these headers; its delimiter is at that place."""
    headers = at + wmp.HEADERS_AFTER
    return [*frames[:headers], wmp.encode_raw_headers(told), *frames[headers + 1 :]]
