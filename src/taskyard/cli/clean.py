"""`taskyard clean`: remove output files and large values of settled tasks.

Works on the files of a state directory, with or without a broker, or on the tables of its database.
The journal keeps the results of short commands, and head and tail of long output.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from taskyard.cli.completion import complete_campaign
from taskyard.cli.connection import connect_read_only, local_state
from taskyard.cli.documents import CleanDocument
from taskyard.cli.format import format_count
from taskyard.cli.options import DURATION, SIZE, CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.scopes import OnceOption, check_campaign
from taskyard.core.identity import spelling
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import shown
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.broker.output_store import CountedStore
    from taskyard.broker.values import ValuePlace
    from taskyard.cli.connection import ReadOnlyClient

#: Names in one request.
_NAMES_PER_REQUEST: Final = 1000

_SETTLED_STATES: Final = ("done", "failed", "cancelled")

#: Values that were used more recently stay. A client may be about to submit a task that names one,
#: and looks for it up to 10 s before.
_VALUE_USED_NS: Final = 60 * SECOND_NS

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNIT: Final = 1024


class _File(NamedTuple):
    """A file that may be removed."""

    #: Campaign and full name of each task that needs it.
    tasks: frozenset[tuple[str, str]]
    bytes_total: int
    written_ns: int
    remove: Callable[[], object]


@click.command(
    epilog=example("clean --older-than 30d --dry-run", "clean --campaign thumbs --keep-size 5G")
)
@click.option(
    "--older-than",
    metavar="DURATION",
    type=DURATION,
    help="Only files that were written longer ago than this.",
)
@click.option(
    "--campaign",
    cls=OnceOption,
    metavar="NAME",
    help="Only files of this campaign.",
    shell_complete=complete_campaign,
)
@click.option(
    "--keep-size",
    metavar="SIZE",
    type=SIZE,
    help="Keep this much of it, the newest. The rest is removed.",
)
@click.option("--all", "everything", is_flag=True, help="All files of settled tasks.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, and print what would be removed.")
@broker_options
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
    """Remove output files and large values of settled tasks.

    Long output, and large arguments and results of Python calls, are kept in files of the state
    directory. This command removes those that match every option. At least one option is required.
    Tasks that may still run are skipped. Results of up to 16 KiB stay, and head and tail of longer
    output.
    """
    if older_than is None and campaign is None and keep_size is None and not everything:
        raise UserError("clean: give --older-than, --campaign, --keep-size or --all")
    place = _place(cli_context)
    with closing(place.outputs):
        files = [*_output_files(place), *_values(place)]
        if campaign is not None:
            files = [file for file in files if {found for found, _ in file.tasks} == {campaign}]
        with connect_read_only(cli_context) as broker:
            check_campaign(broker, campaign)
            active = _active(broker, files)
        settled = [file for file in files if active.isdisjoint(name for _, name in file.tasks)]
        chosen = settled if older_than is None else _older(settled, older_than)
        if keep_size is not None:
            chosen = _beyond(chosen, keep_size)
        if not dry_run:
            for file in chosen:
                file.remove()
    _report(cli_context, chosen, len(active), dry_run=dry_run)


class _Place(NamedTuple):
    """Where output and values are."""

    outputs: CountedStore
    values: ValuePlace


def _place(cli_context: CliContext) -> _Place:
    """Return the directories of the local state, or the tables of its database."""
    from taskyard.broker import (  # noqa: PLC0415  # not for `taskyard --help`
        database,
        output_store,
        value_references,
        values,
    )
    from taskyard.journal import value_files  # noqa: PLC0415  # as above

    state, given = local_state(cli_context), cli_context.settings().values.directory
    files = value_files.ValueFiles(given or state / value_files.FOLDER)
    log = value_references.ReferenceFile(files.directory / value_references.LOG_FILE, repairs=False)
    place = _Place(
        output_store.OutputFiles(state / output_store.FOLDER), values.ValuePlace(files, log)
    )
    tables = database.open_files(state)
    if tables is None:
        return place
    return place._replace(
        outputs=tables.outputs, values=tables.values if given is None else place.values
    )


def _output_files(place: _Place) -> Iterator[_File]:
    """Yield the files with output."""
    for file in place.outputs.walk():
        task = (shown(file.campaign), shown(spelling(file.campaign, file.name)))
        remove = partial(place.outputs.remove, file)
        yield _File(frozenset([task]), file.bytes_total, file.written_ns, remove)


def _values(place: _Place) -> Iterator[_File]:
    """Yield large values that tasks name, but those in use. The broker removes others."""
    from taskyard.broker.value_references import ValueReferences  # noqa: PLC0415  # as above

    references = ValueReferences(place.values.log)
    since_ns = time.time_ns() - _VALUE_USED_NS
    for file in place.values.files.walk():
        if file.used_ns > since_ns:
            continue
        names = map(shown, references.tasks(file.name))
        tasks = frozenset((_campaign_of(name), name) for name in names)
        if tasks:
            remove = partial(place.values.files.remove, file.name, file.used_ns)
            yield _File(tasks, file.bytes_total, file.used_ns, remove)


def _campaign_of(full_name: str) -> str:
    campaign, slash, _ = full_name.partition("/")
    return campaign if slash else ""


def _active(broker: ReadOnlyClient, files: list[_File]) -> set[str]:
    """Return the full names of tasks that may still run."""
    names = iter(dict.fromkeys(name for file in files for _, name in file.tasks))
    active: set[str] = set()
    while some := list(islice(names, _NAMES_PER_REQUEST)):
        found = broker.existing(some)
        active |= {name for name in found if found[name]["state"] not in _SETTLED_STATES}
    return active


def _older(files: list[_File], age_ns: int) -> list[_File]:
    since_ns = time.time_ns() - age_ns
    return [file for file in files if file.written_ns < since_ns]


def _beyond(files: list[_File], keep_bytes: int) -> list[_File]:
    """Return the older files beyond a total size of the newest ones."""
    return list(_beyond_newest(sorted(files, key=_written_ns, reverse=True), keep_bytes))


def _beyond_newest(files: list[_File], keep_bytes: int) -> Iterator[_File]:
    kept = 0
    for file in files:
        kept += file.bytes_total
        if kept > keep_bytes:
            yield file


def _written_ns(file: _File) -> int:
    return file.written_ns


def _report(cli_context: CliContext, chosen: list[_File], active: int, *, dry_run: bool) -> None:
    tasks = len(frozenset().union(*(file.tasks for file in chosen)))
    size = sum(file.bytes_total for file in chosen)
    if cli_context.as_json:
        print_document(
            CleanDocument(
                files=len(chosen), tasks=tasks, bytes=size, active_tasks=active, dry_run=dry_run
            )
        )
        return
    verb = "would remove" if dry_run else "removed"
    click.echo(
        f"{verb} {format_count(len(chosen), 'file')} of {format_count(tasks, 'task')}, "
        f"{format_size(size)}"
    )
    if active and not cli_context.quiet:
        text = f"{format_count(active, 'task')} may still run: their files stay"
        click.echo(text, err=True)


def format_size(size_bytes: float) -> str:
    """Format a size for people: `1.2 GiB`."""
    for unit in _UNITS:
        if size_bytes < _UNIT or unit == _UNITS[-1]:
            break
        size_bytes /= _UNIT
    return f"{size_bytes:.0f} {unit}" if unit == _UNITS[0] else f"{size_bytes:.1f} {unit}"
