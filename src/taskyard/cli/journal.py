"""`taskyard journal`: check, export or compact a state directory.

Owns the output and the documents. The work is done by `taskyard.journal`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from taskyard.cli.commands import Group
from taskyard.cli.documents import OutboxTask, StoreOutboxDocument
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, moment_cell, print_document, print_table
from taskyard.cli.progress import ProgressBar
from taskyard.core.identity import spelling
from taskyard.errors import (
    ExitCode,
    NotInstalled,
    StateLocked,
    UnknownName,
    UnusableFile,
    UserError,
)
from taskyard.journal import state_check, state_store
from taskyard.journal.compaction import CompactionResult
from taskyard.journal.lock import StateLock
from taskyard.journal.state_check import StateReport
from taskyard.process.state_files import LOCK_FILE, lock_holder

#: Checks beside a broker, until one is sound.
_LIVE_CHECKS_MAX: Final = 3


class JournalCheckDocument(
    StateReport,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="document",
    tag="journal check",
):
    """`journal check`."""

    state: str
    sound: bool
    version: Literal[1] = 1


class JournalExportDocument(
    msgspec.Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="document",
    tag="journal export",
):
    """`journal export`."""

    state: str
    #: The directory with the files.
    out: str
    #: The last journal row in the files.
    sequence: int
    #: What was added: events and edges, and the files with them.
    events: int
    edges: int
    files: list[str]
    version: Literal[1] = 1


class JournalCompactDocument(
    CompactionResult,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="document",
    tag="journal compact",
):
    """`journal compact`."""

    state: str
    version: Literal[1] = 1


@click.group(cls=Group, no_args_is_help=True)
def journal() -> None:
    """Check, export or compact a state directory.

    A running broker compacts its journal on its own, about every 200,000 rows. Stop it before you
    do that here.
    """


@journal.command(epilog=example("journal check --state ./.taskyard --deep"))
@click.option("--deep", is_flag=True, help="Also replay all rows and read all files.")
@click.pass_obj
def check(cli_context: CliContext, *, deep: bool) -> ExitCode:
    """Check a state directory for damage and summarize it.

    Verifies the chain and the witness of the journal, the snapshots, the history files, the index
    of finished tasks, and that they agree. Nothing is written, so a full or read-only disk is fine.
    Exit 0 if the state is sound, 6 if it is damaged. Then the damage and the losses are printed.

    A running broker changes files meanwhile, which can look like damage. So up to three checks are
    made beside it, until one is sound. A journal in PostgreSQL is checked on a copy as of one
    moment.
    """
    state = cli_context.state_directory()
    state_check.require_state(state)
    logging.getLogger("taskyard.journal").setLevel(
        logging.ERROR
    )  # the report below is more precise
    findings = _check(state, deep=deep)
    if cli_context.as_json:
        fields = msgspec.structs.asdict(findings)
        sound = not findings.wrong
        print_document(JournalCheckDocument(state=str(state), sound=sound, **fields))
    else:
        click.echo(_format_report(state, findings))
    return ExitCode.STATE_DAMAGED if findings.wrong else ExitCode.OK


@journal.command(epilog=example("journal export --state ./.taskyard --out ./history"))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    required=True,
    help="Directory for the Parquet files.",
)
@click.pass_obj
def export(cli_context: CliContext, out: Path) -> None:
    """Write the history as Parquet files, for any tool that reads them.

    Writes DIR/events and DIR/edges, a file in each for some journal rows. Another run adds the rows
    since. Files never change. The state is only read, so a broker may be running.

    Needs the extra: pip install 'taskyard[history]'.
    """
    try:
        from taskyard.journal import history_arrow  # noqa: PLC0415  # pyarrow is in an extra
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"Parquet files need {error.name} (pip install 'taskyard[history]')"
        ) from error
    state = cli_context.state_directory()
    state_check.require_state(state)
    with state_store.in_sqlite(state) as place, CompactionProgress(cli_context) as progress:
        made = history_arrow.export(
            place, out, lambda done, total: progress("writing Parquet", done, total)
        )
    if cli_context.as_json:
        fields = msgspec.structs.asdict(made)
        print_document(JournalExportDocument(state=str(state), out=str(out), **fields))
    elif made.files:
        click.echo(
            f"wrote {format_count(made.events, 'event')} and {format_count(made.edges, 'edge')} up "
            f"to row {made.sequence} to {format_count(len(made.files), 'new file')}"
        )
    else:
        click.echo(f"nothing to export: written up to row {made.sequence}")


@journal.command(epilog=example("journal compact --state ./.taskyard"))
@click.pass_obj
def compact(cli_context: CliContext) -> None:
    """Move the rows of the journal to the history.

    Writes history, snapshot and index of finished tasks, then removes the rows. Frees space inside
    journal.sqlite for new rows (the file does not shrink) and makes the next start fast. The
    history stays complete. Safe to interrupt and run again. The broker must be stopped (exit 2 if
    not).
    """
    state = cli_context.state_directory()
    state_check.require_state(state)
    with _locked(state), CompactionProgress(cli_context) as progress:
        outcome = state_store.compact_stopped(state, progress)
    if cli_context.as_json:
        print_document(JournalCompactDocument(state=str(state), **msgspec.structs.asdict(outcome)))
    else:
        click.echo(_format_result(outcome))
        click.echo(
            f"trimmed {format_count(outcome.rows_trimmed, 'row')}, removed "
            f"{format_count(outcome.snapshots_removed, 'older snapshot')}"
        )


def _check(state: Path, *, deep: bool) -> StateReport:
    tries = 0
    while True:
        tries += 1
        is_live = lock_holder(state / LOCK_FILE) is not None
        findings = state_check.check(state, deep=deep, live=is_live)
        if not (findings.wrong and is_live and tries < _LIVE_CHECKS_MAX):
            return findings


def _locked(state: Path) -> StateLock:
    try:
        return StateLock(state)
    except StateLocked as error:
        raise StateLocked(f"{error}, a running broker compacts its journal on its own") from error


class CompactionProgress(ProgressBar):
    """Shows the steps of a compaction, as bars on a terminal, as lines elsewhere."""

    def __init__(self, cli_context: CliContext) -> None:
        super().__init__(cli_context, participle="", prints_end=True)

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self.label:
            self.set_label(step)
        self.update(done, total)


def _format_result(outcome: CompactionResult) -> str:
    if not outcome.rows:
        return f"nothing to add: covered up to row {outcome.sequence}"
    return (
        f"added {format_count(outcome.rows, 'row')} to the history: "
        f"{format_count(outcome.events, 'event')} and {format_count(outcome.edges, 'edge')} "
        f"in {format_count(len(outcome.files), 'new file')}\n"
        f"covered up to row {outcome.sequence}: "
        f"{format_count(outcome.unfinished, 'task')} in the snapshot, "
        f"{outcome.ended} more in the index of finished tasks"
    )


def _format_report(state: Path, findings: StateReport) -> str:
    lines = [f"state directory {state}", *(f"  {line}" for line in _contents(findings))]
    if not findings.wrong:
        depth = "all files were read" if findings.deep else "use --deep to read all files"
        return "\n".join([*lines, f"sound ({depth})"])
    lines += ["DAMAGED", *(f"  wrong: {one}" for one in findings.wrong)]
    lines += [f"  lost: {one}" for one in findings.lost]
    return "\n".join([*lines, "Nothing was changed. Restore the directory from a backup."])


def _contents(findings: StateReport) -> list[str]:
    kept = "no rows"
    if findings.rows:
        kept = f"rows {findings.row_first}..{findings.row_last}, up to record {findings.record}"
    trimmed = f", rows 1..{findings.trimmed} removed" if findings.trimmed else ""
    snapshots = "none"
    if findings.snapshots:
        at = ", ".join(str(sequence) for sequence in findings.snapshots)
        tasks = format_count(findings.snapshot_tasks, "task")
        snapshots = f"at row {at}, {tasks} in the newest readable one"
    exported = "none"
    if findings.history_files:
        exported = (
            f"rows {findings.history_first}..{findings.history_last} in "
            f"{format_count(findings.history_files, 'file')}, "
            f"{format_count(findings.events, 'event')}"
        )
    ended = f"{format_count(findings.finished_tasks, 'task')}, up to row {findings.finished_covers}"
    return [
        f"journal    {kept}{trimmed}",
        f"snapshots  {snapshots}",
        f"history    {exported}",
        f"finished   {ended}",
    ]


#: Tasks in a list of the outbox. There may be millions while no broker runs.
_TASKS_MAX: Final = 1_000


@click.group(cls=Group, no_args_is_help=True)
def store() -> None:
    """Create a store in PostgreSQL, or move a state.

    The tables are in a schema of their own, `taskyard`. Each database has one journal. URL is as in
    psql: postgresql://USER@HOST:PORT/DATABASE. Other users of this machine can see a password in it
    while the command runs. Use a password file (PGPASSFILE) or a service file instead.

    Needs the extra: pip install 'taskyard[postgres]'.
    """


@store.command(
    epilog=example(
        "store init postgresql://taskyard@db.example/taskyard", "store init --outbox --retry 17"
    )
)
@click.argument("url", required=False)
@click.option(
    "--outbox",
    is_flag=True,
    help="Create nothing. List tasks that were submitted in transactions and have not reached the "
    "broker.",
)
@click.option(
    "--retry",
    type=int,
    multiple=True,
    metavar="ID",
    help="With --outbox: submit a task again. Repeatable.",
)
@click.option(
    "--drop",
    type=int,
    multiple=True,
    metavar="ID",
    help="With --outbox: remove a refused task. Repeatable.",
)
@click.pass_obj
def init(
    cli_context: CliContext,
    url: str | None,
    retry: tuple[int, ...],
    drop: tuple[int, ...],
    *,
    outbox: bool,
) -> None:
    """Create the tables with an empty journal.

    A store that exists is left as it is. The user of URL owns the tables, and needs the right to
    create a schema. The default of URL is the setting `broker.store`.

    New tasks of the outbox are submitted at once while a broker runs. A refused one stays until it
    is retried or dropped. Lists the first 1,000.
    """
    if (retry or drop) and not outbox:
        raise UserError("--retry and --drop need --outbox")
    url = url or _configured(cli_context)
    if outbox:
        _show_outbox(cli_context, url, retry, drop)
        return
    from taskyard.postgresql import database  # noqa: PLC0415  # an extra

    with database.usable(url), database.connect(url) as connection:
        what = "created a store" if database.init(connection) else "has a store already"
    click.echo(f"{database.describe(url)}: {what}")


@store.command(epilog=example("store move .taskyard postgresql://taskyard@db.example/taskyard"))
@click.argument("source")
@click.argument("target")
@click.pass_obj
def move(cli_context: CliContext, source: str, target: str) -> None:
    """Move a state to PostgreSQL, or back.

    SOURCE or TARGET is a state directory, the other is the URL of a store. A database must be
    empty, as after `store init`. A state directory must be new, or one that a broker of this store
    used. Stop the broker first. Long output and large values stay in `blobs.directory`, if that is
    set.

    The copy is verified by its hash chain before the source is removed. A move that was interrupted
    is continued by the same command.
    """
    is_to_database = _is_url(target)
    if is_to_database == _is_url(source):
        raise click.UsageError("one of SOURCE and TARGET must be a URL, the other a directory")
    from taskyard.postgresql import database, move  # noqa: PLC0415  # an extra

    state = Path(source if is_to_database else target)
    shared = cli_context.settings().blobs.directory
    try:
        if is_to_database:
            head, place = move.to_database(state, target, shared), database.describe(target)
        else:
            head, place = move.to_directory(source, state, shared), target
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UnusableFile(text) from error
    click.echo(f"{place}: has the journal up to row {head.sequence}, record {head.record}")


def _show_outbox(
    cli_context: CliContext, url: str, retry: tuple[int, ...], drop: tuple[int, ...]
) -> None:
    """List the outbox, or retry and drop tasks of it."""
    from taskyard.postgresql import database, outbox  # noqa: PLC0415  # an extra

    with database.open_store(url) as connection:
        retried, dropped = outbox.retry(connection, retry), outbox.drop(connection, drop)
        missing = sorted({*retry, *drop} - {*retried, *dropped})
        if missing:
            raise UnknownName(f"outbox: no refused task {missing[0]}", str(missing[0]))
        found = outbox.entries(connection, 0, _TASKS_MAX)
    tasks = [
        OutboxTask(**entry._asdict(), state="new" if entry.code is None else "refused")
        for entry in found
    ]
    if cli_context.as_json:
        print_document(StoreOutboxDocument(tasks=tasks, retried=retried, dropped=dropped))
    elif retry or drop:
        click.echo(f"{format_count(len(retried), 'task')} retried, {len(dropped)} dropped")
    else:
        _print_tasks(tasks)


def _configured(cli_context: CliContext) -> str:
    url = cli_context.settings().broker.store
    if not url:
        raise UserError("store: no URL is configured, and SQLite has no outbox (give a URL)")
    return url


def _print_tasks(tasks: list[OutboxTask]) -> None:
    now = time.time()
    rows = [
        (
            task.id,
            spelling(task.campaign, task.name),
            task.submitted_by,
            moment_cell(task.submitted, now),
            task.state,
            escape_line(task.reason or ""),
        )
        for task in tasks
    ]
    print_table(("ID", "TASK", "BY", "SUBMITTED", "STATE", "REASON"), rows, wrapped=("REASON",))


def _is_url(text: str) -> bool:
    return text.startswith(("postgresql://", "postgres://"))
