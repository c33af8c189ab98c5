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

from taskyard.cli.map_answers import Answer
from taskyard.cli.options import Talk, broker_options, raw_option
from taskyard.cli.printing import example, print_document
from taskyard.cli.progress import Meter
from taskyard.cli.reaching import connected
from taskyard.cli.refusals import in_words
from taskyard.cli.rows import rows
from taskyard.cli.task_options import (
    check_work,
    payload_of,
    task_options,
    terms_of,
    warn_of_stdin,
)
from taskyard.cli.templates import (
    call_encoder,
    check_templates,
    command_encoder,
    lane_maker,
    payload_encoder,
)
from taskyard.cli.window import Window
from taskyard.cli.words import count, plain
from taskyard.client.campaign.lines import STDIN
from taskyard.client.campaign.submitting import to_submission
from taskyard.client.campaign.tasks import check, service_of
from taskyard.client.steering import lane_templates
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future as AnyFuture

    from taskyard.cli.rows import Row
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
@click.argument("words", nargs=-1, metavar="[--] COMMAND...")
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
    talk: Talk,
    /,
    words: tuple[str, ...],
    *,
    no_wait: bool,
    keep_order: bool,
    **given: Any,  # noqa: ANN401  # files, and the options of a task
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
    kind, path = _source(given)
    campaign = given["campaign"] or f"map-{secrets.token_hex(5)}"
    encode = _encoder(words, given, has_columns=kind in ("csv", "jsonl"))
    if path != STDIN:
        warn_of_stdin(talk, given)
    with connected(talk) as client, _told_in_words(campaign, given):
        if not given["campaign"]:
            talk.say(f"campaign {campaign}")
        talk.interrupted = (
            f"interrupted; what was submitted goes on: `taskyard cancel --campaign {campaign}` "
            f"ends it, the same `taskyard map --campaign {campaign}` resumes"
        )
        send = _sender(client, campaign, given, watch=not no_wait)
        futures = (send(row, encode(row)) for row in rows(kind, path))
        if no_wait:
            return _submit(talk, client, campaign, futures)
        return _submit_and_tell(talk, campaign, futures, in_order=keep_order)


@contextmanager
def _told_in_words(campaign: str, given: dict[str, Any]) -> Iterator[None]:
    """What the broker refuses, told as it looks from here."""
    try:
        yield
    except Refused as refused:
        name = str(refused).removeprefix("task ").partition(" was refused: ")[0]
        known = f"campaign {campaign} has task {name} with another {{}}; give another --campaign"
        raise in_words(refused, given, known) from refused


def _submit_and_tell(
    talk: Talk, campaign: str, futures: Iterable[Future], *, in_order: bool
) -> ExitCode:
    with (
        Answer(talk, campaign) as answer,
        Window(answer.tell, answer.pause, in_order=in_order) as window,
    ):
        for future in futures:
            window.add(future)
            answer.submitted(window.added)
        answer.submitted(window.added, is_all=True)
        window.finish()
    return answer.exit_code()


def _submit(talk: Talk, client: Client, campaign: str, futures: Iterable[Future]) -> ExitCode:
    wrong: list[BaseException] = []

    def taken(future: AnyFuture[Any]) -> None:
        error = future.exception()
        if error is not None:
            wrong.append(error)

    number = 0
    with Meter(talk, f"campaign {campaign}", verb="submitted") as meter:
        for number, future in enumerate(futures, start=1):
            future.add_done_callback(taken)
            if wrong:
                break
            meter.update(number, None)
        client.status()  # answered when all of it is acknowledged
    if wrong:
        raise wrong[0]
    if talk.as_json:
        print_document("map", campaign=campaign, submitted=number)
    elif not talk.quiet:
        click.echo(f"campaign {plain(campaign)}: {count(number, 'task')} submitted", err=True)
    return ExitCode.GOOD


def _source(given: dict[str, Any]) -> tuple[str, str]:
    """Which kind of rows, and which file they are in."""
    kinds = {kind: given[kind] for kind in ("lines", "csv", "jsonl") if given[kind] is not None}
    if len(kinds) > 1:
        raise UserError(f"give one of --{' and --'.join(kinds)}, not several")
    kind, path = next(iter(kinds.items()), ("lines", STDIN))
    if not given["json_lines"]:
        return kind, path
    if given["call"] is None:
        raise UserError("--json-lines goes with --call: a command gets each line as it is written")
    if kind != "lines":
        raise UserError(f"--json-lines goes with --lines or stdin, not with --{kind}")
    return "json_lines", path


def _encoder(
    words: tuple[str, ...], given: dict[str, Any], *, has_columns: bool
) -> Callable[[Row], bytes]:
    check_work(words, given)
    if given["payload"] is not None:
        payload = payload_of(given["payload"]).decode(errors="surrogateescape")
        check_templates([payload], has_columns=has_columns)
        return payload_encoder(payload)
    env, cwd = dict(given["env"]) or None, given["cwd"]
    if given["call"] is not None:
        check_templates(words or ["{}"], has_columns=has_columns)
        return call_encoder(given["call"], words, env, cwd)
    check_templates(words, has_columns=has_columns)
    return command_encoder(words, env, cwd)


def _sender(
    client: Client, campaign: str, given: dict[str, Any], *, watch: bool
) -> Callable[[Row, bytes], Future]:
    """Submits tasks that differ in name, payload and lane alone."""
    call, is_payload = given["call"], given["payload"] is not None
    work = {"call": call} if call else {"payload": ""} if is_payload else {"argv": ["true"]}
    pattern = check({"name": campaign, **terms_of(given), "lane": None, **work})
    submission = to_submission([pattern], campaign.encode(), time.time_ns())
    terms, unknown = submission.terms[0], given["wait_for_unknown"]
    service = service_of(pattern)
    lane = given["lane"] or lane_templates(client, [service]).get(service, "")
    lane_of = lane_maker(lane, campaign, service)

    def send(row: Row, payload: bytes) -> Future:
        name = f"{campaign}-{row.number}"
        return client.submit_encoded(
            *(name, payload, terms),
            lane=lane_of(name, row, payload),
            after=pattern.after,
            wait_for_unknown=unknown,
            watch=watch,
        )

    return send
