"""Commands that print what tasks wrote: `results` and `log`.

Long output is printed part by part, so that memory stays bounded.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import click

from taskyard import errors
from taskyard.campaign.batches import encode_text
from taskyard.cli import connection
from taskyard.cli.commands import Command
from taskyard.cli.documents import LogDocument, ResultsDocument
from taskyard.cli.format import escape_line, full_name, task_name_fields
from taskyard.cli.options import CliContext
from taskyard.cli.output import (
    encode_json,
    example,
    print_document,
    result_fields,
    text_or_base64,
    warn_if_truncated,
    write_bytes,
    write_lines,
    write_result,
)
from taskyard.cli.scopes import OnceOption, complete_campaign, complete_name
from taskyard.core.identity import split
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.journal import sqlite
from taskyard.journal.archive import Archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.core.blobs import Result
    from taskyard.core.model import EndedTask

#: How often `log --follow` asks for more.
POLL_SECONDS: Final = 0.25

#: The most tasks without a result that `results` names.
MISSING_SHOWN_MAX: Final = 20

#: The path of stdout.
_STDOUT: Final = "-"

#: Nothing of a task in these states follows, unless it is retried.
_SETTLED_STATES: Final = ("done", "failed", "cancelled")

#: Functions return values. Their printed output is one text, which is not followed.
_FUNCTION_SERVICES: Final = ("call", "pickle")


@click.command(
    cls=Command,
    epilog=example(
        "results fetch-a", "results fetch-a --output a.bin", "results --campaign thumbs --json"
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@click.option(
    "--campaign",
    cls=OnceOption,
    metavar="NAME",
    help="All tasks of this campaign.",
    shell_complete=complete_campaign,
)
@click.option("--output", metavar="FILE", help="Write to this file instead of stdout.")
@click.pass_obj
def results(
    cli_context: CliContext, names: tuple[str, ...], campaign: str | None, output: str | None
) -> errors.ExitCode:
    """Print the results of tasks or of a campaign.

    The result of a command is its whole stdout, that of a function its return value as JSON.
    Results of named tasks are printed byte for byte, in order. On a terminal, control characters
    are escaped and a missing last newline is added. A pipe gets the exact bytes.

    Results of a campaign have the task's name and a tab before every line, also the stdout of
    commands that failed. They are in the order of submission. Tasks that the broker has dropped
    from memory come first, in the order in which they ended.

    With --json, prints a document for each task in a line of its own. Exit 1 if a task has no
    result. Such tasks are named on stderr.
    """
    if bool(names) is (campaign is not None):
        raise click.UsageError("give names of tasks, or --campaign")
    if campaign is None:
        return _named_results(cli_context, names, output)
    if output is not None:
        raise errors.UserError("--output: needs names of tasks (or redirect stdout)")
    return _campaign_results(cli_context, campaign)


def _named_results(
    cli_context: CliContext, names: tuple[str, ...], output: str | None
) -> errors.ExitCode:
    """Print results byte for byte. Raises `TaskFailed` for the first task without one."""
    codes = []
    with connection.connect_read_only(cli_context) as broker, ExitStack() as stack:
        write: Callable[[bytes], object] = write_result
        if output not in (None, _STDOUT):
            write = stack.enter_context(Path(str(output)).open("wb")).write
        for name in broker.resolve(names):
            value = broker.kept_result(name)
            if cli_context.as_json:
                value = connection.whole_result(broker, name)
                if write is not write_result:
                    write(value.text)
                view = broker.show(name)
                fields = {**task_name_fields(view), **result_fields(value)}
                print_document(ResultsDocument(**fields, state=view["state"]))
            elif value.blob is not None:
                for part in connection.stream_parts(broker, name):
                    (write_bytes if write is write_result else write)(part)
                continue
            else:
                write(value.text)
            codes.append(warn_if_truncated(name, value))
    return max(codes, default=errors.ExitCode.OK)


def _campaign_results(cli_context: CliContext, campaign: str) -> errors.ExitCode:
    from taskyard.cli.task_output import CampaignTasks  # noqa: PLC0415  # not for `--help`
    from taskyard.client.requests import scope_of  # noqa: PLC0415

    missing = _MissingResults()
    with connection.connect_read_only(cli_context) as broker, CampaignTasks(campaign) as tasks:
        of_campaign = [one for one in broker.status()["campaigns"] if one["name"] == campaign]
        known = sum(sum(one["counts"].values()) - one["restarted"] for one in of_campaign)
        tasks.add_listed(broker.tasks(scope_of(campaign=campaign)))
        tasks.add_archived(cli_context, broker)
        total = tasks.count()
        for view in tasks.views():
            if view["state"] != "done":
                missing.add(view)
            if cli_context.as_json:
                click.echo(encode_json(_result_line(cli_context, broker, view)))
            else:
                parts = _result(cli_context, broker, view)
                write_lines(parts, view["name"].encode(errors="surrogateescape"))
    if not total and not known:
        raise errors.UnknownName(f"unknown campaign {campaign!r} (see `taskyard status`)", campaign)
    if missing.count:
        cli_context.info(f"taskyard: {missing.format(total)}")
    if known > total:
        text = (
            f"{known - total:,} ended tasks are not in the broker's memory (run this command on "
            "its machine, or use `taskyard results NAME`)"
        )
        cli_context.warn(text)
    return errors.ExitCode.TASK_FAILED if missing.count or known > total else errors.ExitCode.OK


class _MissingResults:
    """Counts tasks without a result, and names the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self._names: list[str] = []

    def add(self, view: dict[str, Any]) -> None:
        self.count += 1
        if self.count <= MISSING_SHOWN_MAX:
            self._names.append(f"{escape_line(view['name'])} ({view['state']})")

    def format(self, total: int) -> str:
        """Return a line with the number of tasks without a result, of `total`, and their names."""
        more = self.count - len(self._names)
        names = [*self._names, *([f"{more:,} more"] if more else [])]
        return f"{self.count:,} of {total:,} tasks have no result: {', '.join(names)}"


