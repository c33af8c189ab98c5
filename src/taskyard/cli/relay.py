"""`taskyard relay`: relay WMP messages between workers and managers, in the foreground."""

import click

from taskyard.cli.daemon_options import log_to_stderr, until_eof_option
from taskyard.cli.options import CliContext, quiet_option, verbose_option
from taskyard.cli.output import example
from taskyard.errors import UserError
from taskyard.net import endpoints
from taskyard.relay.server import serve


@click.command(
    epilog=example("relay --listen tcp://127.0.0.1:6015 --to tcp://127.0.0.1:6014"),
)
@click.option(
    "--listen",
    required=True,
    metavar="ENDPOINT",
    help="Endpoint for workers and other relays. Port 0 picks a free port.",
)
@click.option(
    "--to",
    "upstreams",
    multiple=True,
    required=True,
    metavar="ENDPOINT",
    help="A manager or another relay. Repeatable. Keep the order across restarts.",
)
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def relay(
    cli_context: CliContext, *, listen: str, upstreams: tuple[str, ...], until_eof: bool
) -> None:
    """Relay messages between WMP workers and their managers.

    Workers connect to a relay as to a manager and work for all managers behind it. A broker is a
    manager if it runs with `--listen wmp=ENDPOINT`. Relays can be chained, up to eight, and run
    side by side. A relay has no state, so it can be killed and restarted without losing tasks.

    When ready, it prints `listening wmp ENDPOINT`. It waits for managers that are not running.
    SIGTERM and Ctrl-C stop it.
    """
    log_to_stderr(cli_context, "relay")
    above = [endpoints.peer_endpoint(one) for one in upstreams]
    below = endpoints.listen_endpoint(listen)
    if below in above:
        raise UserError(f"--to {below}: the relay's own --listen endpoint")
    serve(below, above, click.echo, until_eof=until_eof)
