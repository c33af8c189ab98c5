"""`taskyard worker`: does the tasks of a broker, in the foreground."""

from pathlib import Path

import click

from taskyard.cli.daemons import check_dialect, cores, log_to_stderr, until_eof_option
from taskyard.cli.foreign import places, words, work_ping_pong, work_wmp
from taskyard.cli.options import (
    DURATION,
    Talk,
    broker_state_option,
    config_option,
    key_option,
    quiet_option,
    setting_option,
    verbose_option,
)
from taskyard.cli.printing import example
from taskyard.client import finding
from taskyard.errors import UserError
from taskyard.settings.keys import SLOTS_MAX
from taskyard.settings.load import HEARTBEATS_A_LEASE_MIN
from taskyard.wire.pickled import PICKLE
from taskyard.worker.serve import name_for, serve, settings_of


@click.command(epilog=example("worker --slots 4 --allow imaging --state ./.taskyard"))
@click.option(
    "--broker",
    "brokers",
    multiple=True,
    metavar="URL",
    help="The broker's endpoint; that of the state directory if not given. With --dialect wmp "
    "repeatable.",
)
@broker_state_option
@key_option
@config_option
@setting_option(
    "worker.slots",
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    metavar="N",
    help="Tasks at once; one a core.",
)
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="S",
    help="A kind of tasks to do; exec and call if not given. Repeatable.",
)
@setting_option(
    "worker.allow",
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module and those below it. Repeatable.",
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Offer the service pickle: call whatever function is sent along.",
)
@click.option("--name", metavar="NAME", help="What to call it; host and process if not given.")
@setting_option("lease.heartbeat", "--heartbeat", type=DURATION, help="How often to show life; 1s.")
@setting_option(
    "lease.expire",
    "--lease",
    type=DURATION,
    help="Silence after which others get its tasks; 15s.",
)
@click.option(
    "--dialect", default="dwork", metavar="D", help="The language to speak: dwork, ping-pong, wmp."
)
@click.option(
    "--command",
    metavar="COMMAND",
    help="Run this for tasks of other services than exec and call: it reads the payload from "
    "stdin, and what it prints is the result.",
)
@click.option("--agent", metavar="COMMAND", help="Feed tasks to this program. Comes later.")
@until_eof_option
@verbose_option
@quiet_option
@click.pass_obj
def worker(  # noqa: PLR0913  # an argument an option
    talk: Talk,
    *,
    brokers: tuple[str, ...],
    state: Path | None,
    slots: int | None,
    services: tuple[str, ...],
    allow: tuple[str, ...],
    allow_pickle: bool,
    name: str | None,
    heartbeat: int,
    lease: int,
    dialect: str,
    command: str | None,
    agent: str | None,
    until_eof: bool,
) -> None:
    """Do the tasks of a broker, in the foreground.

    Programs (service exec) run in the directory in which the worker was started. Functions (service
    call) are those of modules that are allowed by name; with --allow-pickle, functions that come
    along (service pickle) are called too: whoever can reach the broker can then do here what you
    can. Payloads of other services are for --command. Without a broker it waits for one.

    In the dialects ping-pong and wmp it is a worker of the service default, unless wmp is told
    another by --service; --broker is where a broker listens to them.

    SIGTERM and Ctrl-C let it leave: it takes no more, finishes what runs, and exits 0. A second one
    ends what runs and gives it back.
    """
    check_dialect(dialect)
    if agent is not None:
        raise UserError("--agent comes later; this version runs programs and functions")
    if lease < HEARTBEATS_A_LEASE_MIN * heartbeat:
        raise UserError(
            "--lease must be at least three times --heartbeat, or one lost message costs the tasks"
        )
    if len(brokers) > 1 and dialect != "wmp":
        raise UserError(f"a worker of {dialect} has one broker: give --broker once")
    log_to_stderr(talk, "worker")
    argv = words(command)
    runs = {"allow_pickle": allow_pickle, "until_eof": until_eof}
    more = {"heartbeat_ns": heartbeat, "silence_ns": lease}
    slots = slots or cores()
    if dialect == "ping-pong":
        (place,) = places(talk, dialect, brokers)
        work_ping_pong(talk, place, argv, allow, slots, **runs)
    elif dialect == "wmp":
        managers = places(talk, dialect, brokers)
        settings = settings_of(slots, services or ("default",), name, **more)
        work_wmp(talk, managers, settings, argv, allow, **runs)
    else:
        services = services or _usual_services(talk, allow_pickle=allow_pickle)
        broker = brokers[0] if brokers else None
        endpoint = finding.endpoint(broker, state, settings=talk.settings())
        key = finding.key_for(endpoint, talk.key, settings=talk.settings())
        settings = settings_of(slots, services, name_for(key, name), **more)
        serve(endpoint, settings, allow, talk.say, key=key, command=argv, **runs)


def _usual_services(talk: Talk, *, allow_pickle: bool) -> tuple[str, ...]:
    """Those that are set; what is allowed besides is served, too."""
    more = (PICKLE.decode(),) if allow_pickle else ()
    return tuple(dict.fromkeys(talk.settings().worker.services + more))
