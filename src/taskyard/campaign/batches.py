"""From checked tasks to the columns of a submission, in batches that fit a message.

Tasks with equal terms share one object: a campaign of a million tasks has a handful of different
terms. Relative times of all tasks are counted from one moment. Sends nothing.
"""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING, Final

import msgspec

from taskyard.calls import inputs
from taskyard.calls.payloads import CALL, EXEC, encode_command
from taskyard.campaign.task_spec import InvalidTask, TaskSpec, resources_of
from taskyard.core.limits import AFTER_A_MESSAGE_MAX, PAYLOAD_BYTES_MAX
from taskyard.core.model import Submission, Terms
from taskyard.core.resources import Resources
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Default tasks per submission: one message, one record, a fraction of a second.
TASKS_PER_BATCH: Final = 10_000

#: Default bytes per submission: well under the limit of a message.
BYTES_PER_BATCH: Final = 8 * 1024 * 1024

#: Names of one task (its own, its lane's, its dependencies'): with the longest payload they still
#: fit one message.
NAMES_BYTES_MAX: Final = 8 * 1024 * 1024

#: A whole bundle: it is one message, well under the limit of a message.
BUNDLE_BYTES_MAX: Final = 24 * 1024 * 1024

#: Bytes that a message adds to each name: its tag and its length.
_NAME_EXTRA_BYTES: Final = 5

#: Bytes that a dependency counts in addition, because a message may name `AFTER_A_MESSAGE_MAX`.
AFTER_EXTRA_BYTES: Final = BYTES_PER_BATCH // AFTER_A_MESSAGE_MAX

_DEFAULT: Final = Terms().service

#: The fields of terms. Tasks with an equal key share their terms.
_Key = tuple[bytes, int, object, object, object, int, int, int, int, int, int, Resources]


