"""The output of `map`: results and failures, written by a thread as tasks settle.

A bounded window between that thread and the one that submits limits memory, however long the input
is. Submits nothing.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import click

from taskyard import errors
from taskyard.cli.documents import DOCUMENT_VERSION, MapTask
from taskyard.cli.format import escape_line, full_name, shorten_middle
from taskyard.cli.output import encode_json, text_or_base64, write_bytes, write_lines
from taskyard.cli.progress import ProgressBar, format_counts
from taskyard.cli.run_report import RunSummary, StoppedEarly
from taskyard.core.blobs import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future as AnyFuture

    from taskyard.cli.options import CliContext
    from taskyard.cli.run_report import EarlyStop, TaskGroup
    from taskyard.cli.templates import InputRow
    from taskyard.client.futures import Future
    from taskyard.client.internal import InternalClient
    from taskyard.core.events import Scope

#: The most failures that are printed. Later failures are only counted.
FAILURES_SHOWN: Final = 20

#: The most characters of an input that a failure shows.
INPUT_SHOWN_MAX: Final = 60

#: The most unsettled tasks. More than there are slots, so that a slow task at the head does not
#: idle workers. Takes some tens of megabytes.
FUTURES_MAX: Final = 20_000

#: How often `add` checks for an error of the output thread while it waits for room.
_POLL_SECONDS: Final = 0.2

#: How often progress is drawn.
_METER_SECONDS: Final = 1.0

#: How long `__exit__` waits for a line that is being written.
_LAST_LINE_SECONDS: Final = 2


class _TaskInput(NamedTuple):
    """The input of a task: `FILE:LINE` or its number, and its text."""

    place: str
    text: str

    def __str__(self) -> str:
        text = shorten_middle(escape_line(self.text), INPUT_SHOWN_MAX)
        return f"{escape_line(self.place)} ({text})" if text else escape_line(self.place)


class MapOutput:
    """Writes results to stdout and failures to stderr, and counts them."""

    def __init__(
        self,
        cli_context: CliContext,
        group: TaskGroup,
        parts: Callable[..., Iterable[bytes]],
        *,
        ends_lines: bool = True,
    ) -> None:
        """Prepare the output. `parts` returns the parts of a stream of a task."""
        self._cli_context = cli_context
        self._group = group
        #: Whether stdout gets a document of all tasks.
        self.has_document = False
        #: Whether tasks are only counted, and nothing is printed.
        self.is_counted_only = False
        self._parts = parts
        #: Printed after failures.
        self.retry_hint = ""
        #: Called with the name of each task that has run.
        self.copy_to: Callable[[str], None] | None = None
        #: Prints lines of running tasks, with --line-buffer.
        self.live: LiveLines | None = None
        #: Whether outputs are printed, not only failures.
        self.is_shown = True
        #: Whether counts are printed at the end.
        self.has_summary = True
        #: Whether lines of a task's output begin with its input.
        self.has_tags = False
        #: The inputs of unsettled tasks, by full name.
        self._inputs: dict[str, _TaskInput] = {}
        #: Whether a result that does not end with a newline gets one.
        self._ends_lines = ends_lines
        #: Whether results are printed by the tasks. Functions return theirs.
        self.prints_results = True
        self._counts: Counter[str] = Counter()
        self.truncated = 0
        self._total: int | None = None
        self.stopped: StoppedEarly | None = None
        #: Whether the output ends before all tasks have settled.
        self._is_cut = False
        self._bar = ProgressBar(
            cli_context, group.campaign or "tasks", drawn=not sys.stdout.isatty()
        )
        #: Tasks that have settled, also if their results wait for earlier tasks.
        self._meter = _SettledMeter(self._bar)

    def __enter__(self) -> Self:
        if self.has_document:
            campaign = encode_json(self._group.campaign).decode()
            click.echo(f'{{"document":"map","campaign":{campaign},"tasks":[', nl=False)
        self._bar.__enter__()
        self._meter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> bool:
        """Print the summary. Suppresses `StoppedEarly`, which is a part of it."""
        self._meter.stop()
        if kind is None:
            self._bar.count(self._counts, self._total, behind_failure=self._counts["blocked"])
        self._bar.__exit__(None, None, None)
        if kind is None or self._is_cut:
            self._close()
        return isinstance(error, StoppedEarly)

    def _close(self) -> None:
        counts = dict(self._counts)
        if self.has_document:
            end = {
                "counts": counts,
                "truncated": self.truncated,
                "stopped": self._stop_reason(),
                "version": DOCUMENT_VERSION,
            }
            click.echo(f"\n],{encode_json(end).decode()[1:]}")
        self.flush()  # the last result comes before the summary, and its reader may have stopped
        if self._cli_context.quiet or not self.has_summary:
            return
        truncated = f", {self.truncated:,} truncated" if self.truncated else ""
        click.echo(f"{self._group.label}{format_counts(counts)}{truncated}", err=True)
        if counts.get("failed"):
            click.echo(self.retry_hint, err=True)

    def _stop_reason(self) -> str:
        return "" if self.stopped is None else str(self.stopped)

    # Called by the main thread.

    def set_input(self, future: Future, row: InputRow) -> None:
        """Set the input of a task, for tags and failures."""
        self._inputs[future.full_name] = _TaskInput(row.place, row.text)

    def count(self, future: Future) -> None:
        """Show the progress of a task when it settles."""
        self._meter.add(future)

    def all_submitted(self, total: int) -> None:
        """Set the number of tasks, when all are submitted."""
        self._total = self._meter.total = total

    def stop(self, error: StoppedEarly | None) -> None:
        """Print why the command stops early. Cancelled tasks are only counted from now on.

        An interrupt has no error.
        """
        self.stopped, self._is_cut = error, True
        if error is not None and not self._cli_context.quiet:
            self._bar.print_above(f"taskyard: {escape_line(str(error))}")

    def set_unfinished(self, unfinished: int) -> None:
        """Set the number of tasks that have not settled."""
        self._counts["unfinished"] = unfinished
        self._counts = +self._counts

    # Called by the output thread.

    def write(self, future: Future) -> None:
        """Write the result or the failure of a task."""
        state, value, reason = self._outcome(future)
        is_truncated = state == "done" and bool(reason)
        self._counts[state] += 1
        self.truncated += is_truncated
        if self.has_document:
            self._write_json(future, state, value, reason)
        elif self.is_shown and not self.is_counted_only:
            self._write_result(future.full_name, value)
        has_run, is_shown = (
            state in ("done", "failed"),
            self.is_shown and not (self._cli_context.quiet or self.is_counted_only),
        )
        if has_run and future.has_stderr and is_shown:
            self._write_stderr(future.full_name, state)
        is_counted_only = self._cli_context.as_json or (self._is_cut and state == "cancelled")
        if reason and (is_truncated or not is_counted_only):
            self._report(self._failure_line(future, state, reason))
        if self.copy_to is not None and has_run:
            self.copy_to(future.full_name)
        self._inputs.pop(future.full_name, None)

    def _outcome(self, future: Future) -> tuple[str, Iterable[bytes], str]:
        """Return the state, the parts of the result, and the reason of a settled task.

        The reason of a done task is that its result is truncated. The result of a failed task is
        the stdout of its last attempt. Errors that are not about the task are raised.
        """
        if future.cancelled():
            return "cancelled", (), f"task {future.full_name} was cancelled"
        error = future.exception()
        if error is None:
            is_long = isinstance(future.result(), Result)
            return "done", self._parts(future.full_name) if is_long else (future.bytes(),), ""
        if isinstance(error, errors.BytesTruncated):
            kept = error.output
            end = kept.encode(errors="surrogateescape") if isinstance(kept, str) else kept
            return "done", (end,), str(error)
        if isinstance(error, errors.TaskBlocked):
            return "blocked", (), str(error)
        if isinstance(error, errors.TaskFailed):
            has_stdout = future.has_stderr and self.prints_results
            return "failed", self._kept(future.full_name) if has_stdout else (), str(error)
        raise error

    def _kept(self, name: str, stream: str = "stdout") -> Iterator[bytes]:
        """Yield what is kept of a stream of a task's last attempt, and report what is missing."""
        try:
            yield from self._parts(name, stream)
        except (errors.BytesDamaged, errors.BytesMissing, errors.BytesTruncated) as error:
            self._report(str(error))

    def _write_result(self, name: str, parts: Iterable[bytes]) -> None:
        """Write the result of a task, without lines that were printed before."""
        with self.live.lock if self.live is not None else nullcontext():
            skipped = 0 if self.live is None else self.live.printed(name)
            rest = _after(parts, skipped)
            if self._ends_lines:
                write_lines(rest, self._tag(name))
            else:
                for part in rest:
                    write_bytes(part)

    def write_live(self, name: str, lines: bytes) -> None:
        """Write whole lines of a running task. Called by the thread of `LiveLines`."""
        write_lines([lines], self._tag(name))
        self.flush()

    def _tag(self, name: str) -> bytes | None:
        """Return the text before each line of a task. None: there is none."""
        found = self._inputs.get(name) if self.has_tags else None
        return None if found is None else found.text.encode(errors="surrogateescape")

    def _write_stderr(self, name: str, state: str) -> None:
        """Write stderr of a task to stderr, and stdout of a function that failed."""
        self.flush()
        parts = self._kept(name, "stderr")
        if state == "failed" and not self.prints_results:
            parts = chain(self._kept(name), parts)
        tag = self._tag(name)
        start = "" if tag is None else f"{escape_line(tag.decode(errors='replace'))}\t"
        rest = b""
        for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._bar.print_above(start + escape_line(line.decode(errors="replace")))
        if rest:
            self._bar.print_above(start + escape_line(rest.decode(errors="replace")))

    def _failure_line(self, future: Future, state: str, reason: str) -> str:
        """Return the reason that there is no whole result, behind the input of the task."""
        row = self._inputs.get(future.full_name)
        if row is None:
            return reason
        if state == "done":
            return f"{row}: {reason}"
        problem = "behind a failed task" if state == "blocked" else state
        error = None if future.cancelled() else future.exception()
        if isinstance(error, errors.TaskFailed) and error.reason:
            problem = f"{problem}: {error.reason}"
        return f"{row}: {problem} ({future.full_name})"

    def _report(self, reason: str) -> None:
        """Write the first failures and truncations to stderr."""
        if self._counts.total() - self._counts["done"] + self.truncated <= FAILURES_SHOWN:
            self.flush()
            self._bar.print_above(f"taskyard: {escape_line(reason)}")

    def _write_json(self, future: Future, state: str, value: Iterable[bytes], reason: str) -> None:
        whole = b"".join(value)
        fields: dict[str, Any] = {"reason": reason}
        if state == "done":
            fields = text_or_base64("result", whole) | {"truncated": bool(reason)}
        elif whole:
            fields |= text_or_base64("stdout", whole)
        task = MapTask(name=future.name, campaign=future.campaign, state=state, **fields)
        comma = b"," if self._counts.total() > 1 else b""
        click.echo(comma + b"\n" + encode_json(task), nl=False)

    def flush(self) -> None:
        """Flush stdout while no task is settled."""
        sys.stdout.flush()

    def summary(self, seconds: float) -> RunSummary:
        """Return the summary of a run that took `seconds`."""
        counts, reason = dict(self._counts), self._stop_reason()
        return RunSummary(self._group.campaign, self.exit_code(), round(seconds, 3), counts, reason)

    def exit_code(self) -> errors.ExitCode:
        if self.stopped is not None:
            return self.stopped.exit_code
        if self._counts["failed"] or self._counts["blocked"] or self.truncated:
            return errors.ExitCode.TASK_FAILED
        return errors.ExitCode.CANCELLED if self._counts["cancelled"] else errors.ExitCode.OK


