"""Files of tasks: reading and checking them, and loading them into a running broker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from taskyard.campaign.formats import FileOptions
from taskyard.campaign.lines import InvalidCampaign
from taskyard.campaign.reader import (
    LoadedCampaign,
    default_campaign_name,
    read_campaign,
    reject_unknown_dependencies,
    write_rejected,
)
from taskyard.campaign.submitter import submit_campaign
from taskyard.cli.connection import connect_client
from taskyard.cli.documents import BadLine, LoadDocument, LoadDryRunDocument, LoadWaitDocument
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.options import CliContext
from taskyard.cli.output import print_document
from taskyard.cli.progress import ProgressBar
from taskyard.cli.task_options import task_keys
from taskyard.cli.wait import report, wait_for, wait_target
from taskyard.core.events import UnknownPolicy
from taskyard.errors import ExitCode, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.campaign.reader import RejectedRow
    from taskyard.campaign.shell_lines import SkippedLines

#: Bad lines that are printed. The others are counted, and --skip-bad writes them all.
REJECTED_SHOWN_MAX: Final = 20

#: The most rejected lines in a document.
REJECTED_LISTED_MAX: Final = 1000


def load_file(cli_context: CliContext, file: str, values: dict[str, Any]) -> ExitCode:
    """Load the tasks of a file into a running broker, or only check the file."""
    campaign = values["campaign"] or default_campaign_name(file)
    options = file_options(campaign, values)
    if values["dry_run"]:
        return _dry_run(cli_context, file, options, values)
    return _load(cli_context, file, campaign, options, values)


def file_options(campaign: str, values: dict[str, Any]) -> FileOptions:
    """Return how a file is read, with the defaults of its tasks. Raises `UserError`."""
    speedup = values["speedup"]
    if speedup is not None and not values["replay"]:
        raise UserError("--speedup: needs --replay")
    return FileOptions(
        format=values["form"],
        replay=values["replay"],
        speedup=1.0 if speedup is None else speedup,
        campaign=campaign,
        defaults=task_keys(values),
    )


def _load(
    cli_context: CliContext, file: str, campaign: str, options: FileOptions, values: dict[str, Any]
) -> ExitCode:
    loaded = read_or_report(cli_context, file, options, skip_bad=values["skip_bad"])
    unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    with connect_client(cli_context) as client:
        with ProgressBar(cli_context, file, participle="submitted") as bar:
            done = submit_campaign(
                *(client, loaded, campaign),
                unknown=unknown,
                on_rejected=partial(report_rejected, file, skip_bad=values["skip_bad"]),
                progress=bar.update,
            )
        if done.unnumbered:
            cli_context.warn(done.unnumbered)
        existing = sum(done.existing.values())
        if not cli_context.as_json or values["wait"]:
            total = format_count(done.new + existing, "task")
            click.echo(
                f"campaign {campaign}: {total}: {done.new:,} new, {existing:,} existing",
                err=values["wait"] or cli_context.as_json,
            )
        if values["wait"]:
            cli_context.interrupt_message = (
                f"interrupted; the tasks continue: `taskyard wait --campaign {campaign}`"
            )
            target = wait_target(client, campaign=campaign)
            settled = wait_for(cli_context, target)
            document = LoadWaitDocument(
                campaign=campaign,
                new=done.new,
                existing=existing,
                settled=settled,
                counts=target.counts,
                behind_failure=target.behind_failure,
            )
            report(cli_context, target, document)
            return target.exit_code()
    if cli_context.as_json:
        print_document(LoadDocument(campaign=campaign, new=done.new, existing=existing))
    return ExitCode.OK


def _dry_run(
    cli_context: CliContext, file: str, options: FileOptions, values: dict[str, Any]
) -> ExitCode:
    """Check a file without a broker."""
    loaded = read_campaign(file, options)
    good = loaded if values["wait_for_unknown"] else _without_unknown_dependencies(loaded)
    if cli_context.as_json:
        document = LoadDryRunDocument(
            file=loaded.file,
            format=loaded.choice.format.value,
            skipped_blank=loaded.skipped.blank,
            skipped_comments=loaded.skipped.comments,
            **msgspec.structs.asdict(loaded.summary),
            rejected_lines=len(good.rejected),
            rejected=[
                BadLine(line=one.line, reason=one.reason)
                for one in good.rejected[:REJECTED_LISTED_MAX]
            ],
        )
        print_document(document)
    else:
        _print_summary(loaded)
        print_rejected(good.rejected)
    if not good.rejected:
        return ExitCode.OK
    explain_format(good)
    lines = format_count(len(good.rejected), "bad line")
    if not values["skip_bad"]:
        raise UserError(f"{file}: {lines}, nothing submitted")
    cli_context.info(
        f"{lines} would be skipped and {format_count(len(good.specs), 'task')} submitted"
    )
    return ExitCode.OK


def _without_unknown_dependencies(loaded: LoadedCampaign) -> LoadedCampaign:
    """Reject tasks with dependencies that the file does not define."""
    names = [one.name for one in loaded.summary.unknown]
    return reject_unknown_dependencies(loaded, names) if names else loaded


def _print_summary(loaded: LoadedCampaign) -> None:
    summary = loaded.summary
    services = ", ".join(
        f"{escape_line(name)} {number:,}" for name, number in summary.services.items()
    )
    lines = {
        "tasks": f"{summary.tasks:,}",
        "edges": f"{summary.edges:,}",
        "roots": f"{summary.roots:,}",
        "depth": f"{summary.depth:,}",
        "width": f"{summary.width:,} (on level {summary.widest:,})" if summary.width else "0",
        "services": services or "none",
        "unknown": f"{len(summary.unknown):,}",
        "duplicates": f"{len(summary.duplicates):,}",
        "cycles": f"{len(summary.cycles):,}",
    }
    if skipped := skipped_text(loaded.skipped):
        lines["skipped"] = skipped
    title = "" if _is_named_by_suffix(loaded) else f": {loaded.choice.format.title}"
    click.echo(f"{escape_line(loaded.file)}{title}")
    for name, value in lines.items():
        click.echo(f"  {name:<10}  {value}")


# Bad lines.


def read_or_report(
    cli_context: CliContext, file: str, options: FileOptions, *, skip_bad: bool = False
) -> LoadedCampaign:
    """Read a campaign, and print its format and its bad lines.

    Bad lines are an error unless `skip_bad` is given.
    """
    loaded = read_campaign(file, options)
    if not loaded.specs and not loaded.rejected:
        raise UserError(f"{file}: no tasks in it ({_nothing(loaded)})")
    if loaded.rejected:
        explain_format(loaded)
        report_rejected(file, loaded.rejected, loaded.rejected, skip_bad=skip_bad)
    if not _is_named_by_suffix(loaded):
        cli_context.info(_format_line(loaded))
    return loaded


def _nothing(loaded: LoadedCampaign) -> str:
    """Return why a file has no tasks."""
    skipped = skipped_text(loaded.skipped)
    return f"skipped {skipped}" if skipped else "it is empty"


def _is_named_by_suffix(loaded: LoadedCampaign) -> bool:
    """Return whether the file's own name has its format, so that no message needs it."""
    return bool(loaded.choice.reason) and not loaded.choice.by_content


