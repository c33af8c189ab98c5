"""One payload for many recipients becomes a task for each of them, which share it.

Owns what a bundle is made of: its payload, its tasks and their names; and the lane of a task that
says none. What a worker reads of the payload is in `wire.payloads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from taskyard.campaign.task_spec import (
    BundleRef,
    InvalidTask,
    TaskSpec,
    check_task,
    key_error_text,
    lane_of,
    service_of,
)
from taskyard.campaign.values import InvalidValue, read_name, read_recipients
from taskyard.core.limits import NAME_BYTES_MAX, TASKS_PER_MESSAGE_MAX
from taskyard.errors import UserError
from taskyard.wire import payloads
from taskyard.wire.payloads import encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: The lane of a recipient where neither the bundle nor its service's settings say another.
RECIPIENT_LANE: Final = "{recipient}"

#: A bundle is taken whole or not at all, so it is one message.
RECIPIENTS_MAX: Final = TASKS_PER_MESSAGE_MAX


def expand_row(raw: object, campaign: str = "") -> Sequence[TaskSpec]:
    """The tasks that a file or a program describes: one, or those of a bundle. Raises
    `InvalidTask`."""
    if not isinstance(raw, dict) or raw.get("recipients") is None:
        return (check_task(raw, campaign),)
    return _bundle_tasks(raw, campaign)


def _bundle_tasks(raw: dict[str, Any], campaign: str) -> list[TaskSpec]:
    if raw.get("payload") is None:
        raise InvalidTask('has "recipients" and no "payload"; give what they all get')
    try:
        recipients = read_recipients(raw["recipients"])
    except InvalidValue as bad:
        raise key_error_text("recipients", bad) from None
    _check_count(len(recipients))
    own = {key: value for key, value in raw.items() if key not in ("recipients", "lane")}
    whole = check_task(own | {"payload": _payload(raw["payload"], recipients)}, campaign)
    template = _template(raw.get("lane"))
    _check_name(whole.name, len(recipients))
    parts = [
        structs.replace(
            whole,
            name=payloads.task_name(whole.name, offset),
            bundle_ref=BundleRef(whole.name, offset, one, template),
        )
        for offset, one in enumerate(recipients)
    ]
    if template:
        for bundle_ref in parts:
            bundle_ref.lane = lane_of(bundle_ref, campaign, template)
    return parts


def _check_count(count: int) -> None:
    if count > RECIPIENTS_MAX:
        raise InvalidTask(
            f'"recipients" must be at most {RECIPIENTS_MAX:,}, not {count:,}: a bundle is taken '
            "whole; make several of it"
        )


def _check_name(name: str, count: int) -> None:
    length = len(payloads.task_name(name, count - 1).encode())
    if length > NAME_BYTES_MAX:
        raise InvalidTask(
            f'"name" must leave room for /{count - 1}: at most {NAME_BYTES_MAX} bytes with it, not '
            f"{length}"
        )


def _payload(body: object, recipients: Sequence[object]) -> bytes:
    """Text stays text, and what has a structure keeps it."""
    if isinstance(body, bytes):
        try:
            body = body.decode()
        except UnicodeDecodeError:
            raise InvalidTask(
                '"payload" of a bundle must be text or JSON, and these bytes are neither; put them '
                "in a file that it names"
            ) from None
    try:
        encoded = encode_value(body, "payload")
        return payloads.encode_bundle(encoded, encode_value(list(recipients), "list of recipients"))
    except UserError as wrong:
        raise InvalidTask(str(wrong)) from None


def _template(lane: object) -> str:
    """A lane as it is written, to be expanded for each recipient."""
    if lane is None or lane == "":
        return ""
    try:
        return read_name(lane)
    except InvalidValue as bad:
        raise key_error_text("lane", bad) from None


def assign_lanes(
    specs: Iterable[TaskSpec], campaign: str, template_of: Callable[[str], str]
) -> None:
    """Put tasks that say no lane where their service's template says, and those of a bundle in the
    lane of their recipient if it says nothing. Raises `InvalidTask`."""
    for spec in specs:
        if not spec.lane:
            own = "" if spec.bundle_ref is None else RECIPIENT_LANE
            template = template_of(service_of(spec)) or own
            if template:
                spec.lane = lane_of(spec, campaign, template)