def _after(parts: Iterable[bytes], skipped: int) -> Iterator[bytes]:
    """Yield parts without their first bytes."""
    for part in parts:
        yield part[skipped:]
        skipped = max(0, skipped - len(part))


class _SettledMeter:
    """Shows in a thread how many tasks have settled.

    Results in the order of the input may wait for a slow task. The counts do not.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._counts: Counter[str] = Counter()
        #: How many tasks there are. None: not all are submitted.
        self.total: int | None = None
        self._stopping = threading.Event()
        #: Held while the bar is drawn: it is not after `stop`.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread, if there is anything to show."""
        if self._bar.is_shown:
            threading.Thread(target=self._run, name="taskyard-progress", daemon=True).start()

    def add(self, future: Future) -> None:
        """Count a task when it settles."""
        if self._bar.is_shown:
            future.add_done_callback(self._count)

    def _count(self, future: AnyFuture[Any]) -> None:
        """Count a settled task. Called by the thread of the session."""
        error = None if future.cancelled() else future.exception()
        if future.cancelled():
            state = "cancelled"
        elif isinstance(error, errors.TaskBlocked):
            state = "behind"
        else:
            state = "done" if error is None else "failed"
        self._counts[state] += 1

    def stop(self) -> None:
        """Draw no more."""
        with self._lock:
            self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(_METER_SECONDS):
            with self._lock:
                if not self._stopping.is_set():
                    self._bar.count(self._counts.copy(), self.total, self._counts["behind"])


