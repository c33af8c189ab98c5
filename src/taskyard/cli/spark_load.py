"""`taskyard load --spark`: check campaign files with Spark and submit them from its partitions."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.campaign.formats import Format
from taskyard.campaign.reader import default_campaign_name, write_rejected
from taskyard.campaign.shell_lines import count_skipped
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import BadRow, PipelineLoadDocument, PipelineLoadDryRunDocument
from taskyard.cli.format import escape_line, format_count, format_duration
from taskyard.cli.options import CliContext
from taskyard.cli.output import print_document
from taskyard.cli.pipeline import require_spark, started_session
from taskyard.cli.progress import ProgressBar
from taskyard.cli.submit import file_options, print_rejected, skipped_text
from taskyard.client import discovery
from taskyard.core.events import UnknownPolicy
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Refusal
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from taskyard.client.internal import InternalClient
    from taskyard.pipeline.jobs.load import CheckedCampaign, OnStage
    from taskyard.pipeline.sources.campaigns import CampaignFiles
    from taskyard.pipeline.submit import Target
    from taskyard.pipeline.validate import CriticalPath

#: The most entries of a list in a document.
LISTED_MAX: Final = 1000

#: The most names of a critical path in a line. A longer path is cut in the middle.
_NAMES_SHOWN: Final = 6


def load_with_spark(
    cli_context: CliContext, files: tuple[str, ...], values: dict[str, Any]
) -> ExitCode:
    """Check files in Spark, and submit their tasks from its partitions.

    All files are checked first for duplicate names, unknown dependencies, cycles and bad values.
    Rejected rows are written to a file. Safe to interrupt and run again.
    """
    require_spark()
    from taskyard.pipeline.jvm import end_jvm_on_signals  # noqa: PLC0415  # imports Spark

    with end_jvm_on_signals():
        return _load_files(cli_context, files, values)


def _load_files(
    cli_context: CliContext, files: tuple[str, ...], values: dict[str, Any]
) -> ExitCode:
    from taskyard.pipeline.sources import campaigns  # noqa: PLC0415  # imports pyarrow

    found = campaigns.find(files, values["form"])
    campaign = values["campaign"] or _campaign(files, found.files)
    options = file_options(campaign, values)
    planned = campaigns.plan(found.files, options)
    if skipped := found.skipped_text():
        cli_context.info(f"skipped {escape_line(skipped)}")
    _report_shell_files(cli_context, planned)
    if values["dry_run"]:
        return _dry_run(cli_context, planned, values)
    with connect_client(cli_context) as client:
        return _load(cli_context, client, planned, values)


def _campaign(files: Sequence[str], found: Sequence[str]) -> str:
    if len(files) == 1 and (len(found) == 1 or Path(files[0]).is_dir()):
        return default_campaign_name(
            str(Path(files[0]).resolve()) if Path(files[0]).is_dir() else found[0]
        )
    raise UserError(
        f"{format_count(len(found), 'file')}: give the name of the campaign with --campaign"
    )


@contextmanager
def _spark(cli_context: CliContext, master: str) -> Iterator[SparkSession]:
    """Yield a session whose machines have Taskyard. A machine without a file names it itself."""
    from taskyard.pipeline import executors  # noqa: PLC0415  # imports Spark

    name, conf = "taskyard load", executors.PYTHON_ONLY
    with started_session(cli_context, name, master, conf=conf) as spark:
        executors.check(spark, master)
        yield spark


def _report_shell_files(cli_context: CliContext, planned: CampaignFiles) -> None:
    for path in planned.shell_files():
        skipped = skipped_text(count_skipped(path))
        more = f" (skipped {skipped})" if skipped else ""
        cli_context.info(f"{escape_line(path)}: {Format.SHELL.title}{more}")


def _stage_lines(cli_context: CliContext, planned: CampaignFiles) -> OnStage:
    """Return the function that prints a line for each stage before the submission."""
    files = format_count(len(planned.files), "file")

    def show(stage: str, _done: int, total: int | None) -> None:
        cli_context.info(f"{stage} {format_count(total, 'row') if total else files}")

    return show


def _dry_run(cli_context: CliContext, planned: CampaignFiles, values: dict[str, Any]) -> ExitCode:
    """Check the files without a broker."""
    from taskyard.pipeline.jobs import load as job  # noqa: PLC0415

    on_stage = _stage_lines(cli_context, planned)
    with _spark(cli_context, values["spark"]) as spark:
        checked = job.read(spark, planned, on_stage=on_stage)
        checked.revalidate(existing=())
        if cli_context.as_json:
            print_document(_document(checked))
        else:
            _print(planned.files, checked)
        if not checked.rejects:
            return ExitCode.OK
        if not cli_context.as_json:
            print_rejected(checked.rejects)
        wrote = _write(checked, values["rejects"]) if values["rejects"] else ""
        rows = format_count(len(checked.rejects), "bad row")
        if not values["skip_bad"]:
            raise UserError(f"the input has {rows}{wrote}, nothing submitted")
        good = format_count(len(checked.validation.rows), "task")
        cli_context.info(f"{rows} would be skipped{wrote} and {good} submitted")
        return ExitCode.OK


def _load(
    cli_context: CliContext, client: InternalClient, planned: CampaignFiles, values: dict[str, Any]
) -> ExitCode:
    from taskyard.pipeline.jobs import load as job  # noqa: PLC0415

    is_empty = not any(client.status()["counts"].values())
    campaign = planned.options.campaign
    target_now = _target_now(cli_context, client, campaign)
    on_stage = _stage_lines(cli_context, planned)
    with _spark(cli_context, values["spark"]) as spark:
        checked = job.read(spark, planned, target_now(), on_stage)
        checked.revalidate(client.known_predecessors(campaign, list(checked.validation.unknown)))
        _report_rejects(cli_context, checked, values)
        target = target_now()  # durations start after the checks
        if not is_empty:
            _check_conflicts(job.conflicts(checked, target, on_stage))
        with ProgressBar(cli_context, campaign, participle="submitted") as bar:
            taken = job.submit_all(
                checked, target, lambda _stage, done, total: bar.update(done, total)
            )
    rejected = len(checked.rejects)
    if cli_context.as_json:
        document = PipelineLoadDocument(
            campaign=campaign, new=taken.new, existing=taken.existing, rejected=rejected
        )
        print_document(document)
    else:
        total = format_count(taken.new + taken.existing, "task")
        click.echo(
            f"campaign {escape_line(campaign)}: {total}: {taken.new:,} new, "
            f"{taken.existing:,} existing"
        )
    return ExitCode.OK


def _target_now(
    cli_context: CliContext, client: InternalClient, campaign: str
) -> Callable[[], Target]:
    """Return the function that returns the broker for the executors, with durations from now on."""
    from taskyard.pipeline.submit import make_target  # noqa: PLC0415

    key = _key_file(cli_context)
    limit_ns = cli_context.broker_timeout
    timeout = None if limit_ns is None else limit_ns / SECOND_NS
    unknown = UnknownPolicy.REFUSE
    path = str(key.absolute()) if key else None
    return partial(make_target, client.broker, path, campaign, unknown, timeout)


def _key_file(cli_context: CliContext) -> Path | None:
    """Return the key file of a client's broker, for the executors."""
    return cli_context.key or discovery.configured_key_file(cli_context.settings())


