"""From the arguments of `submit`, `map` and bundles to tasks in the buffer, and their futures.

Checks and encodes tasks for both clients. A bundle is one payload for many recipients, submitted in
one message. Does not send: the session decides when.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias

from msgspec import Struct

from taskyard.calls import current_task, inputs, payloads
from taskyard.calls.pickled import PICKLE
from taskyard.campaign import lanes
from taskyard.campaign.batches import bundle_submission, encode_batch, encode_text
from taskyard.campaign.task_spec import (
    assign_lanes,
    check_task,
    expand_row,
    key_error_text,
    service_of,
)
from taskyard.campaign.values import InvalidValue
from taskyard.client import functions, requests
from taskyard.client.exchanges import RunnerT
from taskyard.client.functions import CallEncoder, ContentKeys, EncodedCall, Marks, campaign_of
from taskyard.client.futures import Future, SentByClient
from taskyard.client.requests import TaskRef
from taskyard.client.task_buffer import PendingTask
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling, split
from taskyard.core.model import Terms
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.client.exchanges import Exchange
    from taskyard.client.futures import FutureOwner

#: What a task does: a function, 'module:function', an argv or bytes.
Work: TypeAlias = "Callable[..., Any] | Sequence[str] | str | bytes"

#: Positional and named arguments of a function.
Arguments: TypeAlias = "tuple[Sequence[Any] | None, Mapping[str, Any] | None]"

#: Tasks of one watch: their names fit one message.
_NAMES_PER_WATCH: Final = 1000

#: The arguments of work that takes none.
_NONE: Final = (None, None)


class Submitter(Generic[RunnerT]):
    """Passes tasks to a session."""

    def __init__(self, client: FutureOwner) -> None:
        self._client = client
        session = self._session = client._session  # noqa: SLF001  # it is a part of the client
        #: Random, so that generated names are unique.
        self._prefix = secrets.token_hex(5)
        self._count = count(1)
        self.calls = CallEncoder(session.call_values)
        #: The terms of plain tasks, which the buffer sends once, and the prefix of their names. By
        #: service, campaign and priority.
        self._plain: dict[tuple[bytes, str, int], tuple[Terms, bytes]] = {}

    def submit(  # noqa: PLR0913  # one per key
        self,
        work: Work,
        name: str | None,
        campaign: str,
        arguments: Arguments,
        options: dict[str, Any],
        *,
        wait_for_unknown: bool = False,
    ) -> Future[Any, RunnerT]:
        """Submit one task: an argv, a function with its arguments, or bytes."""
        keys = None
        if not callable(work):
            if options and isinstance(work, str):
                arguments, options = split_arguments(work, arguments, options)
            return self._submit_work(work, name, campaign, arguments, options, wait_for_unknown)
        if options or name or campaign:
            arguments, options = split_arguments(
                work, arguments, options, taken_options(name, campaign)
            )
            campaign, keys = _take_keys(work, name, campaign, options)
        return self._submit_function(
            work,
            name,
            campaign,
            arguments,
            options,
            wait_for_unknown=wait_for_unknown,
            keys=keys,
        )

    def _submit_work(  # noqa: PLR0913, PLR0917  # one per key
        self,
        work: Sequence[str] | str | bytes,
        name: str | None,
        campaign: str,
        arguments: Arguments,
        options: dict[str, Any],
        wait_for_unknown: bool = False,  # noqa: FBT001, FBT002  # by position, in loops of many tasks
    ) -> Future[Any, RunnerT]:
        if arguments != _NONE or not isinstance(work, bytes):
            check_work_type(work, arguments)
        if not options and not wait_for_unknown:
            return self._submit_plain(name, _encode_work(work, *arguments), campaign)
        if name is None:
            name = f"{self._name_prefix(campaign)}{next(self._count)}"
        raw = {"name": name, **work_keys(work, *arguments), **options}
        return self._submit_row(raw, campaign, wait_for_unknown=wait_for_unknown)

    def _submit_row(  # all but three are named
        self,
        raw: dict[str, Any],
        campaign: str,
        call: EncodedCall | None = None,
        *,
        wait_for_unknown: bool,
    ) -> Future[Any, RunnerT]:
        """Submit a task with options, given as a row of a file. That of a function has a `call`."""
        if "after" in raw:
            raw["after"] = after_names(raw["after"], campaign)
        if priority := current_task.nested_priority(self._session.endpoint):
            raw.setdefault("priority", priority)
        unknown = UnknownPolicy.WAIT if wait_for_unknown else UnknownPolicy.REFUSE
        spec = check_task(raw, campaign)
        submission = encode_batch([spec], encode_text(campaign), time.time_ns())
        terms = submission.terms_of(0)
        decoder = None if call is None else call.decoder
        kind = terms.service if decoder is None else PICKLE  # of the result
        future: Future[Any, RunnerT]
        future = Future(self._client, submission.names[0], kind, terms.campaign, decoder)
        lane = submission.lanes[0] if submission.lanes else None
        after = tuple(submission.after[0]) if submission.after else ()
        task = PendingTask(
            name=submission.names[0],
            payload=submission.text_of(0),
            terms=terms,
            lane=lane,
            after=after,
            unknown=unknown,
            future=future,
            attaches=call is not None and call.attaches,
            restore=None if call is None else call.restore,
        )
        self._session.submit(task)
        return future

    def _name_prefix(self, campaign: str) -> str:
        return f"{campaign or 'task'}-{self._prefix}-"

    def _submit_plain(  # one per key
        self,
        name: str | None,
        encoded: EncodedCall,
        campaign: str,
    ) -> Future[Any, RunnerT]:
        """Submit a task without options. Skips the checks of options, for loops of many tasks."""
        service, decoder = encoded.service, encoded.decoder
        priority = current_task.nested_priority(self._session.endpoint)
        plain = self._plain.get((service, campaign, priority))
        if plain is None:
            terms = Terms(campaign=encode_text(campaign), service=service, priority=priority)
            plain = terms, encode_text(self._name_prefix(campaign))
            self._plain[(service, campaign, priority)] = plain
        terms, prefix = plain
        if name is None:
            task = b"%b%d" % (prefix, next(self._count))
        elif name:
            task = encode_text(name)
        else:
            raise UserError("task name: must not be empty")
        kind = service if decoder is None else PICKLE  # of the result
        future: Future[Any, RunnerT]
        future = Future(self._client, task, kind, terms.campaign, decoder)
        refuse = UnknownPolicy.REFUSE
        after = tuple([encode_text(one) for one in encoded.results]) if encoded.results else ()
        pending = PendingTask(
            task,
            encoded.payload,
            terms,
            None,
            after,
            refuse,
            future,
            attaches=encoded.attaches,
            restore=encoded.restore,
        )
        self._session.submit(pending)
        return future

    # Functions.

    def _submit_function(  # noqa: PLR0913  # one per key
        self,
        function: Callable[..., Any],
        name: str | None,
        campaign: str,
        arguments: Arguments,
        options: dict[str, Any],
        *,
        wait_for_unknown: bool = False,
        keys: ContentKeys | None = None,
    ) -> Future[Any, RunnerT]:
        """Submit a call of a function object, pickled. With keys, it is named by its content."""
        args, kwargs = arguments[0] or (), arguments[1] or {}
        marks_of: Callable[[bytes], Marks] | None = None
        if keys is not None:
            key = keys.of(args, kwargs)
            name, marks = key.name, key.marks()
            marks_of = lambda _: marks  # noqa: E731  # not of the pickle
        elif name is not None:
            marks_of = functions.marks_of_named
        encoded = self.calls.encode(function, args, kwargs, marks_of)
        if encoded.results:
            self._await_others((args, {**kwargs}))
        if name is None:
            name = f"{functions.function_name(function)}-{self._prefix}-{next(self._count)}"
        if not options and not wait_for_unknown:
            return self._submit_plain(name, encoded, campaign)
        raw = function_row(name, campaign, (args, kwargs), encoded, options)
        return self._submit_row(raw, campaign, encoded, wait_for_unknown=wait_for_unknown)

    def _await_others(self, arguments: object) -> None:
        """Wait until the broker has the tasks of other clients that a call refers to.

        Those clients may not have sent them yet. The broker refuses tasks that it still lacks.
        """
        if self._session.is_blocking:
            for one in inputs.references(arguments):
                if isinstance(one, SentByClient):
                    one.await_sent(self._session)

    def submit_each(
        self,
        work: Callable[..., Any] | str,
        rows: Iterable[Sequence[Any]],
        campaign: str,
        kwargs: Mapping[str, Any] | None,
        options: dict[str, Any],
    ) -> Iterator[Future[Any, RunnerT]]:
        """Submit a call of a function per row of arguments, lazily, and yield the futures."""
        check_function(work)
        (_, named), options = split_arguments(
            work, (None, kwargs), options, taken_options(None, campaign)
        )
        submit: Callable[..., Future[Any, RunnerT]] = self._submit_work
        if callable(work):
            campaign, keys = _take_keys(work, None, campaign, options)
            submit = partial(self._submit_function, keys=keys)
            work = self.calls.pickle_once(work)
        for row in rows:
            yield submit(work, None, campaign, (row, named), options)

    def watch(self, tasks: Mapping[str, TaskRef]) -> dict[str, Future[Any, RunnerT]]:
        """Return futures of tasks that were submitted earlier, by their full names."""
        made: dict[str, Future[Any, RunnerT]] = {}
        for full_name, task in tasks.items():
            decoder = self.calls.foreign_decoder if task.service == PICKLE else None
            name, campaign = encode_text(task.name), encode_text(task.campaign)
            made[full_name] = Future(self._client, name, task.service, campaign, decoder)
        names = list(made)
        for first in range(0, len(names), _NAMES_PER_WATCH):
            some = names[first : first + _NAMES_PER_WATCH]
            self._session.watch({encode_text(name): made[name] for name in some})
        return made


def positional(args: Sequence[Any] | None, values: Sequence[Any]) -> Sequence[Any]:
    """Return arguments that are given one by one. Raises `UserError` if `args` is given, too."""
    if args is not None:
        raise UserError("args: give positional arguments either by args= or one by one")
    return values


def rows_of(iterables: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each call of `map`. Raises `UserError` without iterables."""
    if not iterables:
        raise UserError("map: give at least one iterable of arguments")
    return zip(*iterables, strict=False)


