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
from taskyard.wire import dwork_replies, dwork_requests, roles
from taskyard.wire.dwork_counts import check_counts, check_lengths, outline
from taskyard.wire.dwork_desk import PLAIN_LEASE_NS, Asked, Desk, Reply, Ticket
from taskyard.wire.dwork_tasks import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Q: Final = pb.QueryMsg

#: A delimiter and a QueryMsg.
_FRAMES: Final = 2

#: Numbers from here on are ours.
_OWN: Final = 16

_OWN_FIELDS: Final = tuple(field.name for field in _Q.DESCRIPTOR.fields if field.number >= _OWN)


class Dwork:
    """All peers of this dialect, on however many sockets."""

    #: Its workers choose their names.
    prefix = b""

    def __init__(
        self,
        broker: int,
        luck: Callable[[], int],
        dialect: int = 0,
        plain_lease_ns: int = PLAIN_LEASE_NS,
    ) -> None:
        self._desk = Desk(broker, luck, dialect, plain_lease_ns)
        #: Messages that made no sense, for the log and the statistics.
        self.malformed = 0
        #: Requests of guests that may not ask them, for the log.
        self.refused = 0

    @property
    def leaving(self) -> bool:
        """Everybody was told to go: the broker may end when nothing is out any more."""
        return self._desk.leaving

    def report_cut(self, counts: Mapping[str, int]) -> None:
        """Let the status show connections that were cut. The counts may go on."""
        self._desk.connections_cut = counts

    def take(
        self,
        route: bytes,
        frames: Sequence[bytes],
        now_ns: int,
        guest: roles.Guest | None = None,
    ) -> Sequence[events.Event]:
        """What a message says. Whatever it is, this returns. Without a guest it came by a socket
        that is for those who may do everything."""
        asked = Asked(route, _NOTHING, extended=False, now_ns=now_ns)
        try:
            query = self._parse(asked, _body(frames))
            if guest is not None and (reason := roles.refusal(guest, query)):
                self.refused += 1
                return self._refuse(asked, reason)
            return dwork_requests.understand(self._desk, asked)
        except Malformed as malformed:
            self.malformed += 1
            return self._refuse(asked, str(malformed))

    def _parse(self, asked: Asked, body: bytes) -> pb.QueryMsg:
        """Note what is asked, and by whom. Raises `Malformed`, with as much noted as can be."""
        try:
            check_counts(_Q, body)
        except Malformed:
            self._note(asked, parse(_Q, outline(_Q, body)))
            raise
        query = parse(_Q, body)
        self._note(asked, query)
        check_lengths(query, body)
        return query

    def _note(self, asked: Asked, query: pb.QueryMsg) -> None:
        asked.query = query
        asked.extended = query.type >= _OWN or any(map(query.HasField, _OWN_FIELDS))

    def _refuse(self, asked: Asked, reason: str) -> Sequence[events.Event]:
        number = self._desk.issue(asked)
        return [events.Misunderstood(0, asked.route, number, reason)]

    def tell(self, effect: effects.Effect) -> list[Reply]:
        """The replies that an effect makes: mostly one."""
        return dwork_replies.put(self._desk, effect)

    def cut(self, route: bytes) -> list[events.Event]:
        """Nothing reaches that route any more."""
        told: list[events.Event] = [events.ClientGone(0, route)]
        for number, ticket in self._desk.drop_route(route):
            if ticket.kind == _Q.Steal:
                told.append(events.WaitEnded(0, ticket.worker, number))
        return told

    def wake_at_ns(self) -> int | None:
        """When to call `time_passed`."""
        return self._desk.wake_at_ns()

    def time_passed(self, now_ns: int) -> list[events.Event]:
        """Requests that have waited long enough are answered with what there is."""
        told: list[events.Event] = []
        for number, ticket in self._desk.ended(now_ns):
            if ticket.kind == _Q.Steal:
                told.append(events.WaitEnded(0, ticket.worker, number))
            else:
                told += self._watch_ended(number, ticket, now_ns)
        return told

    def _watch_ended(self, number: int, ticket: Ticket, now_ns: int) -> list[events.Event]:
        sign = events.AnswerDue(0, ticket.route, number)
        if ticket.stream:
            self._desk.extend(number, now_ns + dwork_requests.STREAM_SIGN_NS)
            return [sign]
        return [events.WatchEnded(0, ticket.route, number), sign]


def _body(frames: Sequence[bytes]) -> bytes:
    if len(frames) != _FRAMES or frames[0]:
        raise Malformed("a message is an empty frame and a QueryMsg")
    return frames[1]


#: Stands for a message that could not be read.
_NOTHING: Final = _Q(type=_Q.Error)
