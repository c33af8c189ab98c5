"""`taskyard pipeline load`: campaigns' files, checked by Spark, submitted from its partitions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.formats import FileOptions, Format
from taskyard.campaign.reader import default_campaign_name
from taskyard.cli.connection import connect_client
from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.load import print_rejected
from taskyard.cli.options import CliContext, broker_options
from taskyard.cli.output import example, print_document
from taskyard.cli.pipeline.documents import BadRow, PipelineLoadDocument, PipelineLoadDryRunDocument
from taskyard.cli.pipeline.group import SparkCommand, master_option
from taskyard.cli.progress import ProgressBar
from taskyard.cli.task_options import TaskKey
from taskyard.core.events import UnknownPolicy
from taskyard.core.limits import SECOND_NS
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from taskyard.client.client import Client
    from taskyard.pipeline.jobs.load import CheckedCampaign
    from taskyard.pipeline.validate import CriticalPath

#: Of what a document lists: more would fill it with one mistake.
LISTED_MAX: Final = 1000

#: Names of a critical path that a line has; a longer one is cut in the middle.
_NAMES_SHOWN: Final = 6


@click.command(
    cls=SparkCommand,
    epilog=example(
        "pipeline load campaign.parquet --dry-run",
        "pipeline load 'campaigns/*.jsonl.gz' --campaign november",
        "pipeline load big.parquet --master spark://head:7077 --broker tcp://head:6125",
    ),
)
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option("--dry-run", is_flag=True, help="Only look at the files; needs no broker.")
@click.option(
    "--campaign", type=TaskKey("name", "NAME"), help="The campaign's name; the file's if not given."
)
@click.option("--skip-bad", is_flag=True, help="Leave bad rows out, and all that wait for them.")
@click.option(
    "--rejects",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to write what was rejected, as JSONL; beside each file if not given.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice([one.value for one in Format]),
    help="The format, if names and looks do not tell.",
)
@click.option("--replay", is_flag=True, help="WfCommons: sleep as long as a task took.")
@click.option("--speedup", type=float, default=1.0, metavar="N", help="Replay N times as fast.")
@master_option
@broker_options
@click.pass_obj
def load(cli_context: CliContext, /, files: tuple[str, ...], **values: Any) -> ExitCode:  # noqa: ANN401
    """Load graphs of tasks from files, checked by Spark.

    JSONL (also .gz), CSV, Parquet, WfCommons or dwork's comma lines; patterns, and directories with
    all that is in them. All is read and checked first: names that stand twice, unknown
    dependencies, cycles, bad values. What is wrong is written to a file of rejects with its file,
    line and reason; then nothing is submitted and it exits 2, unless --skip-bad leaves it out. The
    rest is submitted from the partitions, level by level. To run it again is harmless, also after
    a kill: nothing is submitted twice.
    """
    from taskyard.pipeline.sources import campaigns  # noqa: PLC0415  # Spark takes long to import

    found = campaigns.find(files)
    form = Format(values["form"]) if values["form"] else None
    campaign = values["campaign"] or _campaign(files, found)
    options = FileOptions(form, values["replay"], values["speedup"], campaign)
    if values["dry_run"]:
        return _dry_run(cli_context, found, options, values)
    with connect_client(cli_context) as client:
        return _load(cli_context, client, found, options, values)


def _campaign(files: Sequence[str], found: Sequence[str]) -> str:
    if len(files) == 1 and (len(found) == 1 or Path(files[0]).is_dir()):
        return default_campaign_name(
            str(Path(files[0]).resolve()) if Path(files[0]).is_dir() else found[0]
        )
    raise UserError(
        f"these are {format_count(len(found), 'file')}; name what they make: --campaign NAME"
    )


def _spark(cli_context: CliContext, master: str) -> Any:  # noqa: ANN401  # a context manager of a session
    from taskyard.pipeline.session import session_scope  # noqa: PLC0415

    cli_context.info(f"starting Spark ({master})")
    return session_scope("taskyard pipeline load", master)


def _read(
    spark: SparkSession, cli_context: CliContext, found: Sequence[str], options: FileOptions
) -> CheckedCampaign:
    from taskyard.pipeline.jobs import load as job  # noqa: PLC0415

    cli_context.info(f"reading {format_count(len(found), 'file')}")
    return job.read(spark, found, options)


def _dry_run(
    cli_context: CliContext, found: list[str], options: FileOptions, values: dict[str, Any]
) -> ExitCode:
    """What there is to say without a broker."""
    with _spark(cli_context, values["master"]) as spark:
        checked = _read(spark, cli_context, found, options)
        checked.revalidate(existing=())
        if cli_context.as_json:
            print_document(_document(checked))
        else:
            _print(found, checked)
        if not checked.rejects:
            return ExitCode.OK
        if not cli_context.as_json:
            print_rejected(checked.rejects)
        wrote = _write(checked, values["rejects"]) if values["rejects"] else ""
        rows = format_count(len(checked.rejects), "bad row")
        if not values["skip_bad"]:
            raise UserError(f"the input has {rows}{wrote}; mend it: nothing was submitted")
        good = format_count(len(checked.validation.places), "task")
        cli_context.info(f"{rows} would be left out{wrote}, {good} submitted")
        return ExitCode.OK


def _load(
    cli_context: CliContext,
    client: Client,
    found: list[str],
    options: FileOptions,
    values: dict[str, Any],
) -> ExitCode:
    from taskyard.pipeline.jobs import load as job  # noqa: PLC0415
    from taskyard.pipeline.submit import make_target  # noqa: PLC0415

    is_empty = not any(client.status()["counts"].values())
    with _spark(cli_context, values["master"]) as spark:
        checked = _read(spark, cli_context, found, options)
        unknown_names = [] if is_empty else list(checked.validation.unknown)
        checked.revalidate(client.known_predecessors(options.campaign, unknown_names))
        _report_rejects(cli_context, checked, values)
        key = cli_context.key or cli_context.settings().broker.key
        campaign = options.campaign
        limit_ns = cli_context.broker_timeout
        timeout = None if limit_ns is None else limit_ns / SECOND_NS
        to = make_target(
            client.broker, str(key) if key else None, campaign, UnknownPolicy.REFUSE, timeout
        )
        if not is_empty:
            cli_context.info("comparing with what the broker knows")
            _check_conflicts(job.conflicts(checked, to))
        _check_lanes(job.unplaced_tasks(checked, to))
        with ProgressBar(cli_context, campaign, verb="submitted") as meter:
            taken = job.submit_all(checked, to, meter.update)
    rejected = len(checked.rejects)
    if cli_context.as_json:
        document = PipelineLoadDocument(
            campaign=campaign, new=taken.new, existing=taken.existing, rejected=rejected
        )
        print_document(document)
    else:
        total = format_count(taken.new + taken.existing, "task")
        click.echo(
            f"campaign {escape_line(campaign)}: {total}: {taken.new:,} new, {taken.existing:,} "
            f"known"
        )
    return ExitCode.OK


def _report_rejects(
    cli_context: CliContext, checked: CheckedCampaign, values: dict[str, Any]
) -> None:
    """Tell and write what was rejected; go on only if that may be left out."""
    if not checked.rejects:
        return
    print_rejected(checked.rejects)
    rows = format_count(len(checked.rejects), "bad row")
    wrote = _write(checked, values["rejects"])
    if not values["skip_bad"]:
        raise UserError(
            f"the input has {rows}{wrote}, so nothing was submitted; mend it, or leave them out "
            "with --skip-bad"
        )
    cli_context.info(f"{rows} left out{wrote}")


def _write(checked: CheckedCampaign, to: Path | None) -> str:
    """Write the rejects. Returns where they are, in words."""
    from taskyard.pipeline.jobs.load import write_rejects  # noqa: PLC0415

    places = write_rejects(checked.rejects, to)
    more = f" and {format_count(len(places) - 1, 'file')} more" if len(places) > 1 else ""
    return f" (see {places[0]}{more})"


def _check_conflicts(conflicts: list[str]) -> None:
    if conflicts:
        print_rejected(conflicts)
        raise Refused(
            f"{format_count(len(conflicts), 'task')} of these names are known, and not the same, "
            f"so "
            "nothing was submitted; give them other names, the right --campaign, or another --state"
        )


def _check_lanes(unplaced: list[str]) -> None:
    if unplaced:
        print_rejected(unplaced)
        raise Refused(
            f"the lane of {format_count(len(unplaced), 'task')} can't be made as the broker's "
            f"settings "
            "say, so nothing was submitted; give them these fields, or a lane of their own"
        )


def _document(checked: CheckedCampaign) -> PipelineLoadDryRunDocument:
    validation = checked.validation
    return PipelineLoadDryRunDocument(
        tasks=validation.tasks,
        edges=validation.edges,
        roots=validation.roots,
        depth=len(validation.sizes),
        width=validation.width,
        widest=validation.widest,
        services=validation.services,
        unknown=dict(list(validation.unknown.items())[:LISTED_MAX]),
        duplicates=validation.duplicates,
        cycles=validation.cycles[:LISTED_MAX],
        critical_path=validation.critical_path.names[:LISTED_MAX],
        critical_path_seconds=validation.critical_path.seconds,
        rejected_rows=len(checked.rejects),
        rejected=[
            BadRow(file=one.file, line=one.line, reason=one.reason)
            for one in checked.rejects[:LISTED_MAX]
        ],
    )


def _print(found: Sequence[str], checked: CheckedCampaign) -> None:
    validation = checked.validation
    services = ", ".join(
        f"{escape_line(name)} {number:,}" for name, number in validation.services.items()
    )
    lines = {
        "tasks": f"{validation.tasks:,}",
        "edges": f"{validation.edges:,}",
        "roots": f"{validation.roots:,}",
        "depth": f"{len(validation.sizes):,}",
        "width": f"{validation.width:,} (on level {validation.widest:,})"
        if validation.width
        else "0",
        "services": services or "none",
        "unknown": f"{len(validation.unknown):,}",
        "duplicates": f"{validation.duplicates:,}",
        "cycles": f"{len(validation.cycles):,}",
        "critical path": _critical_path_text(validation.critical_path),
    }
    more = f" and {format_count(len(found) - 1, 'file')} more" if len(found) > 1 else ""
    click.echo(f"{escape_line(found[0])}{more}")
    for name, value in lines.items():
        click.echo(f"  {name:<13}  {value}")


def _critical_path_text(path: CriticalPath) -> str:
    """How long the longest chain takes, as far as the files tell, and which it is."""
    if not path.names:
        return "none"
    names = [*map(escape_line, path.names)]
    if len(names) > _NAMES_SHOWN:
        half = _NAMES_SHOWN // 2
        names = [*names[:half], f"… {len(names) - 2 * half:,} more …", *names[-half:]]
    takes = "" if path.seconds is None else f", about {format_duration(path.seconds)}"
    return f"{format_count(len(path.names), 'task')}{takes}: {' → '.join(names)}"
