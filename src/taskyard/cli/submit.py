"""The submission of one task to a running broker."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.submitter import BatchSubmitter
from taskyard.campaign.task_spec import check_task
from taskyard.cli.connection import connect_client, stream_parts, whole_result
from taskyard.cli.documents import SubmitDocument, SubmitWaitDocument
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
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from taskyard.client.client import Client


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


def _wait(cli_context: CliContext, client: Client, own_name: str, campaign: str) -> ExitCode:
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


def _write_output(cli_context: CliContext, client: Client, output: str, name: str) -> None:
    with OutputDirectory(cli_context, client, Path(output)) as directory:
        directory.write(name)


def exit_code_of(state: TaskState) -> ExitCode:
    """Return the exit code for the state of a settled task."""
    if state is TaskState.DONE:
        return ExitCode.OK
    return ExitCode.CANCELLED if state is TaskState.CANCELLED else ExitCode.TASK_FAILED
