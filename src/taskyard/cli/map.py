"""`taskyard map`: a task a line of input.

Lines are submitted as they come and results are written as they come, each by a thread of its own;
between the two is a bounded window, so that a million lines need no more memory than some
thousands.
"""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.lines import STDIN
from taskyard.campaign.task_spec import check_task, service_of
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import rows
from taskyard.cli.map_answers import MapOutput
from taskyard.cli.options import CliContext, broker_options, raw_option
from taskyard.cli.output import example, print_document
from taskyard.cli.progress import ProgressBar
from taskyard.cli.reaching import connect_client
from taskyard.cli.refusals import explain_refusal
from taskyard.cli.task_options import (
    check_one_work,
    read_payload_option,
    task_keys,
    task_options,
    warn_unused_stdin,
)
from taskyard.cli.templates import (
    call_encoder,
    check_templates,
    command_encoder,
    lane_function,
    payload_encoder,
)
from taskyard.cli.window import FutureWindow
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future as AnyFuture

    from taskyard.cli.input_rows import InputRow
    from taskyard.client.client import Client
    from taskyard.client.futures import Future


@click.command(
    "map",
    context_settings={"allow_interspersed_args": False},
    epilog=example(
        "map --lines urls.txt -- curl -sO {}",
        "map --csv jobs.csv --campaign week-7 -- resize {file} --width {width}",
        "map --lines paths.txt --call imaging:thumbnail",
        "map --lines numbers.txt --json-lines --call statistics:mean",
        "map --lines photos.txt -- convert {} {.}.png",
    ),
)
@click.argument("argv", nargs=-1, metavar="[--] COMMAND...")
@click.option("--lines", metavar="FILE", help="A task a line of this file; - is stdin.")
@click.option("--csv", metavar="FILE", help="A task a row; the first row names the columns.")
@click.option("--jsonl", metavar="FILE", help="A task a line, each a JSON object.")
@click.option(
    "--json-lines", is_flag=True, help="With --call: each line is a JSON value, not a text."
)
@click.option("--no-wait", is_flag=True, help="Only submit.")
@click.option(
    "--keep-order/--as-completed",
    default=True,
    help="Print results in the order of the input (the default), or as they come.",
)
@task_options
@raw_option
@broker_options
@click.pass_obj
def map_rows(
    cli_context: CliContext,
    /,
    argv: tuple[str, ...],
    *,
    no_wait: bool,
    keep_order: bool,
    **values: Any,  # noqa: ANN401  # files, and the options of a task
) -> ExitCode:
    """Run a command for every line of a file, or of stdin.

    {} in the command, or in --lane, is the line, {#} its number, {column} a field of a table or an
    object. Of a line that is a path, {.} is all but its extension, {/} its last part, {//} its
    directory, {/.} its last part without extension. An unknown {name} is refused; {{name}} stands
    for {name} itself; other braces, as in awk '{print $1}', are left alone.

    A function (--call) gets lines and cells as texts; with --json-lines it gets the number, list or
    object that a line is, and what is a number with --jsonl stays one.

    The tasks are called CAMPAIGN-NUMBER. Their results are printed one after the other, each ending
    a line; what failed is told on stderr, and it exits 1, or 5 if some were cancelled and none
    failed. Only the last 1 MiB of a result is kept: more is reported on stderr, and exits 1.

    To run it again with the same --campaign and input is harmless: what is done is not done again.
    """
    kind, path = _source(values)
    campaign = values["campaign"] or f"map-{secrets.token_hex(5)}"
    encode = _encoder(argv, values, has_columns=kind in ("csv", "jsonl"))
    if path != STDIN:
        warn_unused_stdin(cli_context, values)
    with connect_client(cli_context) as client, _refusal_hint(campaign, values):
        if not values["campaign"]:
            cli_context.info(f"campaign {campaign}")
        cli_context.interrupt_message = (
            f"interrupted; what was submitted goes on: `taskyard cancel --campaign {campaign}` "
            f"ends it, the same `taskyard map --campaign {campaign}` resumes"
        )
        send = _submitter(client, campaign, values, watch=not no_wait)
        futures = (send(row, encode(row)) for row in rows(kind, path))
        if no_wait:
            return _submit(cli_context, client, campaign, futures)
        return _submit_and_print(cli_context, campaign, futures, in_order=keep_order)


