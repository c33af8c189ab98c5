"""`taskyard broker`: run a broker in the foreground."""

import gc

import click
from msgspec import structs

from taskyard.broker.compaction import CompactionLimits
from taskyard.broker.server import BrokerSettings, SettingsReloader, serve
from taskyard.cli import daemon_options
from taskyard.cli.commands import Command
from taskyard.cli.connection import removed_if_unused
from taskyard.cli.options import CliContext, setting_option
from taskyard.cli.output import example


@click.command(
    cls=Command, epilog=example("broker --state ./.taskyard --listen dwork=tcp://127.0.0.1:6125")
)
@daemon_options.listen_option
@daemon_options.secure_option
@click.option(
    "--in-memory",
    is_flag=True,
    help="Keep the state in memory only. It is lost when the broker exits.",
)
@setting_option(
    "broker.store",
    "--store",
    metavar="URL",
    show_default="sqlite",
    help="Keep the journal in PostgreSQL: postgresql://USER@HOST/DATABASE.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="With --store, follow the broker that has the journal, and take over when it ends.",
)
@click.option("--compact-after-rows", type=click.IntRange(min=1), hidden=True)
@daemon_options.log_file_option
@daemon_options.log_options
@daemon_options.until_eof_option
@click.pass_obj
def broker(  # noqa: PLR0913  # one per option
    cli_context: CliContext,
    listen: tuple[str, ...],
    *,
    secure: bool,
    in_memory: bool,
    store: str,
    standby: bool,
    compact_after_rows: int | None,
    until_eof: bool,
) -> None:
    """Run a broker in the foreground.

    The broker keeps its state in the state directory and resumes from it after a restart. It always
    opens the native socket in that directory. Each --listen opens one more. When ready, it prints
    `listening DIALECT ENDPOINT` for each, and the listener's NAME behind it if it has one.

    On other interfaces than loopback, peers need a key (see `taskyard keys`). With --secure, peers
    on loopback TCP need one too.

    With --store the journal is in PostgreSQL (see `taskyard store`). Only one broker can have it.
    With --standby any number can be started, each with its own --state: the first one leads. The
    others print `standby: following epoch N at row N`, and one takes over when the leader ends.

    A background process compacts the journal: it moves finished tasks to finished.sqlite and
    history/.

    SIGHUP reloads the settings without a restart. `taskyard config --reload` checks them first.

    SIGTERM and Ctrl-C stop the broker. Workers wait and reconnect. Exit 2 if another broker uses
    the state directory, 7 if it uses the store, 6 if the state is damaged.
    """
    daemon_options.open_log(cli_context, "broker")
    state = cli_context.state_directory()
    options = BrokerSettings(
        state,
        daemon_options.read_listen(listen, cli_context.settings().listeners),
        secure=secure,
        in_memory=in_memory,
        store=_read_store(store, in_memory=in_memory, standby=standby),
        standby=standby,
        until_eof=until_eof,
        compact=_read_limits(compact_after_rows),
    )
    with removed_if_unused(cli_context, state):
        _serve(cli_context, options)


def _serve(cli_context: CliContext, options: BrokerSettings) -> None:
    """Run a broker with these options, and with the settings that have none."""
    found = cli_context.settings()
    settings = structs.replace(
        options,
        tables=found.listeners,
        store_lease_ns=found.lease.store_ns,
        blobs_directory=found.blobs.directory,
        plain_lease_ns=found.lease.plain_ns,
    )
    reloading = SettingsReloader(found, cli_context.reload_settings)
    while serve(settings, click.echo, reloading):
        gc.collect()  # the ledger of the term that is over
        settings = structs.replace(settings, yields=True)


def _read_store(store: str, *, in_memory: bool, standby: bool) -> str:
    """Return the URL of a journal in PostgreSQL. Empty: in SQLite, or in memory."""
    url = daemon_options.read_store(store)
    if standby and not url:
        raise click.UsageError("--standby: needs a store in PostgreSQL (give one with --store)")
    if in_memory and url:
        raise click.UsageError("--in-memory: excludes a store in PostgreSQL (add --store sqlite)")
    return url


def _read_limits(rows: int | None) -> CompactionLimits:
    return CompactionLimits() if rows is None else CompactionLimits(rows=rows)