def _result(
    cli_context: CliContext, broker: ReadOnlyClient, view: dict[str, Any]
) -> Iterator[bytes]:
    """Yield a task's result part by part, or the stdout of a command that failed."""
    name = full_name(view)
    if view["state"] != "done":
        yield from _failed_stdout(cli_context, broker, view)
        return
    value = broker.kept_result(name)
    if value.blob is not None:
        yield from connection.stream_parts(broker, name)
    else:
        yield value.text
        warn_if_truncated(name, value)


def _failed_stdout(
    cli_context: CliContext, broker: ReadOnlyClient, view: dict[str, Any]
) -> Iterator[bytes]:
    """Yield the stdout of the last attempt of a command, if it failed. Report a part not kept."""
    if view["state"] != "failed" or view["service"] in _FUNCTION_SERVICES:
        return
    try:
        yield from connection.stream_parts(broker, full_name(view))
    except (errors.BytesDamaged, errors.BytesMissing, errors.BytesTruncated) as error:
        sys.stdout.flush()
        cli_context.warn(str(error))


def _result_line(
    cli_context: CliContext, broker: ReadOnlyClient, view: dict[str, Any]
) -> ResultsDocument:
    document = ResultsDocument(**task_name_fields(view), state=view["state"])
    fields: dict[str, Any]
    try:
        fields = result_fields(connection.whole_result(broker, full_name(view)))
    except errors.TaskFailed:
        fields = {"reason": view["reason"] or f"the task is {view['state']}"}
        if stdout := b"".join(_failed_stdout(cli_context, broker, view)):
            fields |= text_or_base64("stdout", stdout)
    for field, value in fields.items():
        setattr(document, field, value)
    return document


