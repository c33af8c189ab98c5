"""Plain requests that differ from an earlier one only in the names of their tasks, and the replies.

That is nearly all traffic of dwork's own peers. Their Steals repeat byte by byte. A Create or
Complete has TaskMsgs that are equal but for the names. So the names are cut out of the bytes, and
the other bytes are compared. Requests with these bytes mean what the first of them meant, which
`requests` decoded. It decodes all requests of another form as well.

Replies are made of the same parts. Replies with other parts are encoded by `replies`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.core import effects, events
from taskyard.core.model import Submission
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import roles
from taskyard.wire.dialect import ASSIGNED
from taskyard.wire.native import raw_messages
from taskyard.wire.native.pending import ENCODED_PLAIN, PendingRequest
from taskyard.wire.native.raw_messages import MEASURED_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.core.model import Terms
    from taskyard.wire.dialect import Reply
    from taskyard.wire.native.pending import PendingRequests

    #: The first byte of the route, the request without tasks, and a TaskMsg without its name.
    FormKey = tuple[int, bytes, bytes]

_Q: Final = pb.QueryMsg

#: Forms that are kept, and the bytes of each. A peer has two or three.
FORMS_MAX: Final = 4096
FORM_BYTES_MAX: Final = 512

#: The names in a request may have this many lengths, each in a row: `t9` and `t10` are two.
LENGTHS_MAX: Final = 4

#: All encoders write the type first, and then the tasks.
PLAIN_TYPES: Final = frozenset(
    _Q(type=kind).SerializeToString() for kind in (_Q.Create, _Q.Steal, _Q.Complete)
)
TYPE_BYTES: Final = 2

#: The field that every request of ours has. In a name, these bytes cost a plain peer some time.
REQUEST_TAG: Final = _Q(request=0).SerializePartialToString()[:-1]


def split(route: bytes, body: bytes) -> tuple[FormKey, list[bytes]] | None:
    """Return the form of a request, and the names of its tasks. None: it has no form."""
    if len(body) >= MEASURED_BYTES_MIN:
        return None
    at, rest, names = TYPE_BYTES, b"", list[bytes]()
    for _ in range(LENGTHS_MAX):
        if body[at : at + 1] != raw_messages.TASK_TAG:
            break
        run = raw_messages.split_alike_run(body, at)
        if run is None or (names and run[0] != rest):
            return None
        rest, some, at = run
        names += some
    form = body[:TYPE_BYTES] + body[at:]
    if len(form) + len(rest) > FORM_BYTES_MAX or not (body.isascii() or _is_text(names)):
        return None
    return (route[0], form, rest), names


def _is_text(names: list[bytes]) -> bool:
    """Return whether names are UTF-8."""
    try:
        b"\n".join(names).decode()
    except UnicodeDecodeError:
        return False
    return True


class Form(Struct, frozen=True, gc=False):
    """The meaning of requests that differ only in the names of their tasks."""

    kind: pb.QueryMsg.Type
    #: Steal and Complete: the worker.
    worker: bytes = b""
    #: Steal: the number of tasks.
    count: int = 0
    #: Create: the terms and the lane of each task.
    terms: Terms | None = None
    lane: bytes = b""

    def pending(self, route: bytes) -> PendingRequest:
        worker = self.worker if self.kind == _Q.Steal else b""
        return PendingRequest(route, self.kind, None, extended=False, worker=worker)

    def event(self, route: bytes, names: list[bytes], number: int) -> events.Event:
        """Return the event of a request with these names."""
        if self.terms is not None:
            lanes = [self.lane] * len(names) if self.lane else None
            submission = Submission(names, [b""], [self.terms], None, lanes)
            return events.SubmitRequested(
                0,
                route,
                submission,
                number,
                unknown=events.UnknownPolicy.DONE,
                repeat=events.DuplicatePolicy.EXTEND,
                partial=True,
            )
        if self.count:
            return events.TasksRequested(0, self.worker, self.count, False, number, 0, True)  # noqa: FBT003  # by keyword it costs more
        return events.TasksReported(0, self.worker, names, request=number)


def _form_of(event: events.Event) -> Form | None:
    """Return the form of a decoded request, or None if it has a part that no form has."""
    if isinstance(event, events.SubmitRequested):
        lanes, (terms, *_) = event.submission.lanes, event.submission.terms
        return Form(_Q.Create, terms=terms, lane=lanes[0] if lanes else b"")
    if isinstance(event, events.TasksRequested):
        return Form(_Q.Steal, event.worker, event.count)
    return Form(_Q.Complete, event.worker) if isinstance(event, events.TasksReported) else None


class PlainRequests:
    """The forms of the requests so far."""

    def __init__(self, pending: PendingRequests) -> None:
        self._pending = pending
        self._forms: dict[FormKey, Form] = {}
        #: The last request, unless its form is known.
        self._last: tuple[FormKey, list[bytes]] | None = None

    def receive(
        self, route: bytes, body: bytes, peer: roles.AuthenticatedPeer | None
    ) -> Sequence[events.Event] | None:
        """Return the events of a request with a known form. None: it must be decoded."""
        found = self._last = split(route, body)
        form = None if found is None else self._forms.get(found[0])
        if found is None or form is None or not self._applies(route, form, peer):
            return None
        self._last = None
        if form.count and route[1:2] != ASSIGNED:
            self._pending.note_worker(route, (form.worker, None))
        worker = form.worker if form.count else b""
        number = next(self._pending.numbers)
        self._pending.entries[number] = PendingRequest(
            route, form.kind, None, extended=False, worker=worker
        )
        return [form.event(route, found[1], number)]

    def _applies(self, route: bytes, form: Form, peer: roles.AuthenticatedPeer | None) -> bool:
        """Return whether a request is allowed, and means what it meant before."""
        pending = self._pending
        if peer is not None and roles.refusal(peer, roles.DWORK, form.kind, form.worker):
            return False
        if pending.leaving or not form.count:
            return not pending.leaving
        known = pending.facts.get(form.worker)
        if known is None or known.registration.prefetch:
            return False
        return known.registration.facts == pending.plain_at(route).worker

    def learn(self, found: Sequence[events.Event]) -> None:
        """Keep the form of the last request, if its events are of a form."""
        last, self._last = self._last, None
        if last is None or len(found) != 1:
            return
        (key, names), event = last, found[0]
        number: int = getattr(event, "request", 0)
        entry, form = self._pending.entries.get(number), _form_of(event)
        if entry is None or form is None or entry != form.pending(entry.route):
            return
        if form.event(entry.route, names, number) == event:
            if len(self._forms) >= FORMS_MAX:
                self._forms.clear()  # forms in use are learned again
            self._forms[key] = form


# Replies.

_TRANSFER: Final = _Q(type=_Q.Transfer).SerializeToString()
_OK, _ERROR = ENCODED_PLAIN[_Q.OK], ENCODED_PLAIN[_Q.Error]
_EXIT, _NOT_FOUND = ENCODED_PLAIN[_Q.Exit], ENCODED_PLAIN[_Q.NotFound]

#: Origins whose field is kept. The time of a turn is the same for all of its replies.
ORIGINS_MAX: Final = 1024
_TIMES_MAX: Final = 4
_MICROSECOND_NS: Final = 1000


def reply_to(pending: PendingRequests, effect: effects.Effect) -> Reply | None:
    """Encode the reply to a plain request. None: it is another reply, or has other parts."""
    number: int = effect.request  # type: ignore[attr-defined]
    entry = pending.entries.get(number)
    body = None if entry is None or entry.extended else PLAIN_REPLIES[type(effect)](effect)
    if entry is None or body is None:
        return None
    if entry.deadline_ns:
        pending.drop(number)
    else:
        del pending.entries[number]
    if body is _NOT_FOUND:
        pending.note_idle(number, entry)
    return entry.route, [b"", body]


def _accepted(effect: effects.Accepted) -> bytes:
    return _ERROR if effect.refused else _OK  # the other tasks were accepted


def _report_ack(effect: effects.ReportAck) -> bytes | None:
    return None if effect.missing else _OK


def _no_work(effect: effects.NoWork) -> bytes:
    return _EXIT if effect.settled else _NOT_FOUND


def _assign(effect: effects.Assign) -> bytes | None:
    """Encode tasks of one origin. None: they have several, or one is long."""
    origins = {terms.origin for terms in effect.terms}
    if len(origins) > 1:
        return None
    rest = _origin_field(origins.pop()) + _log_field(effect.at_ns // _MICROSECOND_NS)
    encoded = raw_messages.join_alike(effect.names, rest)
    return None if encoded is None else _TRANSFER + encoded


@lru_cache(ORIGINS_MAX)
def _origin_field(origin: bytes) -> bytes:
    return pb.TaskMsg(origin=origin).SerializePartialToString()


@lru_cache(_TIMES_MAX)
def _log_field(at_us: int) -> bytes:
    """Encode the log of a task that was assigned at this time, in microseconds."""
    log = pb.TaskMsg.LogMsg(state=pb.TaskMsg.Stolen, time=at_us).SerializeToString()
    return pb.TaskMsg(log=[log]).SerializePartialToString()


#: The effects whose replies are encoded here.
PLAIN_REPLIES: Final[dict[type[effects.Effect], Callable[[Any], bytes | None]]] = {
    effects.Accepted: _accepted,
    effects.ReportAck: _report_ack,
    effects.NoWork: _no_work,
    effects.Assign: _assign,
}
