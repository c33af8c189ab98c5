"""`taskyard map`: a task a line of input, and their results in the order of the input.

Lines are submitted as they come and results are written as they come, each by a thread of its own;
between the two is a bounded window, so that a million lines need no more memory than some
thousands.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Self

import click
import msgspec

from taskyard.cli.connecting import connected
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import (
    DOCUMENT_VERSION,
    example,
    print_document,
    text_or_base64,
    write_bytes,
)
from taskyard.cli.progress import Meter, summary_of
from taskyard.cli.rows import rows
from taskyard.cli.task_options import check_work, payload_of, task_options, terms_of
from taskyard.cli.templates import call_encoder, command_encoder, payload_encoder
from taskyard.cli.window import Window
from taskyard.cli.words import plain
from taskyard.client.campaign.lines import STDIN
from taskyard.client.campaign.submitting import to_submission
from taskyard.client.campaign.tasks import check
from taskyard.errors import ExitCode, TaskBlocked, TaskFailed, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.cli.rows import Row
    from taskyard.client.client import Client
    from taskyard.client.futures import Future

#: Failures that are told one by one; the others are counted.
FAILURES_TOLD: Final = 20

#: How often the bar is moved: more than that is not seen, and takes time from the results.
_SHOWN_SECONDS: Final = 0.1


@click.command(
    "map",
    context_settings={"allow_interspersed_args": False},
    epilog=example(
        "map --lines urls.txt -- curl -sO {}",
        "map --csv jobs.csv --campaign week-7 -- resize {file} --width {width}",
        "map --lines paths.txt --call imaging:thumbnail",
    ),
)
@click.argument("words", nargs=-1, metavar="[--] COMMAND...")
@click.option("--lines", metavar="FILE", help="A task a line of this file; - is stdin.")
@click.option("--csv", metavar="FILE", help="A task a row; the first row names the columns.")
@click.option("--jsonl", metavar="FILE", help="A task a line, each a JSON object.")
@click.option("--no-wait", is_flag=True, help="Only submit.")
@click.option(
    "--keep-order/--as-completed",
    default=True,
    help="Print results in the order of the input (the default), or as they come.",
)
@task_options
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

    {} in the command is the line, {#} its number, {column} a field of a table or an object. The
    tasks are called CAMPAIGN-NUMBER. Their results are printed one after the other, each ending a
    line; what failed is told on stderr, and it exits 1, or 5 if some were cancelled and none
    failed.

    To run it again with the same --campaign and input is harmless: what is done is not done again.
    """
    kind, path = _source(given)
    campaign = given["campaign"] or f"map-{secrets.token_hex(5)}"
    encode = _encoder(words, given)
    if not talk.quiet and not given["campaign"]:
        click.echo(f"campaign {campaign}", err=True)
    talk.interrupted = (
        f"interrupted; what was submitted goes on: `taskyard cancel --campaign {campaign}` ends "
        f"it, the same `taskyard map --campaign {campaign}` resumes"
    )
    with connected(talk) as client, _Answer(talk, campaign, waits=not no_wait) as answer:
        window = Window(answer.tell, answer.pause, in_order=keep_order)
        send = _sender(client, campaign, given, watch=not no_wait)
        for row in rows(kind, path):
            window.add(send(f"{campaign}-{row.number}", encode(row)))
            answer.submitted(window.added)
        answer.submitted(window.added, is_all=True)
        window.finish()
    return answer.exit_code()


def _source(given: dict[str, Any]) -> tuple[str, str]:
    """Which kind of rows, and which file they are in."""
    kinds = {kind: given[kind] for kind in ("lines", "csv", "jsonl") if given[kind] is not None}
    if len(kinds) > 1:
        raise UserError(f"give one of --{' and --'.join(kinds)}, not several")
    return next(iter(kinds.items()), ("lines", STDIN))


def _encoder(words: tuple[str, ...], given: dict[str, Any]) -> Callable[[Row], bytes]:
    check_work(words, given)
    if given["payload"] is not None:
        return payload_encoder(payload_of(given["payload"]).decode(errors="surrogateescape"))
    env, cwd = dict(given["env"]) or None, given["cwd"]
    if given["call"] is not None:
        return call_encoder(given["call"], words, env, cwd)
    return command_encoder(words, env, cwd)


