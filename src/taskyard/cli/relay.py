"""`taskyard relay`: hands WMP messages on between workers and managers, in the foreground."""

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
    help="Where workers and other relays come to. Port 0 takes a free one.",
)
@click.option(
    "--to",
    "upstreams",
    multiple=True,
    required=True,
    metavar="ENDPOINT",
    help="A manager, or another relay. Repeatable; keep the order when it is started again.",
)
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def relay(
    cli_context: CliContext, *, listen: str, upstreams: tuple[str, ...], until_eof: bool
) -> None:
    """Hand messages on between WMP workers and their managers.

    Workers connect to a relay as to a manager, and work for all managers behind it. A broker is a
    manager where it listens by `--listen wmp=ENDPOINT`. Relays may stand one behind the other, up
    to eight, and side by side. A relay holds no task: killed and started again it goes on, and
    nothing is lost.

    When it is ready it prints `listening wmp ENDPOINT`. Managers that are not there are waited for.
    SIGTERM and Ctrl-C stop it.
    """
    log_to_stderr(cli_context, "relay")
    above = [endpoints.peer_endpoint(one) for one in upstreams]
    below = endpoints.listen_endpoint(listen)
    if below in above:
        raise UserError(f"--to {below} is where the relay itself listens; give a manager's")
    serve(below, above, click.echo, until_eof=until_eof)
