"""The client: submit tasks and get futures, look at tasks, act on them.

Owns what a caller sees. What is asked, and what is made of the answers, is in `asking`; how tasks
are made, in `sending`; what goes over the line, when, and again after a restart, is the courier's
business. A client may be used by several threads at once. `AsyncClient` has the same names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from taskyard.client import bundles, discovery, record_stream, requests
from taskyard.client.bundles import Bundle
from taskyard.client.campaigns import Campaign
from taskyard.client.futures import Future
from taskyard.client.requests import scope_of
from taskyard.client.session import ReplyTimeouts, Session
from taskyard.client.submit import Submitter
from taskyard.core.events import Scope, UnknownPolicy
from taskyard.wire.native import peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType

    from taskyard.client.record_stream import RecordBatch
    from taskyard.client.requests import Exchange, TaskResult
    from taskyard.core.model import Result, Submission, Terms
    from taskyard.core.states import TaskState

__all__ = ["Client", "scope_of"]

_T = TypeVar("_T")

#: How long the first answer of a broker may take.
TIMEOUT_SECONDS: Final = 5.0

#: How long who was interrupted waits for acknowledgements.
CLOSE_ON_ERROR_SECONDS: Final = 1.0


class Client:
    """A line to a broker. Use it as a context manager, or `close` it."""

    def __init__(  # noqa: PLR0913  # all but the first are named
        self,
        broker: str | None = None,
        *,
        state: str | Path | None = None,
        key: str | Path | None = None,
        timeout: float | None = None,
        connect_timeout: float = TIMEOUT_SECONDS,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """Connect to a broker: by its endpoint, or by its state directory. Over TCP with the key of
        that file, if one is given or set; beyond this machine there has to be one.

        A broker that does not answer for a second is reported: `report` is called with a line, by
        default a warning of the logger `taskyard.client`. So is its return. After `timeout` seconds
        without an answer, all that waits for one raises `NoBroker`. Without a timeout the first
        answer has to arrive within `connect_timeout` seconds; later the client waits for a restart,
        however long it takes, and goes on.
        """
        #: Seconds for calls that never wait longer, such as `Future.cancel`.
        self.timeout = connect_timeout if timeout is None else timeout
        endpoint = discovery.endpoint(broker, state)
        key_found = discovery.key_for(endpoint, key)
        limits = ReplyTimeouts.of(timeout, connect_timeout)
        self._session = Session(endpoint, limits, key=key_found, report=report)
        self._submitter = Submitter(self._session, partial(Future, self))
        self._session.start()
        try:
            self.status()
        except BaseException:
            self.close()
            raise

    @property
    def broker(self) -> str:
        """The endpoint of the broker."""
        return self._session.endpoint

    @property
    def unanswered_since(self) -> datetime | None:
        """When the broker last answered, if that is over a second ago; None while it answers."""
        return self._session.outage.since

    def close(self, timeout: float | None = None) -> None:
        """Wait until all that was submitted is acknowledged, for so many seconds at most, then
        hang up."""
        self._session.stop(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Who is interrupted does not wait for a broker that may never come back.
        hasty = kind is not None and not issubclass(kind, Exception)
        self.close(CLOSE_ON_ERROR_SECONDS if hasty else None)

    def __repr__(self) -> str:
        return f"<Client of {self.broker}>"

    def _repr_html_(self) -> str:
        """For notebooks. Never raises, and takes a second at most."""
        from taskyard.client import notebook  # noqa: PLC0415  # only notebooks need it

        return notebook.client_html(self)

    # Submitting.

    def submit(  # noqa: PLR0913  # all but the first are named
        self,
        work: Sequence[str] | str | bytes,
        *,
        name: str | None = None,
        campaign: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Future:
        """Submit one task: an argv, a "module:function" with `args` and `kwargs`, or bytes.

        Options are those of a task in a file: after (names or futures), service, lane, priority,
        due, expiry, retries, backoff, time_limit, slots, env, cwd. Returns at once; what is wrong
        with the task shows in its future, but for what can be seen here.
        """
        return self._submitter.submit(
            work, name, campaign, (args, kwargs), options, wait_for_unknown=wait_for_unknown
        )

    def map(
        self,
        work: str | Callable[[Any], Sequence[str]],
        items: Iterable[Any],
        *,
        campaign: str = "",
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> list[Future]:
        """Submit a task an item: a "module:function" that is called with it, or a function that
        makes its argv. Options are those of `submit`."""
        return list(self._submitter.submit_each(work, items, campaign, options))

    def submit_bundle(  # noqa: PLR0913  # all but two are named
        self,
        payload: str | bytes | list[Any] | dict[str, Any],
        recipients: Iterable[str] | Iterable[dict[str, Any]],
        *,
        name: str | None = None,
        campaign: str | None = None,
        lane: str | None = None,
        wait_for_unknown: bool = False,
        **options: Any,  # noqa: ANN401  # the keys of a task, checked there
    ) -> Bundle:
        """Submit one payload for many recipients, texts or dicts of fields: a task for each, in a
        lane of its own. They are 0, 1, … of the campaign NAME, with the full names NAME/0, NAME/1;
        in another campaign they are called NAME/0, NAME/1, …. All have the same payload, a JSON
        object with `body` and `recipients`; `taskyard.bundle_part` tells a worker which part its
        task is.

        The lane is a template of the
        recipient's fields, "{recipient}" where neither it nor the service's settings say another.
        Other options are those of `submit`. Returns when the broker has it, which takes it whole or
        not at all: raises `Refused`, and `UserError` for more than 100,000 recipients.
        """
        keys = {"lane": lane, **options}
        bundle_spec = bundles.bundle_spec(payload, recipients, name, campaign, keys)
        bundle_spec.unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        self._run_query(bundles.create_request(bundle_spec))
        return Bundle(self, bundle_spec.name, self._submitter.watch(bundle_spec.tasks()).values())

    def submit_all(
        self,
        submission: Submission,
        unknown: UnknownPolicy = UnknownPolicy.REFUSE,
        *,
        watch: bool = True,
    ) -> list[Future]:
        """Submit a batch of tasks as columns. Without `watch` nobody waits for them."""
        sent = self._submitter.submit_all(submission, unknown, watch=watch)
        return [future for future in sent if future is not None]

    def create(self, submission: Submission, unknown: UnknownPolicy = UnknownPolicy.REFUSE) -> int:
        """Submit a batch whole or not at all, and wait until it is taken. Returns how many of its
        tasks are new. Raises `Refused`."""
        return self._run_query(requests.create(submission, unknown))

    def submit_encoded(  # noqa: PLR0913  # the last ones are named
        self,
        name: str,
        payload: bytes,
        terms: Terms,
        *,
        lane: str = "",
        after: Sequence[str] = (),
        wait_for_unknown: bool = False,
        watch: bool = True,
    ) -> Future:
        """Submit a task that is encoded already. Its future has the result as it was sent: bytes.
        Without `watch` it has None, as soon as the task is taken.

        For loops of many: tasks that share their `terms`, the same object, are sent and kept in
        less room.
        """
        how = {"wait_for_unknown": wait_for_unknown, "watch": watch}
        return self._submitter.submit_encoded(name, payload, terms, lane, after, **how)

    def future(self, name: str) -> Future:
        """A future of a task that was submitted before, by whomever."""
        return self.futures([name])[0]

    def futures(self, names: Sequence[str]) -> list[Future]:
        """Futures of many, one for each name. Raises `UserError` if a name is not known."""
        made = self._submitter.watch(self._run_query(requests.find_tasks(names)))
        return [made[name] for name in names]

    def futures_of(self, campaign: str) -> list[Future]:
        """Futures of all tasks that a campaign has now, in the order of their submission."""
        return [*self._submitter.watch(self._run_query(requests.campaign_tasks(campaign))).values()]

    def campaign(self, name: str) -> Campaign:
        """The tasks that were submitted with this campaign's name, and will be."""
        return Campaign(self, name)

    # Waiting.

    def wait_campaign(self, campaign: str, timeout: float | None = None) -> None:
        """Wait until nothing of a campaign can run any more. Raises `TimedOut`."""
        self._run_query(requests.wait_campaign(campaign, timeout))

    def wait_names(
        self, names: Sequence[str], timeout: float | None = None
    ) -> dict[str, TaskState]:
        """Wait until these tasks are settled. Returns where each of them is. Raises `TimedOut`."""
        return self._run_query(requests.wait_names(names, timeout))

    # Looking. Who gives no timeout waits for a broker that is restarted, however long that takes.

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """Counts of tasks by state, campaigns, services and workers."""
        return self._run_query(requests.status(timeout))

    def counts(self, campaign: str, timeout: float | None = None) -> dict[str, int]:
        """How many tasks of a campaign are in each state."""
        return self._run_query(requests.campaign_counts(campaign, timeout))

    def workers(self, timeout: float | None = None) -> list[dict[str, Any]]:
        return self._run_query(requests.workers(timeout))

    def show(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """All about a task. Raises `UserError` if there is none of that name."""
        return self._run_query(requests.show(name, timeout))

    def views(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """All about some tasks, by name. Raises `UserError` if one of them is not known."""
        return self._run_query(requests.views(names))

    def existing(
        self, names: Sequence[str], timeout: float | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return all about some tasks, by name. Skip unknown names. Raises `TimedOut`."""
        return self._run_query(requests.existing(names, timeout))

    def resolve(self, names: Sequence[str]) -> list[str]:
        """Return the full names that these mean. A name that is that of one campaign's task alone
        means that task. Raises `UserError` for others."""
        return self._run_query(requests.resolve(names))

    def explain(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """Why a task is where it is, with the tasks that it waits for."""
        return self._run_query(requests.explain(name, timeout))

    def why(self, name: str, timeout: float | None = None) -> str:
        """The same in a sentence."""
        return self._run_query(requests.why(name, timeout))

    def tasks(self, scope: Scope | None = None, match: str = "") -> Iterator[dict[str, Any]]:
        """The tasks of a scope, in the order of their submission, page by page."""
        some, cursor = self._run_query(requests.page(scope or Scope(), match))
        yield from some
        while cursor:
            some, cursor = self._run_query(requests.page(scope or Scope(), match, cursor))
            yield from some

    def lanes(
        self, service: str | None = None, pattern: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """The lanes of a service, or of all, whose names fit a pattern, page by page: how much
        waits in each, and why it waits."""
        some, place = self._run_query(requests.lanes(service, pattern))
        yield from some
        while place is not None:
            some, place = self._run_query(requests.lanes(service, pattern, place))
            yield from some

    def result(self, name: str) -> Any:  # noqa: ANN401  # whatever the task returned
        """The result of a task that is done. Raises `TaskFailed` if there is none, and
        `OutputTruncated` if only its end is kept."""
        return self._run_query(requests.result(name))

    def result_bytes(self, name: str) -> bytes:
        """The result of a task as the worker sent it. Raises as `result` does."""
        return self._run_query(requests.result_bytes(name))

    def result_with_size(self, name: str) -> Result:
        """Like `result_bytes`, but return a truncated result, with its length before the cut."""
        return self._run_query(requests.result_with_size(name))

    def results(self, names: Sequence[str]) -> dict[str, TaskResult]:
        """Return the state of each known task, with its result as it was sent or the
        reason of its failure, and the length of a result before it was cut, 0 if it is whole."""
        return self._run_query(requests.results(names))

    def output(self, name: str) -> bytes:
        """The end of what a task printed; b"" if nothing is kept beside its result."""
        return self._run_query(requests.output(name))

    def output_with_size(self, name: str) -> Result:
        """Like `output`, with its length before it was cut."""
        return self._run_query(requests.output_with_size(name))

    # Acting.

    def cancel(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> int:
        """Cancel tasks, and all that wait for them: names, or campaign, service, lane, states.
        Returns how many. Raises `TimedOut` if the broker does not answer in time."""
        return self._run_query(requests.command_tasks(peer.CANCEL, names, scope, timeout))

    def retry(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> int:
        """Try failed tasks again, and delayed ones now. Returns how many, or raises `TimedOut`."""
        return self._run_query(requests.command_tasks(peer.RETRY, names, scope, timeout))

    def move(
        self,
        names: Iterable[str] | None = None,
        *,
        to_lane: str | None = None,
        to_service: str | None = None,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> int:
        """Put tasks that no worker holds into another lane ("" is the open one), another service,
        or both. Returns how many, or raises `TimedOut`."""
        return self._run_query(requests.move((to_service, to_lane), names, scope, timeout))

    def expire(
        self,
        names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
        **scope: Any,  # noqa: ANN401
    ) -> int:
        """Give up tasks that no worker holds, as if they were too old: they end as failed. Returns
        how many, or raises `TimedOut`."""
        return self._run_query(requests.command_tasks(peer.EXPIRE, names, scope, timeout))

    def drain(self, worker: str | None = None) -> int:
        """Give a worker no more tasks and send it home; without a name all of them, and then the
        broker too. Returns how many workers there were."""
        return self._run_query(requests.drain(worker))

    def pause(self, service: str | None = None, lane: str | None = None) -> None:
        """Give workers nothing more of a lane, of a service (no lane), or at all (no service)."""
        return self._run_query(requests.pause(service, lane))

    def resume(self, service: str | None = None, lane: str | None = None) -> None:
        """Undo that pause; others stay."""
        return self._run_query(requests.resume(service, lane))

    def follow(self, since: int | None = None, scope: Scope | None = None) -> Iterator[RecordBatch]:
        """What the broker decides after record `since`, or from now on, for ever, as it happens;
        perhaps with no records, for a sign of life. Raises `Refused` if there is no such record."""
        return record_stream.follow(self, since, scope)

    def _run_query(self, exchange: Exchange[_T]) -> _T:
        return requests.run_exchange(exchange, partial(requests.request_and_wait, self._session))