class FailureCounter:
    """Counts failed tasks as they settle, in any order."""

    def __init__(self, early_stop: EarlyStop) -> None:
        self._early_stop = early_stop
        self._failed = 0

    def count(self, future: AnyFuture[Any]) -> None:
        """Count a settled future. Called by the thread of the session."""
        error = None if future.cancelled() else future.exception()
        if isinstance(error, errors.TaskFailed) and not isinstance(error, errors.TaskBlocked):
            self._failed += 1
            self._early_stop.count_failures(self._failed, str(error))


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
        self._delivered = 0
        #: Set at the end of the thread. A `join` that is interrupted can't be repeated.
        self._ended = threading.Event()
        #: Done when no more futures are awaited.
        self._stop: AnyFuture[None] = concurrent.futures.Future()
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
        self._ended.wait()
        self._raise_error()

    def finish_settled(self) -> int:
        """Wait until the settled futures are passed on. Return how many are not settled."""
        self._stop.set_result(None)
        self._queue.put(None)
        self._ended.wait()
        self._raise_error()
        return self.added - self._delivered

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._deliver_all()
        except BaseException as wrong:  # noqa: BLE001  # raised again by `add` or `finish`
            self._error = wrong
        finally:
            self._ended.set()

    def _deliver_all(self) -> None:
        is_last = False
        while not is_last or self._delivered < self.added:
            if self._queue.empty():
                with self._output_lock:
                    self._on_idle()
            future = self._queue.get()
            if future is None:
                is_last = True
                if self._stop.done():
                    return
                continue
            if not self._await(future):
                continue
            with self._output_lock:
                self._on_settled(future)
            self._delivered += 1
            self._room.release()

    def _await(self, future: Future) -> bool:
        """Wait for a future. Return False if it is not settled when no more are awaited."""
        if not future.done():
            with self._output_lock:
                self._on_idle()
            first: Any = [future, self._stop]
            concurrent.futures.wait(first, return_when=concurrent.futures.FIRST_COMPLETED)
        return future.done()


