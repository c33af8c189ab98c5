"""The tasks of `map`: their payloads and names, how they are submitted, and a dry run."""

from __future__ import annotations

import re
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import structs

from taskyard.campaign.batches import encode_batch, encode_text
from taskyard.campaign.line_names import LineNames
from taskyard.campaign.task_spec import check_task, service_of
from taskyard.campaign.values import shown
from taskyard.cli.documents import DOCUMENT_VERSION, MapPlannedTask
from taskyard.cli.format import escape_line
from taskyard.cli.output import encode_json, text_or_base64
from taskyard.cli.task_options import check_one_work, read_payload_option, task_keys
from taskyard.cli.templates import (
    CommandOptions,
    Template,
    arguments_function,
    call_encoder,
    check_templates,
    command_encoder,
    command_function,
    lane_function,
    payload_encoder,
    template_keys,
)
from taskyard.core.identity import spelling, split
from taskyard.core.limits import SECOND_NS
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, UnknownName, UserError
from taskyard.wire.payloads import encode_value
from taskyard.wire.views import resources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from taskyard.campaign.task_spec import TaskSpec
    from taskyard.cli.file_tasks import EndedRows, TaskGroup
    from taskyard.cli.input_rows import InputRow
    from taskyard.cli.map_input import MapInput
    from taskyard.cli.options import CliContext
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient

#: Characters that would end a line or be invisible. A shell reads them as `$'\n'`.
_CONTROL: Final = re.compile(r"[\0-\x1f\x7f'\\]")


class MapWork:
    """The command, call or payload of a map, with its templates."""

    #: Encodes a row as a payload.
    encode: Callable[[InputRow], bytes]

    def __init__(self, source: MapInput, values: dict[str, Any]) -> None:
        words = source.words
        check_one_work(words, values)
        self._call, self._is_stdin_file = values["call"], values["stdin"]
        files = (values["inputs"], values["outputs"])
        statuses = [one for given in values["final_exit_status"] for one in given]
        options = CommandOptions(
            values["env"] or None, values["cwd"], values["stdin"], *files, statuses
        )
        if values["payload"] is not None:
            payload = read_payload_option(values["payload"]).decode(errors="surrogateescape")
            self._keys = check_templates([payload], source.shape, "payload")
            self.encode = payload_encoder(payload)
        elif self._call is not None:
            self._keys = check_templates(words or ["{}"], source.shape)
            self.encode = call_encoder(self._call, words, options)
            self._arguments_of = arguments_function(words)
        else:
            if source.is_appended and not template_keys(words, source.shape):
                words = (*words, "{}")
            _check_is_no_shell_line(words)
            self._keys = check_templates(words, source.shape)
            self._argv_of = command_function(words, source.shape)
            self.encode = command_encoder(self._argv_of, options)
        self._is_payload = values["payload"] is not None
        place = (*(values["env"] or {}).values(), values["cwd"] or "")
        texts = [*files[0], *files[1], *place, *values["after"]]
        self._keys += check_templates(texts, source.shape._replace(must_be_used=False))

    def uses_number(self) -> bool:
        """Return whether the number of a row is part of its work."""
        return "#" in self._keys

    def shell_line(self, row: InputRow) -> str:
        """Return the work of a row for people: a command as a shell reads it, in one line."""
        if self._is_payload:
            return escape_line(self.encode(row).decode(errors="backslashreplace"))
        if self._call is not None:
            arguments = [encode_value(one).decode() for one in self._arguments_of(row)]
            return quote_line([self._call, *arguments])
        line = quote_line(self._argv_of(row))
        return f"{line} < {quote_line([row.text])}" if self._is_stdin_file else line

    def json_fields(self, row: InputRow) -> dict[str, Any]:
        """Return the work of a row as fields of a document."""
        if self._is_payload:
            return text_or_base64("payload", self.encode(row))
        if self._call is not None:
            return {"call": self._call, "args": self._arguments_of(row)}
        fields: dict[str, Any] = {"argv": self._argv_of(row)}
        if self._is_stdin_file:
            fields["stdin_file"] = row.text
        if row.block is not None:
            fields["stdin_bytes"] = len(row.block)
        return fields


def _check_is_no_shell_line(words: Sequence[str]) -> None:
    """Raise `UserError` for a whole command line in one word, as GNU parallel takes it."""
    program, space, _ = words[0].partition(" ")
    if space and "/" not in program and all(word == "{}" for word in words[1:]):
        raise UserError(
            f"command {shown(words[0])}: one word, and no shell splits it (write the words without "
            f"quotes, or sh -c {shlex.quote(words[0])})"
        )


