"""How `map` submits rows: the names of their tasks, retries of those that ended before, and which
options they keep."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from taskyard.campaign.batches import encode_batch, encode_text
from taskyard.campaign.line_names import LineNames
from taskyard.campaign.task_spec import service_of
from taskyard.cli.map_work import task_pattern
from taskyard.cli.templates import Template, lane_function
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName
from taskyard.wire.views import resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.cli.failed_tasks import EndedRows
    from taskyard.cli.input_rows import InputRow
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient

#: Resources with an option of their own.
_NAMED_RESOURCES: Final = ("cpus", "memory", "gpus")


def row_submitter(
    client: InternalClient,
    campaign: str,
    values: dict[str, Any],
    ended: EndedRows | None,
    *,
    watch: bool,
) -> Callable[[InputRow, bytes], Future]:
    """Return a function that submits tasks which differ in name, payload, lane and predecessors.

    It retries those that are in `ended`.
    """
    pattern = task_pattern(campaign, values)
    submission = encode_batch([pattern], campaign.encode(), time.time_ns())
    terms, unknown = submission.terms[0], values["wait_for_unknown"]
    service = service_of(pattern)
    lane = values["lane"] or client.lane_templates([service]).get(service, "")
    lane_of = lane_function(lane, campaign, service)
    templates = [Template(name) for name in pattern.after]
    name_of = _name_function(client, campaign, is_new=not values["campaign"])
    retries = ended if ended and not values["no_retry_failed"] else None

    def send(row: InputRow, payload: bytes) -> Future:
        name = name_of(row)
        lane, after = lane_of(name, row, payload), [one.fill(row) for one in templates]
        if retries and (full_name := spelling(campaign, name)) in retries:
            task = structs.replace(
                submission,
                names=[name.encode()],
                payloads=[payload],
                lanes=[lane.encode()],
                after=[[*map(encode_text, after)]] if after else None,
            )
            retries.retry(full_name, task, wait_for_unknown=unknown)
        return client.submit_encoded(
            *(name, payload, terms),
            lane=lane,
            after=after,
            wait_for_unknown=unknown,
            watch=watch,
        )

    return send


def _name_function(
    client: InternalClient, campaign: str, *, is_new: bool
) -> Callable[[InputRow], str]:
    """Return a function that names the task of a row.

    A new campaign is numbered, and so is the rest of a numbered one. In a campaign that the user
    names, a row is recognised by its text, so that the input may be edited.
    """
    first_name = f"{campaign}-1"
    if is_new or _exists(client, f"{campaign}/{first_name}"):
        return lambda row: f"{campaign}-{row.number}"
    names = LineNames()
    return lambda row: names.next_name(row.identity())


def _exists(client: InternalClient, full_name: str) -> bool:
    try:
        client.show(full_name)
    except UnknownName:
        return False
    return True


def kept_options(client: InternalClient, campaign: str, values: dict[str, Any]) -> list[str]:
    """Return the options that differ from those of tasks which an earlier map has submitted.

    The first task that is not done stands for all. A task keeps the terms of its submission.
    """
    from taskyard.client.requests import scope_of  # noqa: PLC0415  # not for `--help`

    scope = scope_of(campaign=campaign, states=[one for one in TaskState if one != TaskState.DONE])
    former = next(iter(client.tasks(scope)), None)
    if former is None:
        return []
    submission = encode_batch([task_pattern(campaign, values)], campaign.encode(), time.time_ns())
    terms, shown = submission.terms[0], client.show(spelling(campaign, former["name"]))
    delays, amounts = terms.retry_delays_ns, resources(terms.resources)
    given: dict[str, tuple[object, object]] = {
        "--priority": (terms.priority, shown["priority"]),
        "--slots": (terms.slots, shown["slots"]),
        "--time-limit": (terms.time_limit_ns / SECOND_NS or None, shown["time_limit"]),
    }
    if delays is not None:  # else by the settings
        given["--retries"] = [delay / SECOND_NS for delay in delays], shown["retry_delays"]
    for name in sorted({*amounts, *shown["resources"]}):
        option = f"--{name}" if name in _NAMED_RESOURCES else f"--resource {name}"
        given[option] = amounts.get(name), shown["resources"].get(name)
    return [option for option, (new, kept) in given.items() if new != kept]
