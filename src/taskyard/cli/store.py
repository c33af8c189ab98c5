"""`taskyard store`: create and upgrade the tables of a store in PostgreSQL.

Owns the output. The work is done by `taskyard.journal.postgres`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from taskyard.cli.options import quiet_option, verbose_option
from taskyard.errors import NotInstalled, UnusableStore

if TYPE_CHECKING:
    from taskyard.journal.postgres.database import Connection


def _example(line: str) -> str:
    """Return the example at the end of a help text. Click keeps its lines."""
    return f"\b\nExample:\n  taskyard store {line}"


@click.group(no_args_is_help=True)
@verbose_option
@quiet_option
def store() -> None:
    """Create or upgrade the tables of a store in PostgreSQL.

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


@contextmanager
def _database(url: str) -> "Iterator[Connection]":
    try:
        import psycopg  # noqa: PLC0415  # an extra

        from taskyard.journal.postgres import database  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise NotInstalled(
            f"store: needs {error.name} (`pip install 'taskyard[postgres]'`)"
        ) from error
    with database.open_database(url) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            text = database.text_of(error)
            raise UnusableStore(f"{database.describe(url)}: {text}") from error