@click.command(
    cls=Command, epilog=example("log fetch-a", "log fetch-a --follow", "log fetch-a --stderr")
)
@click.argument("name", shell_complete=complete_name)
@click.option("-f", "--follow", is_flag=True, help="Print more as it arrives, until the task ends.")
@click.option("--stdout", "stream", flag_value="stdout", help="Print stdout only.")
@click.option("--stderr", "stream", flag_value="stderr", help="Print stderr only.")
@click.option(
    "--attempt",
    metavar="N",
    type=click.IntRange(1),
    help="Print the output of this attempt. If omitted, of the latest.",
)
@click.pass_obj
def log(
    cli_context: CliContext, name: str, stream: str | None, attempt: int | None, *, follow: bool
) -> None:
    """Print the output of a task, live while it runs.

    Prints stdout, then stderr, byte for byte. On a terminal, control characters are escaped. A pipe
    gets the exact bytes. With --follow, prints both in the order in which they arrive, and the
    output of further attempts if the task is retried. Ends if the `map` or `run` that has started
    the broker ends.
    """
    if follow and cli_context.as_json:
        raise errors.UserError("--follow: can't be used with --json")
    wanted = [one for one in ("stdout", "stderr") if stream in (None, one)]
    if follow:
        _follow_log(cli_context, name, wanted, attempt)
        return
    with connection.connect_read_only(cli_context) as broker:
        (name,) = broker.resolve([name])
        printed = _LogPrinter(cli_context, broker, name, wanted)
        view = printed.view(attempt)
        _print_line(cli_context, broker, view)
        if view["service"] in _FUNCTION_SERVICES:
            printed.print_function(view)
        elif cli_context.as_json:
            printed.print_document(view, attempt)
        else:
            printed.print_attempt(attempt)
        printed.note_if_empty(view)


def _follow_log(cli_context: CliContext, name: str, wanted: list[str], attempt: int | None) -> None:
    """Print output until the task ends, or its broker with the command that has started it."""
    with connection.connect_unless_settled(cli_context, partial(_has_ended, name)) as client:
        (name,) = client.resolve([name])
        printed = _LogPrinter(cli_context, client, name, wanted)
        view = printed.view(attempt)
        _print_line(cli_context, client, view)
        try:
            with connection.closed_with_own_broker(cli_context, client):
                if view["service"] in _FUNCTION_SERVICES:
                    printed.print_function(view)
                else:
                    printed.follow(attempt)
                printed.note_if_empty(view)
                return
        except errors.ClientClosed:
            pass
    with connection.connect_read_only(cli_context) as broker:
        printed.finish(broker)


def _print_line(cli_context: CliContext, broker: ReadOnlyClient, view: dict[str, Any]) -> None:
    """Print on stderr which line of a file a task is, if it is one."""
    name = full_name(view)
    if line := broker.line_labels([view]).get(name):
        cli_context.info(escape_line(f"{line}: {name}"))


def _has_ended(name: str, broker: ReadOnlyClient) -> bool:
    (name,) = broker.resolve([name])
    return broker.show(name)["state"] in _SETTLED_STATES


