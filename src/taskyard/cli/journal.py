"""`taskyard journal`: care for a state directory that no broker is using.

Owns the words and the documents that these verbs print. What they do is the journal's affair.
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
from taskyard.errors import ExitCode, JournalDamaged, StateLocked, UserError
from taskyard.journal import compaction, schema, state_check
from taskyard.journal.compaction import CompactionResult
from taskyard.journal.lock import ReadLock, StateLock
from taskyard.journal.sqlite import SqliteStore
from taskyard.journal.state_check import StateReport

#: A copy of what is being written may be torn; the next one is torn elsewhere.
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
    version: Literal[2] = 2


class JournalExportDocument(
    CompactionResult,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="document",
    tag="journal export",
):
    """`journal export`."""

    state: str
    version: Literal[2] = 2


class JournalCompactDocument(JournalExportDocument, tag="journal compact"):
    """`journal compact`."""


def _example(line: str) -> str:
    """The end of a verb's help; click keeps the lines as they are."""
    return f"\b\nExample:\n  taskyard journal {line}"


@click.group(no_args_is_help=True)
@verbose_option
@quiet_option
def journal() -> None:
    """Care for a state directory: check, export, compact.

    The broker must be stopped first; `check --live` looks at the state of a running one. A running
    broker compacts its journal by itself, after every 200,000 rows or so.
    """


@journal.command(epilog=_example("check --state ./.taskyard --deep"))
@state_option
@json_option
@click.option("--deep", is_flag=True, help="Replay the rows and read everything, too.")
@click.option("--live", is_flag=True, help="Look even though a broker is writing.")
@verbose_option
@quiet_option
def check(state: Path, *, as_json: bool, deep: bool, live: bool) -> ExitCode:
    """Say what is in a state directory, and whether it is sound.

    Verifies the journal's chain and witness, the snapshots, the history files and the index of
    finished tasks, and that they belong together. Changes no content: only STATE/lock is written,
    to keep a broker out, and a full or read-only disk will do. Exit 0 if all is sound, 6 if
    something is damaged: then it says what is wrong and what is lost.

    While a broker runs it is refused (exit 2), because what is being written can look damaged.
    With --live a copy is checked, up to three times until one is sound: good news is true, bad news
    wants a second look with the broker stopped.
    """
    _require_state(state)
    logging.getLogger("taskyard.journal").setLevel(logging.ERROR)  # it will be said in better words
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
    """Write the history of all rows as Parquet files; forget nothing.

    Adds files to STATE/history/, takes a snapshot, and brings the index of finished tasks up to
    date. Run again it changes nothing that is there. The broker must be stopped (exit 2 if not).
    """
    outcome = _run(compaction.export, cli_context, state)
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
    """Export, then trim the rows that are covered by it.

    Frees the rows' space inside journal.sqlite for the next ones (the file does not shrink) and
    makes the next start quick. The history stays complete. Killed at any point and run again it
    comes to the same end. The broker must be stopped (exit 2 if not).
    """
    outcome = _run(compaction.compact, cli_context, state)
    if as_json:
        print_document(JournalCompactDocument(state=str(state), **msgspec.structs.asdict(outcome)))
    else:
        click.echo(_format_result(outcome))
        click.echo(
            f"trimmed {format_count(outcome.rows_trimmed, 'row')}, removed "
            f"{format_count(outcome.snapshots_removed, 'older snapshot')}"
        )


def _require_state(state: Path) -> None:
    if not state.is_dir():
        raise UserError(
            f"there is no state directory {state}: give --state DIR, the one that the broker uses"
        )
    if not state_check.has_journal(state):
        raise UserError(f"{state} is no state directory, there is no journal in it: give --state")


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
    with _locked(state), _open_journal(state) as store, CompactionProgress(cli_context) as steps:
        outcome: CompactionResult = step(state, store, steps)
        return outcome


def _locked(state: Path) -> StateLock:
    try:
        return StateLock(state)
    except StateLocked as error:
        raise StateLocked(
            f"{error}; leave it to the broker: a running one compacts its journal by itself"
        ) from error


@contextlib.contextmanager
def _open_journal(state: Path) -> Iterator[SqliteStore]:
    """The journal that is there; a new one would be taken for an empty state."""
    if not (state / schema.FILE_NAME).exists():
        raise JournalDamaged(
            f"{schema.FILE_NAME} is missing in {state}",
            "all rows that no snapshot covers are lost; put it back from a copy",
        )
    with contextlib.closing(SqliteStore(state)) as store:
        yield store


class CompactionProgress(ProgressBar):
    """Shows the steps of a compaction: a bar each on a terminal, a line each elsewhere."""

    def __init__(self, cli_context: CliContext) -> None:
        super().__init__(cli_context, verb="", prints_end=True)

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self.label:
            self.set_label(step)
        self.update(done, total)


def _format_result(outcome: CompactionResult) -> str:
    if not outcome.rows:
        return f"nothing to export: all is covered up to row {outcome.sequence}"
    return (
        f"exported {format_count(outcome.rows, 'row')}: {format_count(outcome.events, 'event')} "
        f"and "
        f"{format_count(outcome.edges, 'edge')} in {format_count(len(outcome.files), 'new file')}\n"
        f"all is covered up to row {outcome.sequence}: {format_count(outcome.unfinished, 'task')} "
        f"in the "
        f"snapshot, {outcome.ended} more in the index of finished ones"
    )


def _format_report(state: Path, findings: StateReport) -> str:
    lines = [f"state directory {state}", *(f"  {line}" for line in _contents(findings))]
    if findings.torn_bytes:
        lines.append(
            f"  {format_count(findings.torn_bytes, 'byte')} of an unfinished write at its end, "
            f"never "
            "acknowledged: not damage"
        )
    if not findings.wrong:
        depth = "everything was read" if findings.deep else "--deep reads everything"
        return "\n".join([*lines, f"sound ({depth})"])
    lines += ["DAMAGED", *(f"  wrong: {one}" for one in findings.wrong)]
    lines += [f"  lost: {one}" for one in findings.lost]
    return "\n".join([*lines, "Nothing was changed. Put the directory back from a copy."])


def _contents(findings: StateReport) -> list[str]:
    kept = "no rows are kept"
    if findings.rows:
        kept = f"rows {findings.row_first}..{findings.row_last}, up to record {findings.record}"
    trimmed = f"; rows 1..{findings.trimmed} are trimmed" if findings.trimmed else ""
    snapshots = "none"
    if findings.snapshots:
        at = ", ".join(str(sequence) for sequence in findings.snapshots)
        tasks = format_count(findings.snapshot_tasks, "task")
        snapshots = f"of row {at}; {tasks} in the newest that can be read"
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
