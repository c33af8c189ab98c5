"""From the arguments of `submit` and `map` to tasks in the outbox, and their futures.

Checks and encodes tasks for `Client` and `AsyncClient`, which differ in the futures that they make.
Does not send: the session decides when.
"""

from __future__ import annotations

import secrets
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from taskyard.campaign.batches import encode_batch, encode_text
from taskyard.campaign.task_spec import check_task
from taskyard.client.futures import FutureBase
from taskyard.client.outbox import PendingTask
from taskyard.core.events import UnknownPolicy
from taskyard.core.model import Terms
from taskyard.errors import UserError
from taskyard.wire import payloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from taskyard.client.requests import TaskRef
    from taskyard.client.results import SettableFuture
    from taskyard.client.session import Session
    from taskyard.core.model import Submission

_F = TypeVar("_F", bound="SettableFuture")


#: Tasks of one watch: their names fit one message.
_NAMES_PER_WATCH: Final = 1000

#: The arguments of work that takes none.
_NONE: Final = (None, None)


class _Plain(NamedTuple):
    """Values that plain tasks of one service and campaign share."""

    #: The outbox sends shared terms once.
    terms: Terms
    campaign: bytes
    #: Of generated names.
    name_prefix: bytes


class Submitter(Generic[_F]):
    """Passes tasks to a session. `make_future` takes a task's name, service and campaign."""

    def __init__(self, session: Session, make_future: Callable[[bytes, bytes, bytes], _F]) -> None:
        self._session = session
        self._make_future = make_future
        #: Random, so that generated names are unique.
        self._prefix = secrets.token_hex(5)
        self._count = count(1)
        #: Values that plain tasks share, by service and campaign.
        self._plain: dict[tuple[bytes, str], _Plain] = {}

    def submit(  # noqa: PLR0913  # one per key
        self,
        work: Sequence[str] | str | bytes,
        name: str | None,
        campaign: str,
        arguments: tuple[Sequence[Any] | None, Mapping[str, Any] | None],
        options: dict[str, Any],
        *,
        wait_for_unknown: bool = False,
    ) -> _F:
        """Submit one task: an argv, a "module:function" with its arguments, or bytes."""
        if arguments != _NONE or not isinstance(work, bytes):
            _check_work_type(work, arguments)
        if not options and not wait_for_unknown:
            return self._submit_plain(name, work, campaign, arguments)
        if name is None:
            name = f"{self._name_prefix(campaign)}{next(self._count)}"
        raw = {"name": name, **_work_keys(work, *arguments), **options}
        if "after" in options:
            raw["after"] = after_names(options["after"], campaign)
        unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        spec = check_task(raw, campaign)
        submission = encode_batch([spec], encode_text(campaign), time.time_ns())
        terms = submission.terms_of(0)
        future = self._make_future(submission.names[0], terms.service, terms.campaign)
        lane = submission.lanes[0] if submission.lanes else None
        self._queue_row(submission, 0, lane=lane, unknown=unknown, future=future)
        return future

    def _name_prefix(self, campaign: str) -> str:
        return f"{campaign or 'task'}-{self._prefix}-"

    def _submit_plain(
        self,
        name: str | None,
        work: Sequence[str] | str | bytes,
        campaign: str,
        arguments: tuple[Sequence[Any] | None, Mapping[str, Any] | None],
    ) -> _F:
        """Submit a task without options. Skips the checks of options, for loops of many tasks."""
        service, payload = _encode_work(work, *arguments)
        plain = self._plain.get((service, campaign))
        if plain is None:
            encoded = encode_text(campaign)
            terms = Terms(campaign=encoded, service=service)
            plain = _Plain(terms, encoded, encode_text(self._name_prefix(campaign)))
            self._plain[(service, campaign)] = plain
        terms, encoded, prefix = plain
        if name is None:
            task = b"%b%d" % (prefix, next(self._count))
        elif name:
            task = encode_text(name)
        else:
            raise UserError("task name: must not be empty")
        future = self._make_future(task, service, encoded)
        refuse = UnknownPolicy.REFUSE
        self._session.submit(PendingTask(task, payload, terms, None, (), refuse, future))
        return future

    def submit_each(
        self,
        work: str | Callable[[Any], Sequence[str]],
        items: Iterable[Any],
        campaign: str,
        options: dict[str, Any],
    ) -> Iterator[_F]:
        """Submit a task per item, lazily, and yield the futures."""
        for item in items:
            if callable(work):
                yield self.submit(work(item), None, campaign, (None, None), options)
            else:
                yield self.submit(work, None, campaign, ([item], None), options)

    def submit_all(
        self, submission: Submission, unknown: UnknownPolicy, *, watch: bool = True
    ) -> Iterator[_F | None]:
        """Submit a task per row, lazily, and yield the futures: None without `watch`."""
        for index, name in enumerate(submission.names):
            terms = submission.terms_of(index)
            future = self._make_future(name, terms.service, terms.campaign) if watch else None
            lane = submission.lanes[index] if submission.lanes else b""
            self._queue_row(submission, index, lane=lane, unknown=unknown, future=future)
            yield future

    def _queue_row(
        self,
        submission: Submission,
        index: int,
        *,
        lane: bytes | None,
        unknown: UnknownPolicy,
        future: _F | None,
    ) -> None:
        name, payload = submission.names[index], submission.payload_of(index)
        after = tuple(submission.after[index]) if submission.after else ()
        terms = submission.terms_of(index)
        self._session.submit(PendingTask(name, payload, terms, lane, after, unknown, future))

    def submit_encoded(  # noqa: PLR0913  # one per key
        self,
        name: str,
        payload: bytes,
        terms: Terms,
        lane: str,
        after: Sequence[str],
        *,
        wait_for_unknown: bool,
        watch: bool,
    ) -> _F:
        """Submit a task with an encoded payload."""
        encoded = encode_text(name)
        future = self._make_future(encoded, b"", terms.campaign)
        before = tuple([encode_text(one) for one in after])
        unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        fixed = (encoded, payload, terms, encode_text(lane), before, unknown)
        self._session.submit(PendingTask(*fixed, future, watch))
        return future

    def watch(self, tasks: Mapping[str, TaskRef]) -> dict[str, _F]:
        """Return futures of tasks that were submitted earlier, by their full names."""
        made = {
            full_name: self._make_future(
                encode_text(one.name), one.service, encode_text(one.campaign)
            )
            for full_name, one in tasks.items()
        }
        names = list(made)
        for first in range(0, len(names), _NAMES_PER_WATCH):
            some = names[first : first + _NAMES_PER_WATCH]
            self._session.watch({encode_text(name): made[name] for name in some})
        return made


