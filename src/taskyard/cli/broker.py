"""`taskyard broker`: the broker alone, in the foreground."""

from pathlib import Path

import click

from taskyard.broker.compaction import CompactionLimits
from taskyard.broker.server import BrokerSettings, SettingsReloader, serve
from taskyard.cli.daemon_options import (
    listen_option,
    log_to_stderr,
    read_listen,
    secure_option,
    until_eof_option,
)
from taskyard.cli.options import CliContext, quiet_option, state_option, verbose_option
from taskyard.cli.output import example


@click.command(epilog=example("broker --state ./.taskyard --listen dwork=tcp://127.0.0.1:6125"))
@state_option
@listen_option
@secure_option
@click.option("--memory", is_flag=True, help="Keep everything in memory: nothing survives.")
@click.option("--compact-after-rows", type=click.IntRange(min=1), hidden=True)
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def broker(  # noqa: PLR0913  # one for each option
    cli_context: CliContext,
    state: Path,
    listen: tuple[str, ...],
    *,
    secure: bool,
    memory: bool,
    compact_after_rows: int | None,
    until_eof: bool,
) -> None:
    """Run a broker in the foreground.

    It keeps all it knows in the state directory, and goes on from there when it is started again.
    The native socket in that directory is always open; each --listen opens one more. When it is
    ready it prints a line for each: `listening DIALECT ENDPOINT`.

    Beyond this machine it listens to guests with keys alone, which `taskyard keys` makes; with
    --secure on TCP of this machine, too.

    It keeps that directory small by itself: a process beside it moves what is over into
    finished.sqlite and history/ now and then.

    SIGHUP has it read the settings again: what services are run by counts at once, and nothing is
    restarted. `taskyard config reload` sends it, when the settings are good.

    SIGTERM and Ctrl-C stop it: workers wait for it and come back. A second broker on the same state
    directory is refused (exit 2), a damaged state too (exit 6).
    """
    log_to_stderr(cli_context, "broker")
    settings = BrokerSettings(
        state,
        read_listen(listen),
        secure=secure,
        in_memory=memory,
        until_eof=until_eof,
        plain_lease_ns=cli_context.settings().lease.plain_ns,
        compact=CompactionLimits()
        if compact_after_rows is None
        else CompactionLimits(rows=compact_after_rows),
    )
    serve(
        settings, click.echo, SettingsReloader(cli_context.settings(), cli_context.reload_settings)
    )