def quote_line(words: Sequence[str]) -> str:
    """Quote words for a shell, in one line."""
    return " ".join(_quote(word) for word in words)


def _quote(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    escaped = _CONTROL.sub(
        lambda found: f"\\{found[0]}" if found[0] in "'\\" else f"\\{ord(found[0]):03o}", word
    )
    return f"$'{escaped}'"


def print_commands(
    cli_context: CliContext, source: MapInput, work: MapWork, values: dict[str, Any]
) -> ExitCode:
    """Print the work of each row as it is read. Needs no broker."""
    task_pattern("", values)  # checks the options of tasks
    names = LineNames()
    lane_of = _lane_function(work, values)
    is_named = values["campaign"] is not None

    def planned() -> Iterator[tuple[InputRow, str, str]]:
        for row in source.rows():
            name = names.next_name(row.identity()) if is_named else f"map-{row.number}"
            yield row, name, lane_of(row, name)

    if cli_context.as_json:
        _print_json(values["campaign"], planned(), work)
        return ExitCode.OK
    for row, _, _ in planned():
        sys.stdout.write(work.shell_line(row) + "\n")
    return ExitCode.OK


def _print_json(
    campaign: str | None, planned: Iterable[tuple[InputRow, str, str]], work: MapWork
) -> None:
    """Print the document `MapDryRunDocument`, task by task."""
    start = {"document": "map", "campaign": campaign}
    click.echo(f'{encode_json(start).decode()[:-1]},"tasks":[', nl=False)
    number = 0
    for number, (row, name, lane) in enumerate(planned, start=1):
        task = MapPlannedTask(
            name=None if campaign is None else name, lane=lane, **work.json_fields(row)
        )
        click.echo((b",\n" if number > 1 else b"\n") + encode_json(task), nl=False)
    end = {"planned": number, "version": DOCUMENT_VERSION}
    click.echo(f"\n],{encode_json(end).decode()[1:]}")


def _lane_function(work: MapWork, values: dict[str, Any]) -> Callable[[InputRow, str], str]:
    """Return a function from a row and its name to the lane of --lane.

    The lane templates of services are in the broker's settings, and not read here.
    """
    if not values["lane"]:
        return lambda _row, _name: ""
    campaign = values["campaign"] or ""
    service = service_of(task_pattern(campaign, values))
    lane_of = lane_function(values["lane"], campaign, service)
    return lambda row, name: lane_of(name, row, work.encode(row))


def task_pattern(campaign: str, values: dict[str, Any]) -> TaskSpec:
    """Return a task with the options of all tasks of a map. Raises `InvalidTask`."""
    call, is_payload = values["call"], values["payload"] is not None
    work = {"call": call} if call else {"payload": ""} if is_payload else {"argv": ["true"]}
    return check_task({"name": campaign or "map", **task_keys(values), "lane": None, **work})


#: Resources with an option of their own.
_NAMED_RESOURCES: Final = ("cpus", "memory", "gpus")


def row_submitter(
    client: InternalClient,
    group: TaskGroup,
    values: dict[str, Any],
    ended: EndedRows | None,
    *,
    watch: bool,
) -> Callable[[InputRow, bytes], Future]:
    """Return a function that submits tasks which differ in name, payload, lane and predecessors.

    It retries those that are in `ended`.
    """
    campaign = group.campaign
    pattern = task_pattern(campaign, values)
    submission = encode_batch([pattern], campaign.encode(), time.time_ns())
    terms, unknown = submission.terms[0], values["wait_for_unknown"]
    service = service_of(pattern)
    lane = values["lane"] or client.lane_templates([service]).get(service, "")
    lane_of = lane_function(lane, campaign, service)
    templates = [Template(name) for name in pattern.after]
    name_of = _name_function(client, group, is_new=not values["campaign"])
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
    client: InternalClient, group: TaskGroup, *, is_new: bool
) -> Callable[[InputRow], str]:
    """Return a function that names the task of a row.

    Tasks are numbered without a campaign of the user, or if its first task is. In a campaign that
    the user names, a row is recognised by its text, so that the input may be edited.
    """
    if group.name:
        return lambda _row: split(group.name, group.campaign)
    first = group.match or f"{group.campaign}-"
    if is_new or _exists(client, f"{group.campaign}/{first}1"):
        return lambda row: f"{first}{row.number}"
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