def _report_rejects(
    cli_context: CliContext, checked: CheckedCampaign, values: dict[str, Any]
) -> None:
    """Print and write rejected rows. Raise `UserError` unless they may be skipped."""
    if not checked.rejects:
        return
    print_rejected(checked.rejects)
    rows = format_count(len(checked.rejects), "bad row")
    wrote = _write(checked, values["rejects"])
    if not values["skip_bad"]:
        raise UserError(f"the input has {rows}{wrote}, nothing submitted (--skip-bad skips them)")
    cli_context.info(f"{rows} skipped{wrote}")


def _write(checked: CheckedCampaign, to: Path | None) -> str:
    """Write the rejected rows. Return a hint where they are."""
    paths = write_rejected(checked.rejects, to)
    more = f" and {format_count(len(paths) - 1, 'file')} more" if len(paths) > 1 else ""
    return f" (see {paths[0]}{more})"


def _check_conflicts(conflicts: list[str]) -> None:
    if conflicts:
        print_rejected(conflicts)
        raise Refused(
            f"{format_count(len(conflicts), 'task')} refused, nothing submitted (give other names, "
            "another --campaign or another --state)",
            Refusal.CONFLICT.value,
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
    """Format the critical path with its run time, if known."""
    if not path.names:
        return "none"
    names = [*map(escape_line, path.names)]
    if len(names) > _NAMES_SHOWN:
        half = _NAMES_SHOWN // 2
        names = [*names[:half], f"… {len(names) - 2 * half:,} more …", *names[-half:]]
    takes = "" if path.seconds is None else f", about {format_duration(path.seconds)}"
    return f"{format_count(len(path.names), 'task')}{takes}: {' → '.join(names)}"
