"""`taskyard pipeline fleet`: run workers inside Spark executors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taskyard.cli.format import format_count
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import PipelineFleetDocument
from taskyard.cli.pipeline.group import SparkCommand, master_option
from taskyard.cli.pipeline.progress import started_session
from taskyard.client import discovery
from taskyard.errors import ExitCode
from taskyard.settings.keys import SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command(
    cls=SparkCommand,
    epilog=example(
        "pipeline fleet --workers 2 --state ./.taskyard",
        "pipeline fleet --workers 40 --slots 4 --broker tcp://head:6125 --master spark://head:7077",
    ),
)
@click.option(
    "--workers",
    type=click.IntRange(1, SLOTS_MAX),
    required=True,
    metavar="N",
    help="Number of workers. Each takes one Spark core.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, SLOTS_MAX),
    default=1,
    metavar="N",
    help="Tasks at once per worker.",
)
@click.option(
    "--service",
    "services",
    multiple=True,
    metavar="S",
    show_default="exec, call",
    help="Service that the workers offer. Repeatable.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="MODULE",
    help="Offer the functions of this module of the executors. Repeatable.",
)
@master_option
@click.pass_obj
def fleet(cli_context: CliContext, /, workers: int, **given: Any) -> ExitCode:  # noqa: ANN401
    """Run workers inside Spark executors.

    They run until the broker drains or the command is interrupted. Then their running tasks are
    killed and go to other workers. If an executor is lost, Spark restarts its workers elsewhere. On
    a cluster, the executors need Taskyard installed and a broker that they can reach: --listen
    dwork=tcp://… with keys. A Spark Connect server restarts a worker as often as its own
    spark.task.maxFailures allows. With several brokers, each worker works for all of them, until
    all drain.
    """
    from taskyard.pipeline import executors  # noqa: PLC0415  # imports Spark
    from taskyard.pipeline.jobs import fleet as job  # noqa: PLC0415

    found = discovery.worker_endpoints(
        cli_context.brokers, cli_context.state, cli_context.settings()
    )
    for endpoint in found:
        job.check(workers, given["master"], endpoint)
    name = "taskyard pipeline fleet"
    with started_session(cli_context, name, given["master"], conf=job.CONF) as spark:
        job.check_server(spark)
        executors.check(spark, given["master"])
        cores = executors.cores_of(spark)
        slots = f"{format_count(workers, 'worker')} of {format_count(given['slots'], 'slot')}"
        brokers = f"the broker{'s' if len(found) > 1 else ''} at {', '.join(found)}"
        cli_context.info(f"{slots} for {brokers}, {_print_free_cores(cores - workers)}")
        left = job.run(spark, workers, _options(cli_context, found, given))
    if cli_context.as_json:
        print_document(PipelineFleetDocument(workers=left))
    else:
        click.echo(f"{format_count(left, 'worker')} exited")
    return ExitCode.OK


def _print_free_cores(free: int) -> str:
    if free < 0:
        return f"{-free} of them waiting for cores"
    return f"{format_count(free, 'core')} of Spark unused"


def _options(cli_context: CliContext, brokers: Sequence[str], given: dict[str, Any]) -> list[str]:
    """Return the options of each worker."""
    options = ["--slots", str(given["slots"])]
    for broker in brokers:
        options += ["--broker", broker]
    configured = discovery.configured_key_file(cli_context.settings())
    for key in cli_context.keys or (() if configured is None else (configured,)):
        options += ["--key", str(key)]
    for service in given["services"]:
        options += ["--service", service]
    for module in given["allow"]:
        options += ["--allow", module]
    return options
