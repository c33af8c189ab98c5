"""`taskyard store`: create and upgrade the tables of a store in PostgreSQL, move a state.

Owns the output. The work is done by `taskyard.journal.postgres`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from taskyard.broker import output_store
from taskyard.cli.options import quiet_option, setting_option, verbose_option
from taskyard.errors import NotInstalled, UnusableFile, UnusableStore
from taskyard.journal import value_files

if TYPE_CHECKING:
    from taskyard.journal.postgres.database import Connection


def _example(line: str) -> str:
    """Return the example at the end of a help text. Click keeps its lines."""
    return f"\b\nExample:\n  taskyard store {line}"


@click.group(no_args_is_help=True)
@verbose_option
@quiet_option
def store() -> None:
    """Create or upgrade the tables of a store in PostgreSQL, or move a state.

    The tables are in a schema of their own, `taskyard`. Each database has one journal. URL is as in
    psql: postgresql://USER@HOST:PORT/DATABASE. Other users of this machine can see a password in it
    while the command runs. Use a password file (PGPASSFILE) or a service file instead.

    Needs the extra: pip install 'taskyard[postgres]'.
    """


@store.command(epilog=_example("init postgresql://taskyard@db.example/taskyard"))
@click.argument("url")
@verbose_option
@quiet_option
def init(url: str) -> None:
    """Create the tables with an empty journal.

    A store that exists is left as it is. The user of URL owns the tables, and needs the right to
    create a schema.
    """
    with _database(url) as connection:
        from taskyard.journal.postgres import database  # noqa: PLC0415  # an extra

        created = database.init(connection)
        format_number = database.FORMAT if created else database.format_of(connection)
        what = "created" if created else "exists already:"
        click.echo(f"{database.describe(url)}: {what} a store of format {format_number}")


@store.command(epilog=_example("upgrade postgresql://taskyard@db.example/taskyard"))
@click.argument("url")
@verbose_option
@quiet_option
def upgrade(url: str) -> None:
    """Upgrade the tables to the format of this version.

    A store of this format is left as it is. Stop its brokers first.
    """
    with _database(url) as connection:
        from taskyard.journal.postgres import database  # noqa: PLC0415  # an extra

        before = database.upgrade(connection)
        if before == database.FORMAT:
            click.echo(f"{database.describe(url)}: has format {before} already")
        else:
            click.echo(f"{database.describe(url)}: upgraded from {before} to {database.FORMAT}")


@store.command(
    epilog=_example("move .taskyard postgresql://taskyard@db.example/taskyard --files /mnt/shared")
)
@click.argument("source")
@click.argument("target")
@setting_option(
    "broker.files",
    "--files",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory of output and large values of the store in PostgreSQL.",
)
@verbose_option
@quiet_option
def move(source: str, target: str, files: Path | None) -> None:
    """Move a state to PostgreSQL, or back.

    One of SOURCE and TARGET is a state directory, the other the URL of a store. A database must be
    empty, as after `store init`. A state directory must be new, or one that a broker of this store
    used. Stop the broker first.

    The copy is verified by its hash chain before the source is removed. A move that was interrupted
    is continued by the same command.
    """
    is_to_database = _is_url(target)
    if is_to_database == _is_url(source):
        raise click.UsageError("one of SOURCE and TARGET must be a URL, the other a directory")
    if files is None:
        raise UnusableStore("store: no directory for output and values (give one with --files)")
    with _extra():
        from taskyard.journal.postgres import database, move  # noqa: PLC0415  # an extra
    shared = move.Files(files, (output_store.FOLDER, value_files.FOLDER))
    try:
        if is_to_database:
            head, place = move.to_database(Path(source), target, shared), database.describe(target)
        else:
            head, place = move.to_directory(source, Path(target), shared), target
    except OSError as error:
        raise UnusableFile(f"{error.filename}: {error.strerror}") from error
    click.echo(f"{place}: has the journal up to row {head.sequence}, record {head.record}")


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
