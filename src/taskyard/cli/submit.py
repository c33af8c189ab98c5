"""The submission of one task, or of one payload for many recipients (fan-out)."""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.lines import file_label
from taskyard.campaign.submitter import BatchSubmitter
from taskyard.campaign.task_spec import InvalidTask, check_task
from taskyard.campaign.values import shown
from taskyard.cli.connection import connect_client, stream_parts, whole_result
from taskyard.cli.documents import (
    BundleDocument,
    BundleWaitDocument,
    SubmitDocument,
    SubmitWaitDocument,
)
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import InputRow, rows
from taskyard.cli.options import CliContext
from taskyard.cli.output import (
    print_document,
    result_fields,
    warn_if_truncated,
    write_bytes,
    write_result,
)
from taskyard.cli.output_directory import OutputDirectory
from taskyard.cli.task_options import (
    check_one_work,
    explain_refusal,
    parse_call_arguments,
    read_payload_option,
    task_keys,
    warn_unused_stdin,
)
from taskyard.cli.wait import report, wait_for, wait_target
from taskyard.client import submit
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.client.internal import InternalClient


def submit_task(cli_context: CliContext, argv: tuple[str, ...], values: dict[str, Any]) -> ExitCode:
    """Submit a task and print its name, or with --wait its result."""
    name, output = values["name"], values["output"]
    campaign = values["campaign"] or ""
    if output is not None and not values["wait"]:
        raise UserError("--output: needs --wait")
    if name == "--":
        raise UserError("--name: missing value before --")
    raw = {"name": name or f"{campaign or 'task'}-{secrets.token_hex(8)}", **task_keys(values)}
    spec = check_task(raw | _work(argv, values), campaign)
    is_warned = warn_unused_stdin(cli_context, values)
    unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    with connect_client(cli_context) as client:
        submission = encode_batch([spec], campaign.encode(), time.time_ns())
        name = spelling(campaign, spec.name)
        try:
            new = BatchSubmitter(client, unknown).create(submission, values["after_campaign"])
        except Refused as refused:
            raise explain_refusal(refused, f"task {name}", values, "--name") from refused
        if not new and not cli_context.quiet:
            click.echo(f"task {name} exists already: nothing submitted", err=True)
        if values["wait"]:
            code = _wait(cli_context, client, spec.name, campaign)
            if output is not None:
                _write_output(cli_context, client, output, name)
            if not is_warned:
                warn_unused_stdin(cli_context, values)  # a slow producer may have written meanwhile
            return code
    if cli_context.as_json:
        print_document(SubmitDocument(name=spec.name, campaign=campaign, new=bool(new)))
    else:
        click.echo(name)
    return ExitCode.OK


