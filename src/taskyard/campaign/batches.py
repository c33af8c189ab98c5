"""Tasks as a user wrote them become the columns that the broker takes.

What tasks have in common becomes one object that they share: a campaign of a million tasks has a
handful of different terms. Durations from now are counted from one moment for all of them.
"""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING, Final

from taskyard.campaign.task_spec import InvalidTask, TaskSpec
from taskyard.core.limits import AFTER_A_MESSAGE_MAX, PAYLOAD_BYTES_MAX
from taskyard.core.model import Submission, Terms
from taskyard.errors import UserError
from taskyard.wire.payloads import CALL, EXEC, encode_call, encode_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Tasks in one submission, unless asked otherwise: one message, one record, a fraction of a second.
TASKS_PER_BATCH: Final = 10_000

#: Bytes in one submission, unless asked otherwise: well under what one message may have.
BYTES_PER_BATCH: Final = 8 * 1024 * 1024

#: The names that one task has (its own, its lane, those it waits for): with the longest payload
#: they still fit one message.
NAMES_BYTES_MAX: Final = 8 * 1024 * 1024

#: All of a bundle: it is one message, well under what one may have.
BUNDLE_BYTES_MAX: Final = 24 * 1024 * 1024

#: What a message has beside a name itself: its mark and its length.
_NAME_EXTRA_BYTES: Final = 5

#: What a name counts beside its bytes that a task waits for: a message may have only so many.
AFTER_EXTRA_BYTES: Final = BYTES_PER_BATCH // AFTER_A_MESSAGE_MAX

_DEFAULT: Final = Terms().service

#: Marks that tell terms apart; tasks of which all are equal share theirs.
_Key = tuple[bytes, int, object, object, object, int, int, int]


def encode_batch(specs: Sequence[TaskSpec], campaign: bytes, now_ns: int) -> Submission:
    """These tasks as one batch, in this order."""
    places: dict[_Key, int] = {}
    terms: list[Terms] = []
    terms_at: list[int] = []
    payloads: list[bytes] = []
    for spec in specs:
        service, payload = _service_and_payload(spec)
        payloads.append(payload)
        key = (
            *(service, spec.priority, spec.due, spec.expiry, spec.retries),
            *(spec.backoff_ns, spec.time_limit_ns, spec.slots),
        )
        place = places.get(key)
        if place is None:
            place = places[key] = len(terms)
            terms.append(_terms(spec, service, campaign, now_ns))
        terms_at.append(place)
    lanes = [encode_text(spec.lane) for spec in specs]
    after = [[*map(encode_text, spec.after)] if spec.after else [] for spec in specs]
    return Submission(
        names=[encode_text(spec.name) for spec in specs],
        payloads=payloads[:1] if _same_payload(payloads) else payloads,
        terms=terms,
        terms_at=terms_at if len(terms) > 1 else None,
        lanes=lanes if any(lanes) else None,
        after=after if any(after) else None,
    )


def _same_payload(payloads: Sequence[bytes]) -> bool:
    """All are the very same, as those of a bundle are, or empty."""
    return all(payload is payloads[0] for payload in payloads) or not any(payloads)


def encode_text(text: str) -> bytes:
    """A name as it is sent. Raises `UserError` where it is no Unicode, such as half a character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text!r} can't be sent: it is not valid Unicode; use UTF-8") from None


def task_bytes(name: bytes, payload: bytes, lane: bytes, after: Sequence[bytes]) -> int:
    """Count what a task takes of a message, beside its terms. Raises `UserError` for too much."""
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
            f"task {shown!r}: a payload of {payload_bytes:,} bytes is too large, at most "
            f"{PAYLOAD_BYTES_MAX:,} are taken; put it in a file that the task names"
        )
    raise InvalidTask(
        f"task {shown!r}: names of {names_bytes:,} bytes (its own, its lane, those it waits for) "
        f"are too much, at most {NAMES_BYTES_MAX:,} are taken; put a task in between"
    )


def _service_and_payload(spec: TaskSpec) -> tuple[bytes, bytes]:
    """The service and the payload of a task."""
    try:
        if spec.argv is not None:
            service, payload = EXEC, encode_command(spec.argv, spec.env, spec.cwd)
        elif spec.call is not None:
            arguments = (spec.args or (), spec.kwargs or {})
            service, payload = CALL, encode_call(spec.call, *arguments, spec.env, spec.cwd)
        else:
            service, payload = _DEFAULT, spec.payload or b""
    except UserError as wrong:  # values of Parquet or Python that JSON does not have
        raise InvalidTask(f"task {spec.name!r}: {wrong}") from None
    return service if spec.service is None else encode_text(spec.service), payload


def _terms(spec: TaskSpec, service: bytes, campaign: bytes, now_ns: int) -> Terms:
    delays_ns = None
    if spec.retries is not None:
        delays_ns = tuple([round(multiple * spec.backoff_ns) for multiple in spec.retries])
    return Terms(
        campaign=campaign,
        service=service,
        priority=spec.priority,
        due_ns=0 if spec.due is None else spec.due.at_ns(now_ns),
        # No longer wanted after this time, tried or not.
        expires_hard_ns=0 if spec.expiry is None else spec.expiry.at_ns(now_ns),
        retry_delays_ns=delays_ns,
        time_limit_ns=spec.time_limit_ns,
        slots=spec.slots,
    )


def encode_batches(
    specs: Iterable[TaskSpec],
    campaign: bytes,
    now_ns: int,
    *,
    tasks_max: int = TASKS_PER_BATCH,
    bytes_max: int = BYTES_PER_BATCH,
) -> Iterator[Submission]:
    """All tasks in batches, in order; a batch over `bytes_max` has one task, or is a whole bundle.

    Raises `InvalidTask` for one that fits no message.
    """
    for is_bundle, some in groupby(specs, _bundle):
        if is_bundle:
            yield bundle_submission(list(some), campaign, now_ns)
        else:
            yield from _in_batches(some, campaign, now_ns, (tasks_max, bytes_max))


def _bundle(spec: TaskSpec) -> str:
    return "" if spec.bundle_ref is None else spec.bundle_ref.bundle


def bundle_submission(specs: Sequence[TaskSpec], campaign: bytes, now_ns: int) -> Submission:
    """The tasks of a bundle as one batch, with their payload once. Raises `InvalidTask` if it fits
    no message."""
    whole = encode_batch(specs, campaign, now_ns)
    lengths = _lengths(whole)
    length = sum(lengths) - (len(lengths) - 1) * len(whole.payloads[0])
    if length > BUNDLE_BYTES_MAX:
        raise InvalidTask(
            f"bundle {_bundle(specs[0])!r}: payload, names and lanes of {length:,} bytes are too "
            f"much, at most {BUNDLE_BYTES_MAX:,} are taken; make several of it"
        )
    return whole


def _in_batches(
    specs: Iterable[TaskSpec], campaign: bytes, now_ns: int, limits: tuple[int, int]
) -> Iterator[Submission]:
    tasks_max, bytes_max = limits
    line = iter(specs)
    while batch := list(islice(line, tasks_max)):
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
            whole.payload_of(index),
            whole.lanes[index] if whole.lanes else b"",
            whole.after[index] if whole.after else (),
        )
        for index, name in enumerate(whole.names)
    ]


def _ranges_within(lengths: list[int], bytes_max: int) -> Iterator[tuple[int, int]]:
    """Ranges that have no more than so many bytes, or one task."""
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > bytes_max:
            yield first, index
            first, total = index, 0
        total += length
    yield first, len(lengths)
