"""Bundles (fan-outs): one payload for many recipients, a task for each.

Owns a bundle's payload, its tasks, their names and their lanes. The format of the payload is in
`calls.payloads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from taskyard.calls import payloads
from taskyard.calls.payloads import encode_value
from taskyard.campaign.task_spec import (
    BundleRef,
    InvalidTask,
    TaskSpec,
    check_task,
    key_error_text,
    lane_of,
)
from taskyard.campaign.values import InvalidValue, read_name, read_recipients
from taskyard.core.limits import NAME_BYTES_MAX, TASKS_PER_MESSAGE_MAX
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: The default lane template of a bundle, where its service has none.
RECIPIENT_LANE: Final = "{recipient}"

#: A bundle is accepted or refused as a whole, so it is one message.
RECIPIENTS_MAX: Final = TASKS_PER_MESSAGE_MAX


def expand_row(raw: object, campaign: str = "") -> Sequence[TaskSpec]:
    """Return the checked tasks of a row: one, or those of a bundle. Raises `InvalidTask`."""
    if not isinstance(raw, dict) or raw.get("recipients") is None:
        return (check_task(raw, campaign),)
    return _bundle_tasks(raw, campaign)


def _bundle_tasks(raw: dict[str, Any], campaign: str) -> list[TaskSpec]:
    if raw.get("payload") is None:
        raise InvalidTask('has "recipients" but no "payload"')
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
            f'"recipients" must be at most {RECIPIENTS_MAX:,}, not {count:,} (split the bundle)'
        )


def _check_name(name: str, count: int) -> None:
    length = len(payloads.task_name(name, count - 1).encode())
    if length > NAME_BYTES_MAX:
        raise InvalidTask(
            f'"name" must leave room for /{count - 1}: at most {NAME_BYTES_MAX} bytes with it, not '
            f"{length}"
        )


def _payload(body: object, recipients: Sequence[object]) -> bytes:
    """Return the payload of a bundle: the body and the recipients as JSON."""
    if isinstance(body, bytes):
        try:
            body = body.decode()
        except UnicodeDecodeError:
            raise InvalidTask(
                '"payload" of a bundle must be text or JSON, not bytes (put them in a file)'
            ) from None
    try:
        encoded = encode_value(body, "payload")
        return payloads.encode_bundle(encoded, encode_value(list(recipients), "list of recipients"))
    except UserError as wrong:
        raise InvalidTask(str(wrong)) from None


def _template(lane: object) -> str:
    """Return the lane template of a bundle. Empty: none was given."""
    if lane is None or lane == "":
        return ""
    try:
        return read_name(lane)
    except InvalidValue as bad:
        raise key_error_text("lane", bad) from None


def assign_lanes(specs: Iterable[TaskSpec], campaign: str, template: str) -> None:
    """Set the lanes of a bundle's tasks that give none, by the template of their service.

    Without a template, a task's lane is its recipient. Raises `InvalidTask`.
    """
    for spec in specs:
        if not spec.lane:
            spec.lane = lane_of(spec, campaign, template or RECIPIENT_LANE)