@contextmanager
def _refusal_hint(campaign: str, values: dict[str, Any]) -> Iterator[None]:
    """What the broker refuses, told as it looks from here."""
    try:
        yield
    except Refused as refused:
        name = str(refused).removeprefix("task ").partition(" was refused: ")[0]
        known = f"campaign {campaign} has task {name} with another {{}}; give another --campaign"
        raise explain_refusal(refused, values, known) from refused


def _submit_and_print(
    cli_context: CliContext, campaign: str, futures: Iterable[Future], *, in_order: bool
) -> ExitCode:
    with (
        MapOutput(cli_context, campaign) as answer,
        FutureWindow(answer.write, answer.flush, in_order=in_order) as window,
    ):
        for future in futures:
            window.add(future)
            answer.submitted(window.added)
        answer.submitted(window.added, is_all=True)
        window.finish()
    return answer.exit_code()


def _submit(
    cli_context: CliContext, client: Client, campaign: str, futures: Iterable[Future]
) -> ExitCode:
    wrong: list[BaseException] = []

    def taken(future: AnyFuture[Any]) -> None:
        error = future.exception()
        if error is not None:
            wrong.append(error)

    number = 0
    with ProgressBar(cli_context, f"campaign {campaign}", verb="submitted") as meter:
        for number, future in enumerate(futures, start=1):
            future.add_done_callback(taken)
            if wrong:
                break
            meter.update(number, None)
        client.status()  # answered when all of it is acknowledged
    if wrong:
        raise wrong[0]
    if cli_context.as_json:
        print_document("map", campaign=campaign, submitted=number)
    elif not cli_context.quiet:
        click.echo(
            f"campaign {escape_line(campaign)}: {format_count(number, 'task')} submitted", err=True
        )
    return ExitCode.OK


def _source(values: dict[str, Any]) -> tuple[str, str]:
    """Which kind of rows, and which file they are in."""
    kinds = {kind: values[kind] for kind in ("lines", "csv", "jsonl") if values[kind] is not None}
    if len(kinds) > 1:
        raise UserError(f"give one of --{' and --'.join(kinds)}, not several")
    kind, path = next(iter(kinds.items()), ("lines", STDIN))
    if not values["json_lines"]:
        return kind, path
    if values["call"] is None:
        raise UserError("--json-lines goes with --call: a command gets each line as it is written")
    if kind != "lines":
        raise UserError(f"--json-lines goes with --lines or stdin, not with --{kind}")
    return "json_lines", path


def _encoder(
    argv: tuple[str, ...], values: dict[str, Any], *, has_columns: bool
) -> Callable[[InputRow], bytes]:
    check_one_work(argv, values)
    if values["payload"] is not None:
        payload = read_payload_option(values["payload"]).decode(errors="surrogateescape")
        check_templates([payload], has_columns=has_columns)
        return payload_encoder(payload)
    env, cwd = dict(values["env"]) or None, values["cwd"]
    if values["call"] is not None:
        check_templates(argv or ["{}"], has_columns=has_columns)
        return call_encoder(values["call"], argv, env, cwd)
    check_templates(argv, has_columns=has_columns)
    return command_encoder(argv, env, cwd)


def _submitter(
    client: Client, campaign: str, values: dict[str, Any], *, watch: bool
) -> Callable[[InputRow, bytes], Future]:
    """Submits tasks that differ in name, payload and lane alone."""
    call, is_payload = values["call"], values["payload"] is not None
    work = {"call": call} if call else {"payload": ""} if is_payload else {"argv": ["true"]}
    pattern = check_task({"name": campaign, **task_keys(values), "lane": None, **work})
    submission = encode_batch([pattern], campaign.encode(), time.time_ns())
    terms, unknown = submission.terms[0], values["wait_for_unknown"]
    service = service_of(pattern)
    lane = values["lane"] or client.lane_templates([service]).get(service, "")
    lane_of = lane_function(lane, campaign, service)

    def send(row: InputRow, payload: bytes) -> Future:
        name = f"{campaign}-{row.number}"
        return client.submit_encoded(
            *(name, payload, terms),
            lane=lane_of(name, row, payload),
            after=pattern.after,
            wait_for_unknown=unknown,
            watch=watch,
        )

    return send