class _LogPrinter:
    """Prints streams of one task."""

    def __init__(
        self, cli_context: CliContext, broker: ReadOnlyClient, name: str, wanted: list[str]
    ) -> None:
        """`wanted` are the streams."""
        self._cli_context = cli_context
        self._broker = broker
        self._name = name
        self._wanted = wanted
        self._is_empty = True
        #: The attempt that is followed, and how much of its streams is printed.
        self._attempt: int | None = None
        self._offsets = dict.fromkeys(wanted, 0)

    def view(self, attempt: int | None) -> dict[str, Any]:
        """Return the task. Raises `UserError` if it has no such attempt."""
        view = self._broker.show(self._name)
        if attempt is not None and attempt > view["attempt"]:
            text = f"task {self._name}: no attempt {attempt} (the latest is {view['attempt']})"
            raise errors.UserError(text)
        return view

    def print_attempt(self, attempt: int | None) -> None:
        """Print what is there of an attempt."""
        for stream in self._wanted:
            self._write_all(connection.stream_parts(self._broker, self._name, stream, attempt))

    def _write_all(self, parts: Iterable[bytes]) -> None:
        try:
            for part in parts:
                self._write(part)
        except errors.BytesTruncated as error:
            sys.stdout.flush()
            self._cli_context.warn(str(error))

    def _write(self, part: bytes) -> None:
        self._is_empty = self._is_empty and not part
        write_bytes(part)

    def print_function(self, view: dict[str, Any]) -> None:
        """Print the output of a function."""
        from taskyard.core.blobs import Blob, Result  # noqa: PLC0415  # not for `--help`

        page = self._broker.output_page(self._name)
        is_whole = len(page.data) == page.bytes_total
        printed = Result(page.data if is_whole else Blob(b"", page.bytes_total, page.data))
        if self._cli_context.as_json:
            fields = text_or_base64("stdout", printed.text)
            names = task_name_fields(view)
            print_document(LogDocument(**names, attempt=view["attempt"], **fields))
            self._is_empty = False
            return
        self._is_empty = not printed.text
        write_result(printed.text)
        self._warn_if_cut(printed)

    def _warn_if_cut(self, printed: Result) -> None:
        if printed.is_truncated and not self._cli_context.quiet:
            warn_if_truncated(self._name, printed)

    def print_document(self, view: dict[str, Any], attempt: int | None) -> None:
        """Print an attempt as JSON."""
        number = view["attempt"] if attempt is None else attempt
        fields: dict[str, Any] = {}
        for stream in self._wanted:
            text = b"".join(connection.stream_parts(self._broker, self._name, stream, number))
            fields |= text_or_base64(stream, text)
        print_document(LogDocument(**task_name_fields(view), attempt=number, **fields))
        self._is_empty = False

    def follow(self, attempt: int | None) -> None:
        """Print an attempt until it ends, and later attempts unless a number was asked for."""
        self._attempt = attempt
        while True:
            live = self._print_new()
            sys.stdout.flush()
            if live:
                continue
            if attempt is not None or self._attempt is None:
                return
            view = self._broker.show(self._name)
            if view["attempt"] > self._attempt:
                self._attempt += 1
                self._offsets = dict.fromkeys(self._wanted, 0)
            elif view["state"] in _SETTLED_STATES or self._is_stuck(view):
                return
            else:
                time.sleep(POLL_SECONDS)

    def finish(self, broker: ReadOnlyClient) -> None:
        """Print the end of the attempt that was followed, after the end of its broker."""
        self._broker = broker
        while self._print_pages()[1]:
            pass
        view = broker.show(self._name)
        if view["state"] not in _SETTLED_STATES:
            name = escape_line(self._name)
            self._cli_context.warn(f"task {name} is {view['state']}, and its broker has ended")
        self.note_if_empty(view)

    def _print_new(self) -> bool:
        """Print what arrived since the last call, after a pause if nothing did.

        Return whether more may follow.
        """
        is_live, has_more = self._print_pages()
        if is_live and not has_more:
            time.sleep(POLL_SECONDS)
        return is_live or has_more

    def _print_pages(self) -> tuple[bool, bool]:
        """Print the next part of each stream. Return whether the attempt runs, and if any was."""
        is_live = has_more = False
        for stream in self._wanted:
            page = self._broker.output_page(
                self._name, self._offsets[stream], stream, attempt=self._attempt
            )
            self._attempt = page.attempt
            self._write(page.data)
            self._offsets[stream] += len(page.data)
            is_live = is_live or page.live
            has_more = has_more or bool(page.data)
        return is_live, has_more

    def _is_stuck(self, view: dict[str, Any]) -> bool:
        """Return whether a task waits for a failed task."""
        if view["state"] != "blocked":
            return False
        return bool(self._broker.explain(self._name)["reason"] == "predecessor-failed")

    def note_if_empty(self, view: dict[str, Any]) -> None:
        if self._is_empty and not self._cli_context.quiet:
            click.echo(f"task {escape_line(self._name)} ({view['state']}): no output", err=True)