def encode_batch(specs: Sequence[TaskSpec], campaign: bytes, now_ns: int) -> Submission:
    """Return these tasks as one batch, in this order."""
    places: dict[_Key, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    payloads: list[bytes] = []
    after: list[list[bytes]] = []
    for spec in specs:
        service, payload, results = _service_and_payload(spec)
        payloads.append(payload)
        after.append([*map(encode_text, spec.after)] if spec.after else [])
        after[-1] += [name for name in map(encode_text, results) if name not in after[-1]]
        key = (
            *(service, spec.priority, spec.due, spec.expiry, spec.retries),
            *(spec.backoff_ns, spec.time_limit_ns, spec.slots),
            *(spec.cpus, spec.memory, spec.gpus, spec.resources),
        )
        place = places.get(key)
        if place is None:
            place = places[key] = len(terms)
            terms.append(_terms(spec, service, campaign, now_ns))
        terms_at.append(place)
    lanes = [encode_text(spec.lane) for spec in specs]
    return Submission(
        names=[encode_text(spec.name) for spec in specs],
        payloads=payloads[:1] if _same_payload(payloads) else payloads,
        terms=terms,
        terms_at=terms_at if len(terms) > 1 else None,
        lanes=lanes if any(lanes) else None,
        after=after if any(after) else None,
    )


def joined(batches: Sequence[Submission]) -> Submission:
    """Return batches as one, in order. Equal terms are shared."""
    places: dict[bytes, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    for batch in batches:
        for index in range(len(batch.names)):
            own = batch.terms_of(index)
            place = places.setdefault(msgspec.msgpack.encode(own), len(terms))
            if place == len(terms):
                terms.append(own)
            terms_at.append(place)
    return Submission(
        names=[name for batch in batches for name in batch.names],
        payloads=[batch.payload_of(i) for batch in batches for i in range(len(batch.names))],
        terms=terms,
        terms_at=terms_at,
        lanes=[lane for one in batches for lane in one.lanes or [b""] * len(one.names)],
        after=[names for one in batches for names in one.after or [[]] * len(one.names)],
    )


def _same_payload(payloads: Sequence[bytes]) -> bool:
    """Return whether all payloads are one object, as in a bundle, or empty."""
    return all(payload is payloads[0] for payload in payloads) or not any(payloads)


def encode_text(text: str) -> bytes:
    """Return a name as UTF-8. Raises `UserError` for half a surrogate pair, and for no text."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text!r}: not valid Unicode") from None
    except AttributeError:
        raise UserError(f"{text!r}: expected a name, as text{_own_name_hint(text)}") from None


def _own_name_hint(given: object) -> str:
    """Return the name of a future or a campaign, for a hint."""
    for attribute in ("full_name", "name"):
        name = getattr(given, attribute, None)
        if isinstance(name, str):
            return f" (its .{attribute} is {name!r})"
    return ""


def task_bytes(name: bytes, payload: bytes, lane: bytes, after: Sequence[bytes]) -> int:
    """Return the bytes of a task in a message, without its terms. Raises `InvalidTask`."""
    names = len(name) + len(lane) + 3 * _NAME_EXTRA_BYTES
    if after:
        names += sum(map(len, after)) + _NAME_EXTRA_BYTES * len(after)
    if len(payload) > PAYLOAD_BYTES_MAX or names > NAMES_BYTES_MAX:
        _check_size(name, len(payload), names)
    return names + len(payload) + AFTER_EXTRA_BYTES * len(after)


def _check_size(name: bytes, payload_bytes: int, names_bytes: int) -> None:
    shown = name[:100].decode(errors="backslashreplace")
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise InvalidTask(
            f"task {shown!r}: payload of {payload_bytes:,} bytes is too large, the limit is "
            f"{PAYLOAD_BYTES_MAX:,} (put it in a file that the task reads)"
        )
    raise InvalidTask(
        f"task {shown!r}: names of {names_bytes:,} bytes (its own, its lane's, its dependencies') "
        f"are too long, the limit is {NAMES_BYTES_MAX:,} (put a task in between)"
    )


def _service_and_payload(spec: TaskSpec) -> tuple[bytes, bytes, list[str]]:
    """Return the service and the payload of a task, and the tasks whose results it needs."""
    results: list[str] = []
    try:
        if spec.argv is not None:
            fields = (spec.argv, spec.env, spec.cwd, spec.inputs, spec.outputs)
            results = inputs.names_in(spec.argv) if spec.after else []
            final = spec.final_exit_status
            payload = encode_command(*fields, results=results, final_exit_status=final)
            service = EXEC
        elif spec.call is not None:
            arguments = (spec.args or (), spec.kwargs or {})
            payload, results = inputs.encode_call(spec.call, *arguments, spec.env, spec.cwd)
            service = CALL
        else:
            service, payload = _DEFAULT, spec.payload or b""
    except UserError as wrong:  # values of Parquet or Python without a JSON form
        raise InvalidTask(f"task {spec.name!r}: {wrong}") from None
    return service if spec.service is None else encode_text(spec.service), payload, results


def _terms(spec: TaskSpec, service: bytes, campaign: bytes, now_ns: int) -> Terms:
    delays_ns = None
    if spec.retries is not None:
        delays_ns = tuple([round(multiple * spec.backoff_ns) for multiple in spec.retries])
    return Terms(
        campaign=campaign,
        service=service,
        priority=spec.priority,
        due_ns=0 if spec.due is None else spec.due.at_ns(now_ns),
        # Also ends a task that was attempted.
        expires_hard_ns=0 if spec.expiry is None else spec.expiry.at_ns(now_ns),
        retry_delays_ns=delays_ns,
        time_limit_ns=spec.time_limit_ns,
        slots=spec.slots,
        resources=resources_of(spec),
    )


def encode_batches(
    specs: Iterable[TaskSpec],
    campaign: bytes,
    now_ns: int,
    *,
    tasks_max: int = TASKS_PER_BATCH,
    bytes_max: int = BYTES_PER_BATCH,
) -> Iterator[Submission]:
    """Yield all tasks in batches, in order. A bundle is one batch.

    A batch over `bytes_max` is one task or a bundle. Raises `InvalidTask` for a task that fits no
    message.
    """
    for is_bundle, some in groupby(specs, _bundle):
        if is_bundle:
            yield bundle_submission(list(some), campaign, now_ns)
        else:
            yield from _in_batches(some, campaign, now_ns, (tasks_max, bytes_max))


def _bundle(spec: TaskSpec) -> str:
    return "" if spec.bundle_ref is None else spec.bundle_ref.bundle


def bundle_submission(specs: Sequence[TaskSpec], campaign: bytes, now_ns: int) -> Submission:
    """Return a bundle's tasks as one batch, with one payload.

    Raises `InvalidTask` if it fits no message.
    """
    whole = encode_batch(specs, campaign, now_ns)
    lengths = _lengths(whole)
    length = sum(lengths) - (len(lengths) - 1) * len(whole.payloads[0])
    if length > BUNDLE_BYTES_MAX:
        raise InvalidTask(
            f"bundle {_bundle(specs[0])!r}: payload, names and lanes of {length:,} bytes are too "
            f"large, the limit is {BUNDLE_BYTES_MAX:,} (split it)"
        )
    return whole


def _in_batches(
    specs: Iterable[TaskSpec], campaign: bytes, now_ns: int, limits: tuple[int, int]
) -> Iterator[Submission]:
    tasks_max, bytes_max = limits
    remaining = iter(specs)
    while batch := list(islice(remaining, tasks_max)):
        whole = encode_batch(batch, campaign, now_ns)
        lengths = _lengths(whole)
        if sum(lengths) <= bytes_max:
            yield whole
            continue
        for first, last in _ranges_within(lengths, bytes_max):
            yield encode_batch(batch[first:last], campaign, now_ns)


def _lengths(whole: Submission) -> list[int]:
    return [
        task_bytes(
            name,
            whole.text_of(index),
            whole.lanes[index] if whole.lanes else b"",
            whole.after[index] if whole.after else (),
        )
        for index, name in enumerate(whole.names)
    ]


def _ranges_within(lengths: list[int], bytes_max: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of tasks with at most `bytes_max` bytes, or of one task."""
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > bytes_max:
            yield first, index
            first, total = index, 0
        total += length
    yield first, len(lengths)
