"""Long results as a whole, for clients whose dialect has no request for output.

The journal keeps head and tail of a long result, and a file has all of it. Native clients read that
file part by part. The other dialects have one reply for a result, so it is completed here, up to
the size of a payload. The bytes of a turn are bounded. Replies beyond them follow in later turns.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from taskyard.broker.output_store import OutputStore, StreamKey
from taskyard.broker.results import TURN_BYTES_MAX
from taskyard.core.effects import Settled
from taskyard.core.identity import split
from taskyard.core.limits import PAYLOAD_BYTES_MAX
from taskyard.core.output import Stream
from taskyard.wire.dialect import is_native

if TYPE_CHECKING:
    from taskyard.core.effects import Effect
    from taskyard.core.ledger import Ledger


class WholeResults:
    """Inserts long results into replies. Those above `PAYLOAD_BYTES_MAX` stay head and tail."""

    def __init__(self, ledger: Ledger, outputs: OutputStore) -> None:
        self._ledger = ledger
        self._outputs = outputs
        #: Replies that the turns so far had no room for.
        self._delayed: deque[Settled] = deque()

    def has_pending(self) -> bool:
        return bool(self._delayed)

    def fill(self, effects: list[Effect]) -> None:
        """Complete the replies of a turn. Delayed ones come first."""
        long = [effect for effect in effects if type(effect) is Settled and _is_due(effect)]
        if not long and not self._delayed:
            return
        self._delayed.extend(long)
        left = set(map(id, long))
        effects[:] = [effect for effect in effects if id(effect) not in left]
        room = TURN_BYTES_MAX
        while self._delayed and room > 0:
            reply = self._delayed.popleft()
            room -= self._complete(reply)
            effects.append(reply)

    def _complete(self, reply: Settled) -> int:
        """Insert the long results of a reply. Return their bytes."""
        bytes_read = 0
        for place, name in enumerate(reply.names):
            if name not in (reply.in_files or ()):
                continue
            whole = self._read(name, (reply.truncated or {}).get(name, 0))
            if whole is not None:
                reply.texts[place] = whole
                reply.truncated = {
                    one: total for one, total in (reply.truncated or {}).items() if one != name
                }
                bytes_read += len(whole)
        return bytes_read

    def _read(self, key: bytes, bytes_total: int) -> bytes | None:
        """Return a result, or None if it is too long or its file is gone."""
        task = self._ledger.tasks.get(key)
        if task is None or bytes_total > PAYLOAD_BYTES_MAX:
            return None
        campaign = task.terms.campaign
        stream = StreamKey(campaign, split(key, campaign), task.attempt, Stream.STDOUT)
        found = self._outputs.read(stream, 0, bytes_total)
        return None if found is None or len(found[0]) < bytes_total else found[0]


def _is_due(reply: Settled) -> bool:
    return bool(reply.in_files) and not reply.records and not is_native(reply.request)