#: SQLite deletes the file of a database without a name.
_TEMPORARY: Final = ""

_LISTED: Final = (
    "CREATE TABLE listed(place INTEGER PRIMARY KEY, name BLOB UNIQUE, state TEXT, reason TEXT, "
    "service TEXT)"
)
_ARCHIVED: Final = (
    "CREATE TABLE archived(record INTEGER, name BLOB, state TEXT, PRIMARY KEY (record, name)) "
    "WITHOUT ROWID"
)
_SETTINGS: Final = ("PRAGMA journal_mode=OFF", "PRAGMA synchronous=OFF")

#: An ended task in both was recalled, or is leaving memory. Another one has started again.
_ADD_ARCHIVED: Final = (
    "INSERT INTO archived SELECT ?1, ?2, coalesce((SELECT state FROM listed WHERE name = ?2), ?3) "
    "WHERE NOT EXISTS (SELECT 1 FROM listed WHERE name = ?2 AND NOT state IN ('done', 'cancelled'))"
)
_DROP_DOUBLES: Final = "DELETE FROM listed WHERE name IN (SELECT name FROM archived)"
_COUNT: Final = "SELECT (SELECT count(*) FROM archived) + (SELECT count(*) FROM listed)"
_ALL_LISTED: Final = (
    "SELECT name, state, '', '' FROM archived ORDER BY record, name",
    "SELECT name, state, reason, service FROM listed ORDER BY place",
)


class CampaignTasks:
    """The tasks of a campaign in a temporary file. A context manager."""

    def __init__(self, campaign: str) -> None:
        self._campaign = campaign
        self._database = sqlite3.connect(_TEMPORARY, isolation_level=None)
        for statement in (*_SETTINGS, _LISTED, _ARCHIVED, "BEGIN"):
            self._database.execute(statement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add_listed(self, views: Iterable[dict[str, Any]]) -> None:
        """Add the tasks in memory. Call it before `add_archived`: tasks move to the archive."""
        fields = ("state", "reason", "service")
        rows = ((encode_text(view["name"]), *(view[field] for field in fields)) for view in views)
        insert = "INSERT OR IGNORE INTO listed(name, state, reason, service) VALUES (?, ?, ?, ?)"
        self._database.executemany(insert, rows)

    def add_archived(self, cli_context: CliContext, broker: ReadOnlyClient) -> None:
        """Add the tasks in the archive, if the state directory is on this machine."""
        location = connection.broker_location(cli_context)
        if location.broker is not None:
            return
        open_file = sqlite.connect_readonly if connection.is_offline(broker) else None
        with Archive(location.state, open_file) as archive:
            rows = map(self._row, archive.ended_in(encode_text(self._campaign)))
            self._database.executemany(_ADD_ARCHIVED, rows)
        self._database.execute(_DROP_DOUBLES)

    def _row(self, ended: EndedTask) -> tuple[int, bytes, str]:
        name = split(ended.name, ended.campaign)
        return ended.record, name, TaskState(ended.state).name.lower()

    def count(self) -> int:
        """Return how many tasks there are."""
        ((count,),) = self._database.execute(_COUNT)
        return int(count)

    def views(self) -> Iterator[dict[str, Any]]:
        """Yield name, campaign, state, reason and service of each task.

        Reason and service of an archived task are empty. No failed task is archived.
        """
        for query in _ALL_LISTED:
            for name, state, reason, service in self._database.execute(query):
                named = {"name": shown(name), "campaign": self._campaign}
                yield {**named, "state": state, "reason": reason, "service": service}