def _sender(
    client: Client, campaign: str, given: dict[str, Any], *, watch: bool
) -> Callable[[str, bytes], Future]:
    """Submits tasks that differ in name and payload alone."""
    if given["wait_for_unknown"]:
        raise UserError("map takes --after of tasks that are there; leave out --wait-for-unknown")
    call, is_payload = given["call"], given["payload"] is not None
    work = {"call": call} if call else {"payload": ""} if is_payload else {"argv": ["true"]}
    template = check({"name": campaign, **terms_of(given), **work})
    submission = to_submission([template], campaign.encode(), time.time_ns())
    terms = submission.terms[0]

    def send(name: str, payload: bytes) -> Future:
        return client.submit_encoded(
            name, payload, terms, lane=template.lane, after=template.after, watch=watch
        )

    return send


class _Answer:
    """Writes results to stdout and failures to stderr, and counts them."""

    def __init__(self, talk: Talk, campaign: str, *, waits: bool) -> None:
        self._talk = talk
        self._campaign = campaign
        self._waits = waits
        self._counts: Counter[str] = Counter()
        self._total: int | None = None
        self._added = 0
        self._shown = 0.0
        self._meter = Meter(talk, campaign, drawn=not sys.stdout.isatty())

    def __enter__(self) -> Self:
        if self._talk.as_json and self._waits:
            campaign = msgspec.json.encode(self._campaign).decode()
            head = f'{{"version":{DOCUMENT_VERSION},"document":"map","campaign":{campaign}'
            click.echo(f'{head},"tasks":[', nl=False)
        self._meter.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._meter.__exit__(None, None, None)
        if kind is None:
            self._close()
        elif self._added and issubclass(kind, UserError):
            goes_on = f"{self._added:,} tasks before it may be under way in campaign"
            click.echo(f"{goes_on} {plain(self._campaign)}", err=True)

    def _close(self) -> None:
        counts = dict(self._counts)
        if self._talk.as_json and self._waits:
            click.echo(f'\n],"counts":{msgspec.json.encode(counts).decode()}}}')
        elif self._talk.as_json:
            print_document("map", campaign=self._campaign, submitted=self._added)
        if self._talk.quiet:
            return
        told = summary_of(counts) if self._waits else f"{self._added:,} tasks are submitted"
        click.echo(f"campaign {plain(self._campaign)}: {told}", err=True)
        if counts.get("failed"):
            retry = f"`taskyard retry --campaign {plain(self._campaign)} --failed`"
            click.echo(f"{retry} tries the failed ones again", err=True)

    # For the reader of the input.

    def submitted(self, added: int, *, is_all: bool = False) -> None:
        """So many tasks were submitted."""
        self._added = added
        if is_all:
            self._total = added

    # For the window.

    def tell(self, future: Future) -> None:
        """What has become of the next task."""
        state, value, reason = _ending(future)
        self._counts[state] += 1
        if self._talk.as_json:
            if self._waits:
                self._tell_json(future.name, state, value, reason)
        elif state == "done":
            write_bytes(value if not value or value.endswith(b"\n") else value + b"\n")
        elif self._counts.total() - self._counts["done"] <= FAILURES_TOLD:
            self.pause()
            click.echo(f"taskyard: {plain(reason)}", err=True)
        now = time.monotonic()
        if now - self._shown > _SHOWN_SECONDS:
            self._shown = now
            self._meter.update(self._counts.total(), self._total, self._counts["failed"])

    def _tell_json(self, name: str, state: str, value: bytes, reason: str) -> None:
        told: dict[str, Any] = {"name": name, "state": state}
        told |= text_or_base64("result", value) if state == "done" else {"reason": reason}
        comma = b"," if self._counts.total() > 1 else b""
        click.echo(comma + b"\n" + msgspec.json.encode(told), nl=False)

    def pause(self) -> None:
        """Nothing more is at hand: whoever reads should have what there is."""
        sys.stdout.flush()

    def exit_code(self) -> ExitCode:
        if self._counts["failed"] or self._counts["blocked"]:
            return ExitCode.TASK_FAILED
        return ExitCode.CANCELLED if self._counts["cancelled"] else ExitCode.GOOD


def _ending(future: Future) -> tuple[str, bytes, str]:
    """The state, the result and the reason of a task; raises what is no ending of a task."""
    if future.cancelled():
        return "cancelled", b"", f"task {future.name} was cancelled"
    error = future.exception()
    if error is None:
        return "done", future.result() or b"", ""
    if isinstance(error, TaskBlocked):
        return "blocked", b"", str(error)
    if isinstance(error, TaskFailed):
        return "failed", b"", str(error)
    raise error