def check_function(work: object) -> None:
    """Raise `UserError` if `work` can't be called once per row of arguments."""
    if not callable(work) and not isinstance(work, str):
        raise UserError(f"{work!r}: expected a function, or 'module:function'")


def taken_options(name: str | None, campaign: str) -> list[str]:
    """Return the names of these options, as far as they are given."""
    return [*(["name"] if name else []), *(["campaign"] if campaign else [])]


def split_arguments(
    work: Callable[..., Any] | str,
    arguments: Arguments,
    options: dict[str, Any],
    taken: Iterable[str] = (),
) -> tuple[Arguments, dict[str, Any]]:
    """Return the arguments of a function and the options of its task. Raises `UserError`.

    `taken` has the names of options that `submit` itself takes.
    """
    args, kwargs = arguments
    own, named = functions.split_options(work, options, taken, is_explicit=kwargs is not None)
    twice = named.keys() & (kwargs or {})
    if twice:
        raise UserError(f"argument {min(twice)!r}: given twice")
    return (args, {**kwargs, **named} if kwargs and named else named or kwargs), own


def _take_keys(
    function: Callable[..., Any], name: str | None, campaign: str, options: dict[str, Any]
) -> tuple[str, ContentKeys | None]:
    """Take the options of names by content. Return the campaign, and the keys if they are given."""
    if options.pop("key", None) is None:
        return campaign, None
    if name is not None:
        raise UserError("name and key: give only one")
    keys = ContentKeys(function, options.pop("version", None))
    return campaign or campaign_of(function), keys


