"""`taskyard clean`: remove long output, large arguments and large results of settled tasks.

Works on the blobs of a state directory, with or without a broker, or on the tables of its database.
The journal keeps short output and results, and head and tail of long output.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from taskyard.cli.commands import Command
from taskyard.cli.connection import connect_read_only, local_state
from taskyard.cli.documents import CleanDocument
from taskyard.cli.format import format_count, format_size
from taskyard.cli.options import DURATION, SIZE, CliContext
from taskyard.cli.output import example, print_document
from taskyard.cli.scopes import campaign_option, check_campaign
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from taskyard.core.ledger import Ledger
    from taskyard.journal.blobs import BlobStore

_SETTLED_STATES: Final = (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)

#: Blobs that were used more recently stay. A client may be about to submit a task with such a blob,
#: and looks for it up to 10 s before.
_USED_NS: Final = 60 * SECOND_NS


class _File(NamedTuple):
    """A file that may be removed."""

    #: Campaign and full name of each task that needs it.
    tasks: frozenset[tuple[str, str]]
    bytes_total: int
    written_ns: int
    remove: Callable[[], object]


@click.command(
    cls=Command,
    epilog=example("clean --older-than 30d --dry-run", "clean --campaign thumbs --keep-size 5G"),
)
@click.option(
    "--older-than",
    metavar="DURATION",
    type=DURATION,
    help="Only files that were written longer ago than this.",
)
@campaign_option
@click.option(
    "--keep-size",
    metavar="SIZE",
    type=SIZE,
    help="Keep this much, the newest, and remove older files.",
)
@click.option("--every-file", "everything", is_flag=True, help="All files of settled tasks.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, and print what would be removed.")
@click.pass_obj
def clean(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    older_than: int | None,
    campaign: str | None,
    keep_size: int | None,
    *,
    everything: bool,
    dry_run: bool,
) -> None:
    """Remove long output, large arguments and large results of settled tasks.

    Bytes from 64 KiB on are kept in files of the state directory. This command removes the files
    that match every option. At least one option is required. Tasks that may still run are skipped.
    Head and tail of long output stay.
    """
    if older_than is None and campaign is None and keep_size is None and not everything:
        raise UserError("clean: give --older-than, --campaign, --keep-size or --every-file")
    from taskyard.journal import state_store  # noqa: PLC0415  # not for `taskyard --help`

    state, since_ns = local_state(cli_context), time.time_ns() - _USED_NS
    if campaign is not None:
        with connect_read_only(cli_context) as broker:
            check_campaign(broker, campaign)
    with closing(state_store.open_blobs(state, cli_context.settings().blobs.directory)) as store:
        files, active = _found(store, state)
        if campaign is not None:
            files = [file for file in files if {found for found, _ in file.tasks} == {campaign}]
            active = {name for name in active if _campaign_of(name) == campaign}
        chosen = files if older_than is None else _older(files, older_than)
        if keep_size is not None:
            chosen = _beyond(chosen, keep_size)
        matching, chosen = chosen, [file for file in chosen if file.written_ns <= since_ns]
        if not dry_run:
            for file in chosen:
                file.remove()
            store.flush()
    recent = len(matching) - len(chosen)
    _report(cli_context, chosen, recent, len(active), dry_run=dry_run)


def _found(store: BlobStore, state: Path) -> tuple[list[_File], set[str]]:
    """Return what settled tasks name, and the tasks that may still run and need something.

    The broker removes what no task names.
    """
    from taskyard.broker.results import ResultLoader  # noqa: PLC0415  # not for `taskyard --help`
    from taskyard.broker.rows import Budget, DecodedRows  # noqa: PLC0415  # as above
    from taskyard.journal import recovery, state_store, witness  # noqa: PLC0415  # as above
    from taskyard.journal.archive import Archive  # noqa: PLC0415  # as above
    from taskyard.journal.blobs import blobs_needed, tasks_by_blob  # noqa: PLC0415

    witnessed = witness.read(state)
    if witnessed is None:
        return [], set()
    with state_store.open_reader(state, *witnessed) as rows, Archive(state) as index:
        ledger = recovery.open_ledger(state, rows)
        tasks = tasks_by_blob(rows, index)
        loader = ResultLoader(DecodedRows(rows), index, ledger, store)
        needed: set[str] = set()
        active: set[str] = set()
        for task in ledger.tasks.values():
            if task.state not in _SETTLED_STATES:
                found = blobs_needed(task, lambda name: loader.result_of(name, Budget()))
                needed |= found
                if found:
                    active.add(shown(task.name))
    files = []
    for file in store.walk():
        if isinstance(file.id, str):
            names = tasks.get(file.id, set()) if file.id not in needed else set()
        else:
            names = set() if file.id.is_upload else {spelling(file.id.campaign, file.id.name)}
            running = {shown(name) for name in names if _may_run(ledger, name)}
            active |= running
            names = set() if running else names
        if names:
            shown_names = frozenset((_campaign_of(name), name) for name in map(shown, names))
            remove = partial(store.remove, file.id, file.used_ns)
            files.append(_File(shown_names, file.bytes_total, file.used_ns, remove))
    return files, active


def _may_run(ledger: Ledger, name: bytes) -> bool:
    task = ledger.tasks.get(name)
    return task is not None and task.state not in _SETTLED_STATES


def _campaign_of(full_name: str) -> str:
    campaign, slash, _ = full_name.partition("/")
    return campaign if slash else ""


def _older(files: list[_File], age_ns: int) -> list[_File]:
    since_ns = time.time_ns() - age_ns
    return [file for file in files if file.written_ns < since_ns]


def _beyond(files: list[_File], keep_bytes: int) -> list[_File]:
    """Return the older files beyond a total size of the newest."""
    newest = sorted(files, key=attrgetter("written_ns"), reverse=True)
    totals = accumulate(file.bytes_total for file in newest)
    return [file for file, total in zip(newest, totals, strict=True) if total > keep_bytes]


def _report(
    cli_context: CliContext, chosen: list[_File], recent: int, active: int, *, dry_run: bool
) -> None:
    tasks = len(frozenset().union(*(file.tasks for file in chosen)))
    size = sum(file.bytes_total for file in chosen)
    if cli_context.as_json:
        print_document(
            CleanDocument(
                files=len(chosen),
                tasks=tasks,
                bytes=size,
                recent_files=recent,
                active_tasks=active,
                dry_run=dry_run,
            )
        )
        return
    verb = "would remove" if dry_run else "removed"
    click.echo(
        f"{verb} {format_count(len(chosen), 'file')} of {format_count(tasks, 'task')}, "
        f"{format_size(size)}"
    )
    if cli_context.quiet:
        return
    if recent:
        click.echo(f"{format_count(recent, 'file')} used in the last minute: kept", err=True)
    if active:
        text = f"{format_count(active, 'task')} may still run: their files stay"
        click.echo(text, err=True)