def _work(argv: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a task that define its work."""
    check_one_work(argv, values)
    if values["call"] is not None:
        return {"call": values["call"], "args": parse_call_arguments(argv)}
    if values["payload"] is not None:
        return {"payload": read_payload_option(values["payload"])}
    return {"argv": list(argv)}


def _wait(
    cli_context: CliContext, client: InternalClient, own_name: str, campaign: str
) -> ExitCode:
    name = spelling(campaign, own_name)
    cli_context.interrupt_message = f"interrupted; task {name} continues: `taskyard wait {name}`"
    state = client.wait_names([name])[name]
    result = client.kept_result(name) if state is TaskState.DONE else None
    is_long = result is not None and result.blob is not None
    if is_long and not cli_context.as_json:
        for part in stream_parts(client, name):
            write_bytes(part)
        return ExitCode.OK
    if is_long:
        result = whole_result(client, name)
    if cli_context.as_json:
        fields: dict[str, Any] = {"reason": client.why(name)}
        if result is not None:
            fields = result_fields(result)
        document = SubmitWaitDocument(
            name=own_name, campaign=campaign, state=state.name.lower(), **fields
        )
        print_document(document)
    elif result is not None:
        write_result(result.text)
    else:
        click.echo(f"taskyard: task {name}: {client.why(name)}", err=True)
    return exit_code_of(state) if result is None else warn_if_truncated(name, result)


def _write_output(cli_context: CliContext, client: InternalClient, output: str, name: str) -> None:
    with OutputDirectory(cli_context, client, Path(output)) as directory:
        directory.write(name)


def exit_code_of(state: TaskState) -> ExitCode:
    """Return the exit code for the state of a settled task."""
    if state is TaskState.DONE:
        return ExitCode.OK
    return ExitCode.CANCELLED if state is TaskState.CANCELLED else ExitCode.TASK_FAILED


#: File suffixes whose rows have fields. In other files a recipient is a line.
_KINDS: Final = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def submit_bundle(
    cli_context: CliContext, argv: tuple[str, ...], values: dict[str, Any]
) -> ExitCode:
    """Submit one payload for many recipients, and print the bundle's name."""
    _check(argv, values)
    given = [
        InputRow(number, f"--to {one}", one, one) for number, one in enumerate(values["to"], 1)
    ]
    path = values["to_file"]
    recipients = [*given, *(rows(_recipient_format(path), path) if path is not None else ())]
    bundle_spec = _bundle_spec(recipients, path or "--to", values["name"], values)
    with connect_client(cli_context) as client:
        new = _create(client, bundle_spec, recipients)
        if not new and not cli_context.quiet:
            message = f"bundle {escape_line(bundle_spec.name)} exists already: nothing submitted"
            click.echo(message, err=True)
        tasks = len(bundle_spec.specs)
        if values["wait"]:
            return _wait_for_bundle(cli_context, client, bundle_spec, new=new)
    if cli_context.as_json:
        document = BundleDocument(
            name=bundle_spec.name, campaign=bundle_spec.campaign, tasks=tasks, new=new
        )
        print_document(document)
    else:
        cli_context.info(f"{format_count(tasks, 'task')}, {new:,} new")
        click.echo(bundle_spec.name)
    return ExitCode.OK


#: Options of commands, which the same payload for many recipients has none of.
_OF_COMMANDS: Final = (
    *("call", "cwd", "env", "inputs", "outputs", "final_exit_status", "output", "after_campaign"),
)


def _check(argv: tuple[str, ...], values: dict[str, Any]) -> None:
    """Raise `UserError` for options that a bundle can't have."""
    given = [f"--{key.replace('_', '-')}" for key in _OF_COMMANDS if values[key]]
    if argv or given:
        problem = given[0] if given else shown(argv[0])
        raise UserError(f"{problem}: --to and --to-file need --payload, and no command")


def _recipient_format(path: str) -> str:
    """Return the format of a recipients file by its suffix."""
    return _KINDS.get(Path(path.lower().removesuffix(".gz")).suffix, "lines")


def _bundle_spec(
    recipients: Sequence[InputRow], path: str, name: str | None, values: dict[str, Any]
) -> submit.BundleSpec:
    if values["payload"] is None:
        raise UserError("missing payload: give --payload TEXT or --payload @FILE")
    if not recipients:
        raise UserError(f"{path if path == '--to' else file_label(path)}: no recipients")
    entries = [row.text if row.fields is None else row.fields for row in recipients]
    payload = read_payload_option(values["payload"])
    with _with_line_numbers(recipients):
        bundle_spec = submit.bundle_spec(
            payload, entries, name, values["campaign"], task_keys(values)
        )
    bundle_spec.unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    return bundle_spec


@contextmanager
def _with_line_numbers(recipients: Sequence[InputRow]) -> Iterator[None]:
    """Add the line of the recipient to the message of an `InvalidTask`."""
    try:
        yield
    except InvalidTask as bad:
        place = "the bundle" if bad.offset is None else recipients[bad.offset].place
        raise UserError(f"{place}: {bad}") from bad


def _create(
    client: InternalClient, bundle_spec: submit.BundleSpec, recipients: Sequence[InputRow]
) -> int:
    try:
        with _with_line_numbers(recipients):
            return client.create_bundle(bundle_spec)
    except Refused as refused:
        subject = f"bundle {bundle_spec.name}"
        raise explain_refusal(refused, subject, {"payload": True}, "--name") from refused


def _wait_for_bundle(
    cli_context: CliContext, client: InternalClient, bundle_spec: submit.BundleSpec, *, new: int
) -> ExitCode:
    campaign, names = escape_line(bundle_spec.campaign), [*bundle_spec.tasks()]
    cli_context.interrupt_message = (
        f"interrupted; the tasks continue: `taskyard wait --campaign {campaign}`"
    )
    is_own = bundle_spec.campaign == bundle_spec.name
    target = (
        wait_target(client, campaign=bundle_spec.name) if is_own else wait_target(client, names)
    )
    settled = wait_for(cli_context, target)
    document = BundleWaitDocument(
        name=bundle_spec.name,
        campaign=bundle_spec.campaign,
        tasks=len(names),
        new=new,
        settled=settled,
        counts=target.counts,
        behind_failure=target.behind_failure,
    )
    report(cli_context, target, document)
    return target.exit_code()
