"""`taskyard journal`: check, export or compact a state directory.

Owns the output and the documents. The work is done by `taskyard.journal`.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from taskyard.cli.format import format_count
from taskyard.cli.options import CliContext, json_option, quiet_option, state_option, verbose_option
from taskyard.cli.output import print_document
from taskyard.cli.progress import ProgressBar
from taskyard.errors import ExitCode, JournalDamaged, StateLocked, UnusableState
from taskyard.journal import compaction, history, schema, state_check, state_store
from taskyard.journal.compaction import CompactionResult
from taskyard.journal.lock import ReadLock, StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import StateReport

#: A copy of a live journal may be torn. The next copy is torn elsewhere.
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
    CompactionResult,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="document",
    tag="journal export",
):
    """`journal export`."""

    state: str
    version: Literal[1] = 1


class JournalCompactDocument(JournalExportDocument, tag="journal compact"):
    """`journal compact`."""


def _example(line: str) -> str:
    """Return the example at the end of a help text. Click keeps its lines."""
    return f"\b\nExample:\n  taskyard journal {line}"


@click.group(no_args_is_help=True)
@verbose_option
@quiet_option
def journal() -> None:
    """Check, export or compact a state directory.

    Stop the broker first, except for `check --live`. A running broker compacts its journal on its
    own, about every 200,000 rows.
    """


@journal.command(epilog=_example("check --state ./.taskyard --deep"))
@state_option
@json_option
@click.option("--deep", is_flag=True, help="Also replay all rows and read all files.")
@click.option("--live", is_flag=True, help="Check a copy while the broker is running.")
@verbose_option
@quiet_option
def check(state: Path, *, as_json: bool, deep: bool, live: bool) -> ExitCode:
    """Check a state directory for damage and summarize it.

    Verifies the chain and the witness of the journal, the snapshots, the history files, the index
    of finished tasks, and that they agree. Only STATE/lock is written, to keep a broker out, so a
    full or read-only disk is fine. Exit 0 if the state is sound, 6 if it is damaged. Then the
    damage and the losses are printed.

    While a broker is running, the check is refused (exit 2), because unfinished writes can look
    like damage. --live checks a copy, up to three times until one is sound. If all three look
    damaged, stop the broker and check again.

    A journal in PostgreSQL is always checked on a copy as of one moment, also beside its broker.
    """
    _require_state(state)
    logging.getLogger("taskyard.journal").setLevel(
        logging.ERROR
    )  # the report below is more precise
    if schema.database_url(state):
        findings = state_check.check_database(state, deep=deep)
    else:
        findings = _check_live(state, deep=deep) if live else _check_state(state, deep=deep)
    if as_json:
        fields = msgspec.structs.asdict(findings)
        sound = not findings.wrong
        print_document(JournalCheckDocument(state=str(state), sound=sound, **fields))
    else:
        click.echo(_format_report(state, findings))
    return ExitCode.STATE_DAMAGED if findings.wrong else ExitCode.OK


@journal.command(epilog=_example("export --state ./.taskyard"))
@state_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def export(cli_context: CliContext, state: Path, *, as_json: bool) -> None:
    """Export the history of all rows to Parquet files.

    Replaces the row files in STATE/history/ by Parquet files, takes a snapshot and updates the
    index of finished tasks. No row is removed from the journal. Running it again changes no Parquet
    file. Safe to interrupt and run again. The broker must be stopped (exit 2 if not). For a journal
    in PostgreSQL use `taskyard pipeline history`.

    Needs the extra: pip install 'taskyard[history]'.
    """
    history.parquet_support()
    outcome = _run(_export_parquet, cli_context, state)
    if as_json:
        print_document(JournalExportDocument(state=str(state), **msgspec.structs.asdict(outcome)))
    else:
        click.echo(_format_result(outcome))


@journal.command(epilog=_example("compact --state ./.taskyard"))
@state_option
@json_option
@verbose_option
@quiet_option
@click.pass_obj
def compact(cli_context: CliContext, state: Path, *, as_json: bool) -> None:
    """Export, then remove the exported rows.

    Frees space inside journal.sqlite for new rows (the file does not shrink) and makes the next
    start fast. The history stays complete. Safe to interrupt and run again. The broker must be
    stopped (exit 2 if not).
    """
    outcome = _run(_compact, cli_context, state)
    if as_json:
        print_document(JournalCompactDocument(state=str(state), **msgspec.structs.asdict(outcome)))
    else:
        click.echo(_format_result(outcome))
        click.echo(
            f"trimmed {format_count(outcome.rows_trimmed, 'row')}, removed "
            f"{format_count(outcome.snapshots_removed, 'older snapshot')}"
        )


def _export_parquet(state: Path, progress: compaction.Progress) -> CompactionResult:
    """Export all rows, then replace row files by Parquet files."""
    schema.check_in_sqlite(state)
    with _open_journal(state) as store:
        outcome = compaction.export(state, store, progress)
    written = history.convert(state, lambda done, total: progress("writing Parquet", done, total))
    outcome.files = [path.name for path in written]
    return outcome


def _require_state(state: Path) -> None:
    if not state.is_dir():
        raise UnusableState(f"no state directory {state} (give the broker's with --state)")
    if not state_check.has_journal(state):
        raise UnusableState(
            f"{state}: not a state directory, it has no journal (give the broker's with --state)"
        )


def _check_state(state: Path, *, deep: bool) -> StateReport:
    with ReadLock(state):
        return state_check.check(state, deep=deep)


def _check_live(state: Path, *, deep: bool) -> StateReport:
    findings = state_check.check_live(state, deep=deep)
    for _ in range(_LIVE_CHECKS_MAX - 1):
        if not findings.wrong:
            break
        findings = state_check.check_live(state, deep=deep)
    return findings


def _run(step: Any, cli_context: CliContext, state: Path) -> CompactionResult:  # noqa: ANN401  # export or compact
    _require_state(state)
    with _locked(state), CompactionProgress(cli_context) as steps:
        outcome: CompactionResult = step(state, steps)
        return outcome


def _compact(state: Path, progress: compaction.Progress) -> CompactionResult:
    if schema.database_url(state):
        return state_store.export_stopped(state, progress, trims=True)
    with _open_journal(state) as store:
        return compaction.compact(state, store, progress)


def _locked(state: Path) -> StateLock:
    try:
        return StateLock(state)
    except StateLocked as error:
        raise StateLocked(f"{error}, a running broker compacts its journal on its own") from error


@contextlib.contextmanager
def _open_journal(state: Path) -> Iterator[SqliteStore]:
    """Open the existing journal. Creating one would make the state look empty."""
    if not (state / schema.FILE_NAME).exists():
        raise JournalDamaged(
            f"{schema.FILE_NAME} is missing in {state}",
            "rows that no snapshot covers are lost (restore the file from a backup)",
        )
    with contextlib.closing(SqliteStore(state)) as store:
        yield store


class CompactionProgress(ProgressBar):
    """Shows the steps of a compaction, as bars on a terminal, as lines elsewhere."""

    def __init__(self, cli_context: CliContext) -> None:
        super().__init__(cli_context, participle="", prints_end=True)

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self.label:
            self.set_label(step)
        self.update(done, total)


def _format_result(outcome: CompactionResult) -> str:
    if not outcome.rows and outcome.files:
        return f"wrote the history up to row {outcome.sequence} to {_new_files(outcome)}"
    if not outcome.rows:
        return f"nothing to export: covered up to row {outcome.sequence}"
    return (
        f"exported {format_count(outcome.rows, 'row')}: {format_count(outcome.events, 'event')} "
        f"and {format_count(outcome.edges, 'edge')} "
        f"in {_new_files(outcome)}\n"
        f"covered up to row {outcome.sequence}: "
        f"{format_count(outcome.unfinished, 'task')} in the snapshot, "
        f"{outcome.ended} more in the index of finished tasks"
    )


def _new_files(outcome: CompactionResult) -> str:
    return format_count(len(outcome.files), "new file")


def _format_report(state: Path, findings: StateReport) -> str:
    lines = [f"state directory {state}", *(f"  {line}" for line in _contents(findings))]
    if findings.torn_bytes:
        lines.append(
            f"  {format_count(findings.torn_bytes, 'byte')} of an unfinished, "
            "unacknowledged write at the end: not damage"
        )
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
    if findings.history_parts:
        exported = (
            f"rows {findings.history_first}..{findings.history_last} in "
            f"{format_count(2 * findings.history_parts, 'file')}, "
            f"{format_count(findings.events, 'event')}"
        )
    ended = f"{format_count(findings.finished_tasks, 'task')}, up to row {findings.finished_covers}"
    return [
        f"journal    {kept}{trimmed}",
        f"snapshots  {snapshots}",
        f"history    {exported}",
        f"finished   {ended}",
    ]
