"""`taskyard map`: run a task for each row of input.

The main thread submits rows as they arrive. Another thread writes results as tasks settle. A
bounded window between the two limits memory, however long the input is.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

import click

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.lines import STDIN
from taskyard.campaign.task_spec import check_task, service_of
from taskyard.cli.documents import DOCUMENT_VERSION, MapSubmitDocument, MapTask
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import rows
from taskyard.cli.local_service import (
    call_problem,
    check_workers,
    local_service,
    make_worker_spec,
    service_options,
)
from taskyard.cli.options import CliContext, broker_options, raw_option
from taskyard.cli.output import (
    encode_json,
    example,
    print_document,
    text_or_base64,
    write_bytes,
)
from taskyard.cli.progress import ProgressBar, format_counts
from taskyard.cli.task_options import (
    check_one_work,
    explain_refusal,
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
    NoBroker,
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
    from taskyard.process.supervisor import WorkerSpec

#: The most failures that are printed. The others are only counted.
FAILURES_SHOWN: Final = 20

#: The most unsettled tasks. More than there are slots, so that a slow task at the head does not
#: idle workers. Takes some tens of megabytes.
FUTURES_MAX: Final = 20_000

#: How often `add` checks for an error of the output thread while it waits for room.
_POLL_SECONDS: Final = 0.2

#: How long `__exit__` waits for a line that is being written.
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
@click.option("--lines", metavar="FILE", help="Submit a task per line of this file. - is stdin.")
@click.option(
    "--csv", metavar="FILE", help="Submit a task per row. The first row has the column names."
)
@click.option("--jsonl", metavar="FILE", help="Submit a task per line, each a JSON object.")
@click.option("--json-lines", is_flag=True, help="With --call: decode each line as a JSON value.")
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait for results, or only submit to a running broker.",
)
@click.option(
    "--keep-order/--as-completed",
    default=True,
    help="Print results in the order of the input or as tasks settle.",
)
@service_options("-j", "--jobs")
@task_options
@raw_option
@broker_options
@click.pass_obj
def map_rows(
    cli_context: CliContext,
    /,
    argv: tuple[str, ...],
    *,
    wait: bool,
    keep_order: bool,
    **values: Any,  # noqa: ANN401  # input and task options
) -> ExitCode:
    """Run a command for every line of a file or of stdin.

    Uses the broker that runs on the state directory. If there is none, the command starts one with
    workers and stops them at the end.

    In the command, in --inputs, --outputs and --lane, {} is the line, {#} its number and {column} a
    field of a row or object. If the line is a path, {.} is the path without extension, {/} the base
    name, {//} the directory and {/.} the base name without extension. Any other {name} is an error.
    {{name}} stands for a literal {name}. Other braces, as in awk '{print $1}', are left alone.

    A function (--call) gets lines and cells as strings. With --json-lines it gets the decoded value
    of the line, with --jsonl the decoded fields.

    Tasks are named CAMPAIGN-NUMBER. Results go to stdout, each terminated by a newline. Failures go
    to stderr. Exit 1 if a task failed, 5 if tasks were cancelled and none failed. Only the last 1
    MiB of a result is kept. If one was longer, the command warns and exits 1.

    Running it again with the same --campaign and input has no effect on finished tasks.
    """
    kind, path = _source(values)
    campaign = values["campaign"] or f"map-{secrets.token_hex(5)}"
    encode = _encoder(argv, values, has_columns=kind in ("csv", "jsonl"))
    if path != STDIN:
        warn_unused_stdin(cli_context, values)
    spec = make_worker_spec(values, [values["service"]] if values["service"] else [])
    check_own = partial(_check_own, cli_context, values, spec, wait=wait)
    with (
        local_service(cli_context, spec, check_own=check_own, early_workers=True) as service,
        _refusal_hint(values),
    ):
        if not values["campaign"]:
            cli_context.info(f"campaign {campaign}")
        service.report_others(campaign)
        cli_context.interrupt_message = _interrupt_message(campaign, continues=service.is_lasting)
        send = _submitter(service.client, campaign, values, watch=wait)
        futures = (send(row, encode(row)) for row in rows(kind, path))
        if not wait:
            return _submit(cli_context, service.client, campaign, futures)
        return _submit_and_print(cli_context, campaign, futures, in_order=keep_order)


def _interrupt_message(campaign: str, *, continues: bool) -> str:
    resume = f"the same `taskyard map --campaign {campaign}` resumes"
    if not continues:
        return f"interrupted; unfinished tasks are kept: {resume}"
    cancel = f"`taskyard cancel --campaign {campaign}` cancels them"
    return f"interrupted; submitted tasks continue: {cancel}, {resume}"


def _check_own(
    cli_context: CliContext, values: dict[str, Any], spec: WorkerSpec, *, wait: bool
) -> None:
    """Raise an error if the tasks could never run on a broker and workers of this command."""
    for option, problem in (
        ("--no-wait", "" if wait else "leaves the tasks to a running broker"),
        ("--payload", "" if values["payload"] is None else "needs a worker of your own"),
    ):
        if problem:
            raise NoBroker(f"no broker is running, and {option} {problem} (start `taskyard up`)")
    check_workers(cli_context, spec)
    call = values["call"]
    if call is not None and (problem := call_problem(call, spec.allow)):
        raise UserError(f"--call {call}: {problem}")
    slots = int(values["slots"] or 1)
    if spec.slots is not None and slots > spec.slots:
        raise UserError(f"--slots {slots}: a worker has {spec.slots} slots (give --jobs {slots})")


@contextmanager
def _refusal_hint(values: dict[str, Any]) -> Iterator[None]:
    """Rephrase a refusal of the broker in terms of options."""
    try:
        yield
    except Refused as refused:
        subject = f"task {''.join(refused.names[:1])}"
        raise explain_refusal(refused, subject, values, "--campaign") from refused


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
    with ProgressBar(cli_context, f"campaign {campaign}", participle="submitted") as bar:
        for number, future in enumerate(futures, start=1):
            future.add_done_callback(taken)
            if wrong:
                break
            bar.update(number, None)
        client.status()  # returns after all tasks are acknowledged
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
    """Return the kind of rows and their file."""
    kinds = {kind: values[kind] for kind in ("lines", "csv", "jsonl") if values[kind] is not None}
    if len(kinds) > 1:
        raise UserError(f"--{' and --'.join(kinds)} exclude each other")
    kind, path = next(iter(kinds.items()), ("lines", STDIN))
    if not values["json_lines"]:
        return kind, path
    if values["call"] is None:
        raise UserError("--json-lines needs --call")
    if kind != "lines":
        raise UserError(f"--json-lines works with --lines or stdin, not with --{kind}")
    return "json_lines", path


def _encoder(
    argv: tuple[str, ...], values: dict[str, Any], *, has_columns: bool
) -> Callable[[InputRow], bytes]:
    check_one_work(argv, values)
    if values["payload"] is not None:
        payload = read_payload_option(values["payload"]).decode(errors="surrogateescape")
        check_templates([payload], has_columns=has_columns)
        return payload_encoder(payload)
    env, cwd = values["env"] or None, values["cwd"]
    if values["call"] is not None:
        check_templates(argv or ["{}"], has_columns=has_columns)
        return call_encoder(values["call"], argv, env, cwd)
    check_templates(argv, has_columns=has_columns)
    files = (values["inputs"], values["outputs"])
    check_templates([*argv, *files[0], *files[1]], has_columns=has_columns)
    return command_encoder(argv, env, cwd, files)


def _submitter(
    client: Client, campaign: str, values: dict[str, Any], *, watch: bool
) -> Callable[[InputRow, bytes], Future]:
    """Return a function that submits tasks which differ in name, payload and lane only."""
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
        self._bar = ProgressBar(cli_context, campaign, drawn=not sys.stdout.isatty())

    def __enter__(self) -> Self:
        if self._cli_context.as_json:
            campaign = encode_json(self._campaign).decode()
            click.echo(f'{{"document":"map","campaign":{campaign},"tasks":[', nl=False)
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._bar.__exit__(None, None, None)
        if kind is None:
            self._close()
        elif self._added and issubclass(kind, UserError):
            command = f"`taskyard list --campaign {escape_line(self._campaign)}`"
            click.echo(f"tasks submitted before continue: {command}", err=True)

    def _close(self) -> None:
        counts = dict(self._counts)
        if self._cli_context.as_json:
            end = {"counts": counts, "truncated": self._truncated, "version": DOCUMENT_VERSION}
            click.echo(f"\n],{encode_json(end).decode()[1:]}")
        if self._cli_context.quiet:
            return
        self.flush()  # the last result comes before the summary
        truncated = f", {self._truncated:,} truncated" if self._truncated else ""
        click.echo(
            f"campaign {escape_line(self._campaign)}: {format_counts(counts)}{truncated}", err=True
        )
        if counts.get("failed"):
            retry = f"`taskyard retry --campaign {escape_line(self._campaign)} --failed`"
            click.echo(f"retry them with {retry}", err=True)

    # Called by the main thread.

    def submitted(self, added: int, *, is_all: bool = False) -> None:
        """Set the number of submitted tasks."""
        self._added = added
        if is_all:
            self._total = added

    # Called by the output thread.

    def write(self, future: Future) -> None:
        """Write the result or the failure of a task."""
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
        self._bar.count(self._counts, self._total, behind_failure=self._counts["blocked"])

    def _report(self, reason: str) -> None:
        """Write the first failures and truncations to stderr."""
        if self._counts.total() - self._counts["done"] + self._truncated <= FAILURES_SHOWN:
            self.flush()
            self._bar.print_above(f"taskyard: {escape_line(reason)}")

    def _write_json(self, future: Future, state: str, value: bytes, reason: str) -> None:
        fields: dict[str, Any] = {"reason": reason}
        if state == "done":
            fields = text_or_base64("result", value) | {"truncated": bool(reason)}
        task = MapTask(name=future.name, campaign=future.campaign, state=state, **fields)
        comma = b"," if self._counts.total() > 1 else b""
        click.echo(comma + b"\n" + encode_json(task), nl=False)

    def flush(self) -> None:
        """Flush stdout while no task is settled."""
        sys.stdout.flush()

    def exit_code(self) -> ExitCode:
        if self._counts["failed"] or self._counts["blocked"] or self._truncated:
            return ExitCode.TASK_FAILED
        return ExitCode.CANCELLED if self._counts["cancelled"] else ExitCode.OK


def _outcome(future: Future) -> tuple[str, bytes, str]:
    """Return the state, the result and the reason of a settled task.

    The reason of a done task is that its result is truncated. Errors that are not about the task
    are raised.
    """
    if future.cancelled():
        return "cancelled", b"", f"task {future.full_name} was cancelled"
    error = future.exception()
    if error is None:
        return "done", future.result() or b"", ""
    if isinstance(error, OutputTruncated):
        return "done", bytes(error.output), str(error)  # type: ignore[arg-type]  # a plain payload
    if isinstance(error, TaskBlocked):
        return "blocked", b"", str(error)
    if isinstance(error, TaskFailed):
        return "failed", b"", str(error)
    raise error


class FutureWindow:
    """Passes each future to `on_settled` once it is settled, in a thread.

    Calls `on_idle` before it waits. A context manager: after its exit no future is passed on.
    """

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
        #: Held while output is written. Python may stop a daemon thread anywhere at exit. If it
        #: holds stdout's lock then, the interpreter aborts.
        self._output_lock = threading.Lock()
        #: The number of futures added.
        self.added = 0
        self._thread = threading.Thread(target=self._run, name="taskyard-results", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._output_lock.acquire(timeout=_LAST_LINE_SECONDS)  # never released

    def add(self, future: Future) -> None:
        """Add a future. Blocks while the window is full."""
        while not self._room.acquire(timeout=_POLL_SECONDS):
            self._raise_error()
        self._raise_error()
        self.added += 1
        if self._in_order:
            self._queue.put(future)
        else:
            future.add_done_callback(self._queue.put)  # type: ignore[arg-type]  # the same future

    def finish(self) -> None:
        """Wait until all futures are passed on."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._deliver_all()
        except BaseException as wrong:  # noqa: BLE001  # raised again by `add` or `finish`
            self._error = wrong

    def _deliver_all(self) -> None:
        delivered = 0
        is_last = False
        while not is_last or delivered < self.added:
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
            delivered += 1
            self._room.release()
