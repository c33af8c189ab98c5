"""Plain requests that differ from an earlier one only in the names of their tasks.

That is nearly all traffic of dwork's own peers. Their Steals repeat byte by byte. A Create or
Complete has TaskMsgs that are equal but for the names. So the names are cut out of the bytes, and
the other bytes are compared. Requests with these bytes mean what the first of them meant, which
`requests` decoded. It decodes all requests of another form as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core import events
from taskyard.core.model import Submission
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire import roles
from taskyard.wire.native.counts import MEASURED_BYTES_MIN
from taskyard.wire.native.pending import PendingRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.model import Terms
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
_TYPES: Final = [_Q(type=kind).SerializeToString() for kind in (_Q.Create, _Q.Steal, _Q.Complete)]
_TYPE_BYTES: Final = 2

#: A task is a tag, a length, and a TaskMsg. That begins with the tag and the length of the name.
#: Lengths above this one have two bytes.
_TASK_TAG: Final = bytes([_Q.TASK_FIELD_NUMBER << 3 | 2])
_NAME_TAG: Final = bytes([pb.TaskMsg.NAME_FIELD_NUMBER << 3 | 2])
_LENGTH_MAX: Final = 127
_HEAD_BYTES: Final = 4


def split(route: bytes, body: bytes) -> tuple[FormKey, list[bytes]] | None:
    """Return the form of a request, and the names of its tasks. None: it has no form."""
    start = body[:_TYPE_BYTES]
    if start not in _TYPES or len(body) >= MEASURED_BYTES_MIN:
        return None
    at, rest, names = _TYPE_BYTES, b"", list[bytes]()
    for _ in range(LENGTHS_MAX):
        if body[at : at + 1] != _TASK_TAG:
            break
        run = _split_run(body, at)
        if run is None or (names and run[0] != rest):
            return None
        rest, some, at = run
        names += some
    form = start + body[at:]
    if len(form) + len(rest) > FORM_BYTES_MAX or not _is_text(body, names):
        return None
    return (route[0], form, rest), names


def _split_run(body: bytes, at: int) -> tuple[bytes, list[bytes], int] | None:
    """Take apart tasks of one length: the rest of each, the names, and the offset after them."""
    start = at + _HEAD_BYTES
    head = body[at:start]
    if len(head) < _HEAD_BYTES or head[2:3] != _NAME_TAG:
        return None
    task_bytes, name_bytes = head[1], head[3]
    rest = body[start + name_bytes : at + 2 + task_bytes]
    if not name_bytes or not rest or max(task_bytes, name_bytes) > _LENGTH_MAX:
        return None
    *names, last = body[start:].split(rest + head)
    names.append(last[:name_bytes])
    if not last.startswith(rest, name_bytes) or set(map(len, names)) != {name_bytes}:
        return None  # a name contains the bytes between two others
    return rest, names, at + len(names) * (2 + task_bytes)


def _is_text(body: bytes, names: list[bytes]) -> bool:
    """Return whether names are UTF-8. Nearly all are ASCII."""
    if body.isascii():
        return True
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
                *(0, route, submission, number),
                *(events.UnknownPolicy.DONE, events.DuplicatePolicy.EXTEND),
                partial=True,
            )
        if self.count:
            return events.TasksRequested(0, self.worker, self.count, False, number, 0)  # noqa: FBT003  # by keyword it costs more
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
        if form.count:
            self._pending.note_plain_worker(route, form.worker)
        number = self._pending.enter(form.pending(route))
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
        return known.facts == pending.plain_at(route).worker

    def learn(self, found: Sequence[events.Event]) -> None:
        """Keep the form of the last request, if its events are those of a form."""
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
                self._forms.clear()  # those in use are learned again
            self._forms[key] = form