#: How often running tasks are asked for.
LIVE_POLL_SECONDS: Final = 0.5


class _Position(NamedTuple):
    """How much of an attempt is printed."""

    attempt: int
    offset: int


class LiveLines:
    """Prints lines of running tasks. A context manager."""

    def __init__(
        self, client: InternalClient, scope: Scope, write: Callable[[str, bytes], None]
    ) -> None:
        """Prepare the thread. It calls `write` with a task's full name and whole lines."""
        self._client = client
        #: The running tasks.
        self._scope = scope
        self._write = write
        self._positions: dict[str, _Position] = {}
        #: Held while something is printed.
        self.lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taskyard-lines", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def printed(self, name: str) -> int:
        """Return how many bytes of a settled task's last attempt are printed. Hold the lock."""
        position = self._positions.pop(name, None)
        if position is None:
            return 0
        is_last = self._client.output_page(name, count=1).attempt == position.attempt
        return position.offset if is_last else 0

    def _run(self) -> None:
        while not self._stopping.wait(LIVE_POLL_SECONDS):
            try:
                for view in self._client.tasks(self._scope):
                    self._poll(full_name(view))
            except (errors.TaskyardError, BrokenPipeError):
                return  # the main thread reports it

    def _poll(self, name: str) -> None:
        """Print the whole lines that a running task has written since the last time."""
        with self.lock:
            attempt, offset = self._positions.get(name, (None, 0))
            page = self._client.output_page(name, offset)
            if attempt not in (None, page.attempt):  # it was retried
                offset, page = 0, self._client.output_page(name)
            lines = page.data[: page.data.rfind(b"\n") + 1]
            if lines and page.live:
                self._write(name, lines)
                self._positions[name] = _Position(page.attempt, offset + len(lines))
