"""`taskyard worker`: does the tasks of a broker, in the foreground."""

from pathlib import Path

import click

from taskyard.cli.daemons import (
    SERVICES,
    check_dialect,
    cores,
    log_to_stderr,
    until_eof_option,
)
from taskyard.cli.options import (
    DURATION,
    Talk,
    broker_option,
    broker_state_option,
    quiet_option,
    verbose_option,
)
from taskyard.cli.printing import example
from taskyard.client import finding
from taskyard.errors import UserError
from taskyard.worker.serve import serve, settings_of

#: A worker that may be silent for less than so many heartbeats would be given up for one lost.
_HEARTBEATS_A_LEASE_MIN = 3


@click.command(epilog=example("worker --slots 4 --allow imaging --state ./.taskyard"))
@broker_option
@broker_state_option
@click.option(
    "--slots", type=click.IntRange(1, 100_000), metavar="N", help="Tasks at once; one a core."
)
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="S",
    help="A kind of tasks to do; exec and call if not given. Repeatable.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module and those below it. Repeatable.",
)
@click.option("--name", metavar="NAME", help="What to call it; host and process if not given.")
@click.option("--heartbeat", type=DURATION, default="1s", help="How often to show life; 1s.")
@click.option(
    "--lease", type=DURATION, default="15s", help="Silence after which others get its tasks; 15s."
)
@click.option("--dialect", default="dwork", metavar="D", help="The language to speak; dwork.")
@click.option("--agent", metavar="COMMAND", help="Feed tasks to this program. Comes later.")
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def worker(  # noqa: PLR0913  # an argument an option
    talk: Talk,
    *,
    broker: str | None,
    state: Path | None,
    slots: int | None,
    services: tuple[str, ...],
    allow: tuple[str, ...],
    name: str | None,
    heartbeat: int,
    lease: int,
    dialect: str,
    agent: str | None,
    until_eof: bool,
) -> None:
    """Do the tasks of a broker, in the foreground.

    Programs (service exec) run in the directory in which the worker was started. Functions (service
    call) are those of modules that are allowed by name. Without a broker it waits for one.

    SIGTERM and Ctrl-C let it leave: it takes no more, finishes what runs, and exits 0. A second one
    ends what runs and gives it back.
    """
    check_dialect(dialect)
    if agent is not None:
        raise UserError("--agent comes later; this version runs programs and functions")
    if lease < _HEARTBEATS_A_LEASE_MIN * heartbeat:
        raise UserError(
            "--lease must be at least three times --heartbeat, or one lost message costs the tasks"
        )
    log_to_stderr(talk, "worker")
    more = {"heartbeat_ns": heartbeat, "silence_ns": lease}
    settings = settings_of(slots or cores(), services or SERVICES, name, **more)
    endpoint = finding.endpoint(broker, state)
    serve(endpoint, settings, allow, talk.say, until_eof=until_eof)
