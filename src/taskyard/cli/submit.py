"""`taskyard submit`: one task."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.task_spec import check_task
from taskyard.cli.completion import complete_campaign
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import SubmitDocument, SubmitWaitDocument
from taskyard.cli.options import CliContext, broker_options, raw_option
from taskyard.cli.output import (
    example,
    print_document,
    result_fields,
    warn_if_truncated,
    write_result,
)
from taskyard.cli.task_options import (
    TaskKey,
    check_one_work,
    parse_call_arguments,
    read_payload_option,
    task_keys,
    task_options,
    warn_unused_stdin,
)
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from taskyard.client.client import Client

#: How a broker says that a name is taken, and that a task to wait for is not there.
_CONFLICT_TEXT: Final = " is known with another payload"
_SAME_BATCH_TEXT: Final = ", or in the same batch"


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog=example(
        "submit --name a --retries 3 -- convert a.png a.jpg",
        "submit --after a --wait -- wc -c a.jpg",
        "submit --call imaging:thumbnail '\"a.png\"' 200",
    ),
)
@click.argument("argv", nargs=-1, metavar="[--] COMMAND...")
@click.option("--wait", is_flag=True, help="Wait until it is settled, and print its result.")
@click.option(
    "--after-campaign",
    type=TaskKey("name", "NAME"),
    multiple=True,
    shell_complete=complete_campaign,
    help="Wait for all tasks that a campaign has now and that have not ended. Repeatable.",
)
@task_options
@click.option("--name", type=TaskKey("name", "NAME"), help="Its name; made up if not given.")
@raw_option
@broker_options
@click.pass_obj
def submit(
    cli_context: CliContext,
    /,
    argv: tuple[str, ...],
    name: str | None,
    *,
    wait: bool,
    **values: Any,  # noqa: ANN401  # the options of a task
) -> int:
    """Submit one task, and print its name.

    The command never passes through a shell. Its stdin is empty: what is piped into `submit` does
    not reach it. The name is printed when the broker has the task on disk. A name that is known
    with the same command is harmless: nothing is submitted twice.

    With --wait it prints what the task printed to stdout, or returned, and exits 0 if it is done,
    1 if it failed or waits behind a failure, 5 if it was cancelled. Of more than 1 MiB only the end
    is kept: that is reported on stderr, and exits 1.
    """
    campaign = values["campaign"] or ""
    if name == "--":
        raise UserError("--name has no value: give one before the --, or leave it out")
    raw = {"name": name or f"{campaign or 'task'}-{secrets.token_hex(8)}", **task_keys(values)}
    spec = check_task(raw | _work(argv, values), campaign)
    is_warned = warn_unused_stdin(cli_context, values)
    unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    with connect_client(cli_context) as client:
        client.assign_lanes([spec], campaign)
        submission = encode_batch([spec], campaign.encode(), time.time_ns())
        name = spelling(campaign, spec.name)
        try:
            new = client.create(submission, unknown, after_campaigns=values["after_campaign"])
        except Refused as refused:
            known = f"task {name} is known with another {{}}; give another --name"
            raise explain_refusal(refused, values, known) from refused
        if not new and not cli_context.quiet:
            click.echo(f"task {name} is known already: nothing was submitted", err=True)
        if wait:
            code = _wait(cli_context, client, spec.name, campaign)
            if not is_warned:
                warn_unused_stdin(cli_context, values)  # a slow producer may have written by now
            return code
    if cli_context.as_json:
        print_document(SubmitDocument(name=spec.name, campaign=campaign, new=bool(new)))
    else:
        click.echo(name)
    return ExitCode.OK


def _work(argv: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    """What the task is to do, as keys of a task."""
    check_one_work(argv, values)
    if values["call"] is not None:
        return {"call": values["call"], "args": parse_call_arguments(argv)}
    if values["payload"] is not None:
        return {"payload": read_payload_option(values["payload"])}
    return {"argv": list(argv)}


def _wait(cli_context: CliContext, client: Client, own_name: str, campaign: str) -> ExitCode:
    name = spelling(campaign, own_name)
    cli_context.interrupt_message = f"interrupted; task {name} goes on: `taskyard wait {name}`"
    state = client.wait_names([name])[name]
    result = client.result_with_size(name) if state is TaskState.DONE else None
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


def exit_code_of(state: TaskState) -> ExitCode:
    """What a settled task makes of the command that waited for it."""
    if state is TaskState.DONE:
        return ExitCode.OK
    return ExitCode.CANCELLED if state is TaskState.CANCELLED else ExitCode.TASK_FAILED


def explain_refusal(refused: Refused, options: dict[str, Any], conflict: str) -> Refused:
    """The refusal of a task with the options `options`; `conflict` tells that its name is taken,
    with {} where the kind of work stands."""
    text = str(refused)
    if _CONFLICT_TEXT in text:
        work = next((kind for kind in ("call", "payload") if options[kind] is not None), "command")
        return Refused(conflict.replace("{}", work))
    return Refused(text.replace(_SAME_BATCH_TEXT, ", or give --wait-for-unknown"))