def _check_work_type(work: object, arguments: tuple[object, object]) -> None:
    """Raise `UserError` for work that can't be encoded."""
    if any(arguments) and not isinstance(work, str):
        raise UserError("args and kwargs: only for a function, given as 'module:function'")
    if callable(work):
        raise UserError(
            f"{work!r}: a function must be given by its import path, 'module:function', and a "
            "worker must allow it"
        )
    if isinstance(work, str) and (":" not in work or " " in work):
        raise UserError(
            f"{work!r}: neither 'module:function' nor a list of words, such as ['echo', 'hi']"
        )


def after_names(after: object, campaign: str) -> object:
    """Return the `after` of a task in this campaign, with names in place of futures."""
    if isinstance(after, list | tuple):
        return [_name(one, campaign) for one in after]
    return [_name(after, campaign)] if isinstance(after, FutureBase) else after


def _name(one: object, campaign: str) -> object:
    if not isinstance(one, FutureBase):
        return one
    return one.name if one.campaign == campaign else one.full_name


def _encode_work(
    work: Sequence[str] | str | bytes,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> tuple[bytes, bytes]:
    """Return the service and the payload of a task without options."""
    if isinstance(work, bytes):
        return b"default", work
    if isinstance(work, str):
        return payloads.CALL, payloads.encode_call(work, args or (), kwargs)
    return payloads.EXEC, payloads.encode_command(work)


def _work_keys(
    work: Sequence[str] | str | bytes,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return work and arguments as the keys of a task in a file."""
    if isinstance(work, str):
        return {"call": work, "args": args, "kwargs": kwargs}
    if isinstance(work, bytes):
        return {"payload": work}
    return {"argv": list(work)}
