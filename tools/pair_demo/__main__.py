"""The options and the output of `./yard demo --pair`. The steps are in `pair`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from pair_demo.pair import run_pair
from taskyard.cli.commands import Command
from taskyard.cli.demo import DemoOutput, exit_code, print_lines, verdict
from taskyard.cli.entry import run
from taskyard.cli.options import CliContext
from taskyard.demo.campaign import TASKS_MAX, TASKS_MIN
from taskyard.errors import ExitCode
from taskyard.process.supervisor import stop_signals_as_interrupt

#: Each takes a tenth of a second of one of eight slots.
TASKS: Final = 600


@click.command(cls=Command)
@click.option("--pair", is_flag=True, required=True, hidden=True)
@click.option(
    "--tasks",
    type=click.IntRange(TASKS_MIN, TASKS_MAX),
    default=TASKS,
    metavar="N",
    help="Number of tasks in the campaign.",
)
@click.option(
    "--postgresql",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    show_default="in PATH, by pg_config, or of a package",
    help="Directory with the programs of PostgreSQL.",
)
@click.pass_obj
def demo(cli_context: CliContext, *, pair: bool, tasks: int, postgresql: Path | None) -> ExitCode:  # noqa: ARG001  # the verb has it
    """Run two brokers on a PostgreSQL, kill the leader, and audit the journal.

    Starts a PostgreSQL in a temporary directory, two brokers and two workers. While a client
    submits tasks, the broker that leads is killed with SIGKILL. The other one takes over. Takes 20
    seconds. Exit 0 only if every check passes.
    """
    cli_context.interrupt_message = "interrupted; all processes of the demo have ended"
    with stop_signals_as_interrupt():
        outcome = run_pair(tasks, postgresql, DemoOutput(cli_context))
    print_lines(outcome.lines)
    click.echo(f"{verdict(outcome.lines)} ({outcome.seconds:.0f} s)")
    return exit_code(outcome.lines)


if __name__ == "__main__":
    sys.exit(run(demo, sys.argv[1:], is_main_program=True))
