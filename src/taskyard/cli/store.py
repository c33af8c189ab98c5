"""`taskyard store`: create a store in PostgreSQL and list its outbox, move a state.

Owns the output. The work is done by `taskyard.journal.postgres`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from taskyard.cli.command import Group
from taskyard.cli.documents import OutboxTask, StoreOutboxDocument
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, moment_cell, print_document, print_table
from taskyard.core.identity import spelling
from taskyard.errors import NotInstalled, UnknownName, UnusableFile, UnusableStore, UserError
from taskyard.net.keyring import DIRECTORY_NAME

if TYPE_CHECKING:
    from taskyard.journal.postgres.database import Connection

#: Tasks in a list of the outbox. There may be millions while no broker runs.
_TASKS_MAX: Final = 1_000


def _example(line: str) -> str:
    """Return the example at the end of a help text. Click keeps its lines."""
    return f"\b\nExample:\n  taskyard store {line}"


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
    with _database(url) as connection:
        from taskyard.journal.postgres import database  # noqa: PLC0415  # an extra

        created = database.init(connection)
        what = "created a store" if created else "has a store already"
        click.echo(f"{database.describe(url)}: {what}")


@store.command(epilog=_example("move .taskyard postgresql://taskyard@db.example/taskyard"))
@click.argument("source")
@click.argument("target")
@click.pass_obj
def move(cli_context: CliContext, source: str, target: str) -> None:
    """Move a state to PostgreSQL, or back.

    One of SOURCE and TARGET is a state directory, the other the URL of a store. A database must be
    empty, as after `store init`. A state directory must be new, or one that a broker of this store
    used. Stop the broker first. Long output and large values stay in `blobs.directory`, if that is
    set.

    The copy is verified by its hash chain before the source is removed. A move that was interrupted
    is continued by the same command.
    """
    is_to_database = _is_url(target)
    if is_to_database == _is_url(source):
        raise click.UsageError("one of SOURCE and TARGET must be a URL, the other a directory")
    with _extra():
        from taskyard.journal.postgres import database, move  # noqa: PLC0415  # an extra
    state = Path(source if is_to_database else target)
    shared, keys = cli_context.settings().blobs.directory, state / DIRECTORY_NAME
    try:
        if is_to_database:
            head, place = move.to_database(state, target, shared, keys), database.describe(target)
        else:
            head, place = move.to_directory(source, state, shared, keys), target
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise UnusableFile(text) from error
    click.echo(f"{place}: has the journal up to row {head.sequence}, record {head.record}")


def _show_outbox(
    cli_context: CliContext, url: str, retry: tuple[int, ...], drop: tuple[int, ...]
) -> None:
    """List the outbox, or retry and drop tasks of it."""
    with _database(url) as connection:
        from taskyard.journal.postgres import database, outbox  # noqa: PLC0415  # an extra

        database.check_tables(connection)
        retried, dropped = outbox.retry(connection, retry), outbox.drop(connection, drop)
        missing = sorted({*retry, *drop} - {*retried, *dropped})
        if missing:
            raise UnknownName(f"outbox: no refused task {missing[0]}", str(missing[0]))
        found = outbox.entries(connection, 0, _TASKS_MAX)
    tasks = [
        OutboxTask(
            *(one.id, one.name, one.campaign, one.submitted_by, one.submitted),
            state="new" if one.code is None else "refused",
            code=one.code,
            reason=one.reason,
        )
        for one in found
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
            *(one.id, spelling(one.campaign, one.name), one.submitted_by),
            *(moment_cell(one.submitted, now), one.state, escape_line(one.reason or "")),
        )
        for one in tasks
    ]
    print_table(("ID", "TASK", "BY", "SUBMITTED", "STATE", "REASON"), rows, wrapped=("REASON",))


def _is_url(text: str) -> bool:
    return text.startswith(("postgresql://", "postgres://"))


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(
            f"store: needs {error.name} (`pip install 'taskyard[postgres]'`)"
        ) from error


@contextmanager
def _database(url: str) -> "Iterator[Connection]":
    with _extra():
        import psycopg  # noqa: PLC0415  # an extra

        from taskyard.journal.postgres import database  # noqa: PLC0415  # an extra
    with database.open_database(url) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            text = database.text_of(error)
            raise UnusableStore(f"{database.describe(url)}: {text}") from error
