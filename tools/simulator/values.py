"""Blobs on their way between peers and the broker: uploads and downloads.

Sends the product's messages over a connection of its own, as the processes of calls do, and checks
every byte that arrives. A transfer goes on after a reconnect or a restart of the broker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from simulator.listeners import Listener
from simulator.models import Violation
from simulator.outputs import name_of
from simulator.plan import SECOND_NS
from simulator.sockets import Socket
from taskyard.net.channel import Channel
from taskyard.wire.native import peer, task_contents
from taskyard.wire.native.task_contents import Holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.processes import SimProcess
    from taskyard.wire.native.peer import Reply

#: A refused upload is begun again after this.
_AGAIN_NS: Final = SECOND_NS // 2

#: An upload may be refused as another content so often: once after each power cut.
_CONFLICTS_MAX: Final = 20


class ValueChannel:
    """The transfers of one process."""

    def __init__(self, process: SimProcess, worker: bytes = b"") -> None:
        """`worker` is the name of the worker whose results are stored."""
        self._process = process
        self._world = process.world
        self._worker = worker
        self._socket = Socket(process.world.network, process, Listener.NATIVE)
        self._channel = Channel(self._socket, process.clock)
        self._open: dict[int, Callable[[Reply], None]] = {}
        self._is_closed = False

    def turn(self) -> None:
        for reply in self._channel.receive():
            self._open.pop(reply.request)(reply)
        self._channel.turn()

    def wake_at_ns(self) -> int | None:
        return self._channel.wake_at_ns()

    def close(self) -> None:
        self._is_closed = True
        self._socket.close()

    def _request(self, build: Callable[[int], bytes], on_reply: Callable[[Reply], None]) -> None:
        if not self._is_closed:
            self._open[self._channel.request(build)] = on_reply
            self._process.wake()

    def put(self, content: bytes, on_stored: Callable[[], None]) -> None:
        """Store a blob. Send what the broker has not yet."""
        self._put(content, 0, b"", on_stored, 0)

    def _put(
        self, content: bytes, offset: int, data: bytes, on_stored: Callable[[], None], refused: int
    ) -> None:
        value, worker, part_bytes = name_of(content).encode(), self._worker, self._part_bytes

        def on_reply(reply: Reply) -> None:
            if reply.kind == peer.ERROR:
                if refused >= _CONFLICTS_MAX and self._world.healed:
                    raise Violation("upload", f"{value[:16]!r}: {reply.reason}")
                again = partial(self._put, content, 0, b"", on_stored, refused + 1)
                self._world.timeline.after(_AGAIN_NS, again)
                return
            received = reply.received
            if received >= len(content):
                on_stored()
                return
            part = content[received : received + part_bytes]
            self._put(content, received, part, on_stored, refused)

        self._request(
            lambda number: task_contents.put_blob(number, value, offset, data, worker), on_reply
        )

    def get(self, name: str, task: bytes, on_read: Callable[[bytes | str], None]) -> None:
        """Read a blob of a task that the worker holds. `on_read` gets it, or why that failed."""
        self._get(name, task, b"", on_read)

    def _get(
        self,
        name: str,
        task: bytes,
        found: bytes,
        on_read: Callable[[bytes | str], None],
    ) -> None:
        length, offset = int(name.rpartition("-")[2]), len(found)

        def on_reply(reply: Reply) -> None:
            if reply.kind in (peer.NOT_FOUND, peer.ERROR):
                on_read(reply.reason or "no reason")
            elif not reply.part.data:
                raise Violation("blobs", f"{name[:16]} ends at byte {offset} of {length}")
            elif offset + len(reply.part.data) < length:
                self._get(name, task, found + reply.part.data, on_read)
            else:
                on_read(found + reply.part.data)

        value, holder = name.encode(), Holder(self._worker, task)
        self._request(
            lambda number: task_contents.blob_part(number, task, value, offset, holder), on_reply
        )

    @property
    def _part_bytes(self) -> int:
        plan = self._world.checker.blobs.plan
        return 1 if plan is None else plan.part_bytes
