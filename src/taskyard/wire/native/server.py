"""The native dialect at the broker: requests to events, effects to replies. No sockets, no clock.

A request is one QueryMsg and is answered by one. Everything passes through the scheduler, also what
could not be understood, so replies to a plain peer keep the order of its requests and leave after
the commits that they rest on.

A peer is plain for as long as its requests have no field and no type of ours (numbers from 16 on),
and is then answered in dwork's own words alone.

A route is where a reply goes: opaque bytes of whoever carries the frames. Beside this file:
`dwork_counts` how much may be in a message, `dwork_desk` who asked what, `dwork_requests` what
requests mean, `dwork_replies` how effects are told, `dwork_tasks` the tasks inside, `dwork_peer`
the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.core import effects, events
from taskyard.errors import Malformed
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import roles
from taskyard.wire.native import replies as native_replies
from taskyard.wire.native import requests as native_requests
from taskyard.wire.native.counts import check_counts, check_lengths, outline
from taskyard.wire.native.frames import parse
from taskyard.wire.native.pending import (
    PLAIN_LEASE_NS,
    PendingRequest,
    PendingRequests,
    Request,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from taskyard.wire.dialect import Reply

_Q: Final = pb.QueryMsg

#: A delimiter and a QueryMsg.
_FRAMES: Final = 2

#: Numbers from here on are ours.
_EXTENSION_FIELD_MIN: Final = 16

_EXTENSION_FIELDS: Final = tuple(
    field.name for field in _Q.DESCRIPTOR.fields if field.number >= _EXTENSION_FIELD_MIN
)


class NativeServer:
    """All peers of this dialect, on however many sockets."""

    #: Its workers choose their names.
    prefix = b""

    def __init__(
        self,
        broker: int,
        random_bits: Callable[[], int],
        dialect: int = 0,
        plain_lease_ns: int = PLAIN_LEASE_NS,
    ) -> None:
        self._pending = PendingRequests(broker, random_bits, dialect, plain_lease_ns)
        #: Messages that made no sense, for the log and the statistics.
        self.malformed = 0
        #: Requests of guests that may not ask them, for the log.
        self.refused = 0

    @property
    def leaving(self) -> bool:
        """Everybody was told to go: the broker may end when nothing is out any more."""
        return self._pending.leaving

    def report_cut(self, counts: Mapping[str, int]) -> None:
        """Let the status show connections that were cut. The counts may go on."""
        self._pending.connections_cut = counts

    def receive(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        peer: roles.AuthenticatedPeer | None = None,
    ) -> Sequence[events.Event]:
        """What a message says. Whatever it is, this returns. Without a guest it came by a socket
        that is for those who may do everything."""
        incoming = Request(route, _UNREADABLE, extended=False, now_ns=now_ns)
        try:
            query = self._parse(incoming, _body(frames))
            if peer is not None and (reason := roles.refusal(peer, query)):
                self.refused += 1
                return self._refuse(incoming, reason)
            return native_requests.decode_request(self._pending, incoming)
        except Malformed as malformed:
            self.malformed += 1
            return self._refuse(incoming, str(malformed))

    def _parse(self, incoming: Request, body: bytes) -> pb.QueryMsg:
        """Note what is asked, and by whom. Raises `Malformed`, with as much noted as can be."""
        try:
            check_counts(_Q, body)
        except Malformed:
            self._note(incoming, parse(_Q, outline(_Q, body)))
            raise
        query = parse(_Q, body)
        self._note(incoming, query)
        check_lengths(query, body)
        return query

    def _note(self, incoming: Request, query: pb.QueryMsg) -> None:
        incoming.query = query
        incoming.extended = query.type >= _EXTENSION_FIELD_MIN or any(
            map(query.HasField, _EXTENSION_FIELDS)
        )

    def _refuse(self, incoming: Request, reason: str) -> Sequence[events.Event]:
        number = self._pending.add(incoming)
        return [events.RequestRejected(0, incoming.route, number, reason)]

    def reply(self, effect: effects.Effect) -> list[Reply]:
        """The replies that an effect makes: mostly one."""
        return native_replies.replies_to(self._pending, effect)

    def disconnected(self, route: bytes) -> list[events.Event]:
        """Nothing reaches that route any more."""
        told: list[events.Event] = [events.ClientDisconnected(0, route)]
        for number, entry in self._pending.drop_route(route):
            if entry.kind == _Q.Steal:
                told.append(events.WaitEnded(0, entry.worker, number))
        return told

    def wake_at_ns(self) -> int | None:
        """When to call `time_passed`."""
        return self._pending.wake_at_ns()

    def time_passed(self, now_ns: int) -> list[events.Event]:
        """Requests that have waited long enough are answered with what there is."""
        told: list[events.Event] = []
        for number, entry in self._pending.timed_out(now_ns):
            if entry.kind == _Q.Steal:
                told.append(events.WaitEnded(0, entry.worker, number))
            else:
                told += self._watch_ended(number, entry, now_ns)
        return told

    def _watch_ended(self, number: int, entry: PendingRequest, now_ns: int) -> list[events.Event]:
        sign = events.ReplyDue(0, entry.route, number)
        if entry.stream:
            self._pending.extend(number, now_ns + native_requests.STREAM_HEARTBEAT_NS)
            return [sign]
        return [events.WatchEnded(0, entry.route, number), sign]


def _body(frames: Sequence[bytes]) -> bytes:
    if len(frames) != _FRAMES or frames[0]:
        raise Malformed("a message is an empty frame and a QueryMsg")
    return frames[1]


#: Stands for a message that could not be read.
_UNREADABLE: Final = _Q(type=_Q.Error)
