"""Messages of a worker that needs results of other tasks: requests, and their replies.

The requests name the task that the worker holds. Pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.wire import dwork_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.wire.native.peer import Reply

_Q: Final = pb.QueryMsg

#: The type of a reply with results.
INPUTS: Final = _Q.Inputs


def results(request: int, worker: bytes, held: bytes, names: Sequence[bytes]) -> bytes:
    """Encode a request for results that a held task needs."""
    query = _Q(type=_Q.Inputs, request=request, location=worker, held=held)
    query.batch.name.extend(names)
    return query.SerializeToString()


def page(request: int, worker: bytes, held: bytes, name: bytes, offset: int) -> bytes:
    """Encode a request for a part of a long result that a held task needs."""
    query = _Q(type=_Q.InputPage, request=request, location=worker, held=held, name=name)
    query.offset = offset
    return query.SerializeToString()


def services(reply: Reply) -> list[bytes]:
    """Return the service of each task in a reply."""
    assigned = reply.assigned()
    return [assigned.terms_of(index).service for index in range(len(assigned.names))]
