"""`taskyard map`: a task a line of input.

Lines are submitted as they come and results are written as they come, each by a thread of its own;
between the two is a bounded window, so that a million lines need no more memory than some
thousands.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

import click

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.lines import STDIN
from taskyard.campaign.task_spec import check_task, service_of
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import DOCUMENT_VERSION, MapSubmitDocument, MapTask
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import rows
from taskyard.cli.options import CliContext, broker_options, raw_option
from taskyard.cli.output import (
    encode_json,
    example,
    print_document,
    text_or_base64,
    write_bytes,
)
from taskyard.cli.progress import ProgressBar, format_counts
from taskyard.cli.submit import explain_refusal
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
from taskyard.errors import (
    ExitCode,
    OutputTruncated,
    Refused,
    TaskBlocked,
    TaskFailed,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future as AnyFuture

    from taskyard.cli.input_rows import InputRow
    from taskyard.client.client import Client
    from taskyard.client.futures import Future

#: Failures that are told one by one; the others are counted.
FAILURES_SHOWN: Final = 20

#: Tasks under way: more than there are slots, so that a slow one at the head does not leave workers
#: idle; some tens of megabytes.
FUTURES_MAX: Final = 20_000

#: How often who waits for room looks whether telling has gone wrong.
_POLL_SECONDS: Final = 0.2

#: How long who leaves waits for a line that is being written.
_LAST_LINE_SECONDS: Final = 2


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
        print_document(MapSubmitDocument(campaign=campaign, submitted=number))
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


# Results.


class MapOutput:
    """Writes results to stdout and failures to stderr, and counts them."""

    def __init__(self, cli_context: CliContext, campaign: str) -> None:
        self._cli_context = cli_context
        self._campaign = campaign
        self._counts: Counter[str] = Counter()
        self._truncated = 0
        self._total: int | None = None
        self._added = 0
        self._meter = ProgressBar(cli_context, campaign, drawn=not sys.stdout.isatty())

    def __enter__(self) -> Self:
        if self._cli_context.as_json:
            campaign = encode_json(self._campaign).decode()
            click.echo(f'{{"document":"map","campaign":{campaign},"tasks":[', nl=False)
        self._meter.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._meter.__exit__(None, None, None)
        if kind is None:
            self._close()
        elif self._added and issubclass(kind, UserError):
            look = f"`taskyard list --campaign {escape_line(self._campaign)}`"
            click.echo(f"what was submitted before this goes on: {look}", err=True)

    def _close(self) -> None:
        counts = dict(self._counts)
        if self._cli_context.as_json:
            end = {"counts": counts, "truncated": self._truncated, "version": DOCUMENT_VERSION}
            click.echo(f"\n],{encode_json(end).decode()[1:]}")
        if self._cli_context.quiet:
            return
        self.flush()  # the last result stands before the summary, also in one pipe
        truncated = f", {self._truncated:,} truncated" if self._truncated else ""
        click.echo(
            f"campaign {escape_line(self._campaign)}: {format_counts(counts)}{truncated}", err=True
        )
        if counts.get("failed"):
            retry = f"`taskyard retry --campaign {escape_line(self._campaign)} --failed`"
            click.echo(f"{retry} tries the failed ones again", err=True)

    # For the reader of the input.

    def submitted(self, added: int, *, is_all: bool = False) -> None:
        """So many tasks were submitted."""
        self._added = added
        if is_all:
            self._total = added

    # For the window.

    def write(self, future: Future) -> None:
        """What has become of the next task."""
        state, value, reason = _outcome(future)
        is_truncated = state == "done" and bool(reason)
        self._counts[state] += 1
        self._truncated += is_truncated
        if self._cli_context.as_json:
            self._write_json(future, state, value, reason)
        elif state == "done":
            write_bytes(value if not value or value.endswith(b"\n") else value + b"\n")
        if reason and not (self._cli_context.as_json and not is_truncated):
            self._report(reason)
        self._meter.count(self._counts, self._total, behind_failure=self._counts["blocked"])

    def _report(self, reason: str) -> None:
        """Write the first failures and truncations to stderr."""
        if self._counts.total() - self._counts["done"] + self._truncated <= FAILURES_SHOWN:
            self.flush()
            self._meter.print_above(f"taskyard: {escape_line(reason)}")

    def _write_json(self, future: Future, state: str, value: bytes, reason: str) -> None:
        fields: dict[str, Any] = {"reason": reason}
        if state == "done":
            fields = text_or_base64("result", value) | {"truncated": bool(reason)}
        task = MapTask(name=future.name, campaign=future.campaign, state=state, **fields)
        comma = b"," if self._counts.total() > 1 else b""
        click.echo(comma + b"\n" + encode_json(task), nl=False)

    def flush(self) -> None:
        """Nothing more is at hand: whoever reads should have what there is."""
        sys.stdout.flush()

    def exit_code(self) -> ExitCode:
        if self._counts["failed"] or self._counts["blocked"] or self._truncated:
            return ExitCode.TASK_FAILED
        return ExitCode.CANCELLED if self._counts["cancelled"] else ExitCode.OK


def _outcome(future: Future) -> tuple[str, bytes, str]:
    """The state, the result and the reason of a task; raises what is no ending of a task. The
    reason of a task that is done is that its result is truncated."""
    if future.cancelled():
        return "cancelled", b"", f"task {future.full_name} was cancelled"
    error = future.exception()
    if error is None:
        return "done", future.result() or b"", ""
    if isinstance(error, OutputTruncated):
        return "done", bytes(error.output), str(error)  # type: ignore[arg-type]  # of no service
    if isinstance(error, TaskBlocked):
        return "blocked", b"", str(error)
    if isinstance(error, TaskFailed):
        return "failed", b"", str(error)
    raise error


class FutureWindow:
    """Hands each future to `on_settled` when it is settled; `on_idle` is called before waiting.
    Use it as a context manager: after its end nothing is told, whatever the reason for leaving."""

    def __init__(
        self,
        on_settled: Callable[[Future], None],
        on_idle: Callable[[], None],
        *,
        in_order: bool,
        futures_max: int = FUTURES_MAX,
    ) -> None:
        self._on_settled = on_settled
        self._on_idle = on_idle
        self._in_order = in_order
        self._room = threading.Semaphore(futures_max)
        self._queue: SimpleQueue[Future | None] = SimpleQueue()
        self._error: BaseException | None = None
        #: Held by who tells. Python ends a thread anywhere when the program ends: if it is writing
        #: then, stdout can't be closed, and the whole program aborts.
        self._output_lock = threading.Lock()
        #: How many there were so far.
        self.added = 0
        self._thread = threading.Thread(target=self._run, name="taskyard-results", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._output_lock.acquire(timeout=_LAST_LINE_SECONDS)  # and never given back

    def add(self, future: Future) -> None:
        """One more; waits for room."""
        while not self._room.acquire(timeout=_POLL_SECONDS):
            self._raise_error()
        self._raise_error()
        self.added += 1
        if self._in_order:
            self._queue.put(future)
        else:
            future.add_done_callback(self._queue.put)  # type: ignore[arg-type]  # it is the same one

    def finish(self) -> None:
        """Wait until all are told."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._deliver_all()
        except BaseException as wrong:  # noqa: BLE001  # it is raised to who submits
            self._error = wrong

    def _deliver_all(self) -> None:
        told = 0
        is_last = False
        while not is_last or told < self.added:
            if self._queue.empty():
                with self._output_lock:
                    self._on_idle()
            future = self._queue.get()
            if future is None:
                is_last = True
                continue
            if not future.done():
                with self._output_lock:
                    self._on_idle()
                concurrent.futures.wait([future])
            with self._output_lock:
                self._on_settled(future)
            told += 1
            self._room.release()