def explain_format(loaded: LoadedCampaign) -> None:
    """Print why a file with bad lines was read as this format, unless that is beyond doubt."""
    choice = loaded.choice
    if choice.reason and (choice.by_content or not loaded.specs):
        click.echo(f"{escape_line(loaded.file)}: {choice.explanation()}", err=True)


def _format_line(loaded: LoadedCampaign) -> str:
    """Return the format, the tasks and the skipped lines: `cmds.txt: shell commands, 5 tasks`."""
    tasks = format_count(len(loaded.specs), "task")
    skipped = skipped_text(loaded.skipped)
    more = f" (skipped {skipped})" if skipped else ""
    return f"{escape_line(loaded.file)}: {loaded.choice.format.title}, {tasks}{more}"


def skipped_text(skipped: SkippedLines) -> str:
    """Return the numbers of skipped lines. Empty if there are none."""
    numbers = ((skipped.blank, "blank line"), (skipped.comments, "comment"))
    return " and ".join(format_count(number, word) for number, word in numbers if number)


def report_rejected(
    file: str,
    rejected: Sequence[RejectedRow],
    all_rejected: Sequence[RejectedRow],
    *,
    skip_bad: bool,
) -> None:
    """Print rejected rows. With `skip_bad`, write all of them beside the file, else raise."""
    print_rejected(rejected)
    lines = format_count(len(rejected), "bad line")
    if not skip_bad:
        raise InvalidCampaign(f"{file}: {lines}, nothing submitted (--skip-bad leaves them out)")
    (path,) = write_rejected(all_rejected)
    click.echo(f"{lines} left out, see {path}", err=True)


def print_rejected(rejected: Sequence[object]) -> None:
    """Print the first rejected rows, and how many more there are."""
    for one in rejected[:REJECTED_SHOWN_MAX]:
        click.echo(escape_line(str(one)), err=True)
    if len(rejected) > REJECTED_SHOWN_MAX:
        click.echo(f"… and {len(rejected) - REJECTED_SHOWN_MAX:,} more", err=True)