def function_row(  # one per key
    name: str,
    campaign: str,
    arguments: tuple[Sequence[Any], Mapping[str, Any]],
    encoded: EncodedCall,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the call of a function object as a row of a file, with its lane."""
    args, kwargs = arguments
    raw = {"name": name, "payload": encoded.payload, "service": encoded.service.decode(), **options}
    if encoded.results:
        after = _as_list(after_names(options.get("after"), campaign))
        raw["after"] = [*after, *encoded.results]
    lane = options.get("lane")
    if isinstance(lane, str) and lanes.is_template(lane):
        always = {"name": name, "campaign": campaign, "service": raw["service"]}
        fields = lanes.fields_of({"args": [*args], "kwargs": {**kwargs}}, always)
        raw["lane"] = lanes.escape_template(_expand_lane(lane, fields))
    return raw


def _expand_lane(template: str, fields: dict[str, object]) -> str:
    try:
        return lanes.expand(template, fields)
    except InvalidValue as bad:
        raise key_error_text("lane", bad) from None


def check_work_type(work: object, arguments: tuple[object, object]) -> None:
    """Raise `UserError` for work that can't be encoded."""
    if not isinstance(work, Iterable):
        raise UserError(
            f"{work!r}: neither a function, 'module:function', a list of words nor bytes "
            "(give a function without calling it, as in submit(f, 1))"
        )
    if any(arguments) and not isinstance(work, str):
        raise UserError("args and kwargs: only for a function, or 'module:function'")
    if isinstance(work, str) and (":" not in work or " " in work):
        raise UserError(
            f"{work!r}: neither 'module:function' nor a list of words, such as ['echo', 'hi']"
        )


def _as_list(after: object) -> list[Any]:
    return [*after] if isinstance(after, list | tuple) else [after] if after is not None else []


def after_names(after: object, campaign: str) -> object:
    """Return the `after` of a task in this campaign, with names in place of futures."""
    if isinstance(after, list | tuple):
        return [_name(one, campaign) for one in after]
    return [_name(after, campaign)] if isinstance(after, Future) else after


def _name(one: object, campaign: str) -> object:
    if not isinstance(one, Future):
        return one
    return one.name if one.campaign == campaign else one.full_name


def _encode_work(
    work: Sequence[str] | str | bytes,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> EncodedCall:
    """Return the encoded work of a task without options."""
    if isinstance(work, bytes):
        return EncodedCall(b"default", work)
    if isinstance(work, str):
        payload, needed = inputs.encode_call(work, args or (), kwargs)
        return EncodedCall(payloads.CALL, payload, needed)
    results = inputs.names_in(work) if work else ()
    return EncodedCall(payloads.EXEC, payloads.encode_command(work, results=results), results)


def work_keys(
    work: Sequence[str] | str | bytes,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return work and arguments as the keys of a task in a file."""
    if isinstance(work, str):
        return {
            "call": work,
            "args": [*args] if isinstance(args, tuple) else args,
            "kwargs": kwargs,
        }
    if isinstance(work, bytes):
        return {"payload": work}
    return {"argv": list(work)}


# Bundles.


class BundleSpec(Struct):
    """A bundle to submit."""

    name: str
    campaign: str
    specs: Sequence[TaskSpec]
    unknown: UnknownPolicy = UnknownPolicy.REFUSE

    def tasks(self) -> dict[str, TaskRef]:
        """Return its tasks by their full names."""
        return {
            spelling(self.campaign, spec.name): TaskRef(
                spec.name, self.campaign, encode_text(service_of(spec))
            )
            for spec in self.specs
        }


def bundle_spec(
    payload: object,
    recipients: Iterable[object],
    name: str | None,
    campaign: str | None,
    options: dict[str, Any],
) -> BundleSpec:
    """Return the checked tasks of a bundle. Raises `InvalidTask`."""
    name = f"bundle-{secrets.token_hex(8)}" if name is None else name
    campaign = name if campaign is None else campaign
    one = isinstance(recipients, str | bytes | dict)
    raw = {"name": name, "payload": payload, **options}
    raw["recipients"] = recipients if one else list(recipients)
    if "after" in options:
        raw["after"] = after_names(options["after"], campaign)
    specs = expand_row(raw, campaign)
    for spec in specs if campaign == name else ():
        spec.name = split(spec.name, campaign)
    return BundleSpec(name, campaign, specs)


def create_bundle(bundle: BundleSpec) -> Exchange[int]:
    """Submit a bundle whole or not at all, without futures.

    Returns how many of its tasks are new. Raises `Refused`, and `InvalidTask` if its lane does not
    fit a recipient.
    """
    if not all(spec.lane for spec in bundle.specs):
        service = service_of(bundle.specs[0])
        templates = yield from requests.lane_templates([service])
        assign_lanes(bundle.specs, bundle.campaign, templates.get(service, ""))
    campaign = encode_text(bundle.campaign)
    submission = bundle_submission(bundle.specs, campaign, time.time_ns())
    return (yield from requests.create(submission, bundle.unknown))
