"""`taskyard load`: a graph of tasks from a file, or a look at it without a broker."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from taskyard.cli import loading
from taskyard.cli.connecting import connected
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.printing import example, print_document
from taskyard.cli.progress import Meter
from taskyard.cli.task_options import TaskKey
from taskyard.cli.waiting import group_of, report, wait_for
from taskyard.cli.words import count, plain
from taskyard.client.campaign.formats import Format, Options
from taskyard.client.campaign.read import Loaded, read_campaign, reject_strangers
from taskyard.core.events import UnknownPolicy
from taskyard.errors import ExitCode, UserError

#: Bad lines in a document: more would fill it with one mistake.
BAD_LISTED_MAX: Final = 1000


@click.command(
    epilog=example(
        "load campaign.jsonl --dry-run",
        "load campaign.jsonl --wait",
        "load workflow.json --replay --speedup 100",
    )
)
@click.argument("file")
@click.option("--dry-run", is_flag=True, help="Only look at the file; needs no broker.")
@click.option(
    "--campaign", type=TaskKey("name", "NAME"), help="The campaign's name; the file's if not given."
)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out, and write them beside FILE.")
@click.option(
    "--format",
    "form",
    type=click.Choice([one.value for one in Format]),
    help="The format, if its name and look do not tell.",
)
@click.option("--replay", is_flag=True, help="WfCommons: sleep as long as a task took.")
@click.option("--speedup", type=float, default=1.0, metavar="N", help="Replay N times as fast.")
@click.option("--wait", is_flag=True, help="Wait until all of it is settled.")
@click.option(
    "--wait-for-unknown",
    is_flag=True,
    help="Take tasks that wait for names which nobody has submitted yet.",
)
@broker_options
@click.pass_obj
def load(talk: Talk, /, file: str, campaign: str | None, **given: Any) -> ExitCode:  # noqa: ANN401
    """Load a graph of tasks from a file.

    JSONL, CSV, Parquet, WfCommons or dwork's comma lines; - is JSONL from stdin. The file is read
    and checked whole first. If something is wrong with it, each bad line is told as `FILE:LINE:
    reason`, nothing is submitted, and it exits 2. To load the same file again is harmless.
    """
    form = Format(given["form"]) if given["form"] else None
    campaign = campaign or loading.campaign_of(file)
    options = Options(form, given["replay"], given["speedup"], campaign)
    if given["dry_run"]:
        return _look(talk, file, options, given)
    return _load(talk, file, campaign, options, given)


def _load(
    talk: Talk, file: str, campaign: str, options: Options, given: dict[str, Any]
) -> ExitCode:
    loaded = loading.read(file, options, skip_bad=given["skip_bad"])
    unknown = UnknownPolicy.WAIT if given["wait_for_unknown"] else UnknownPolicy.REFUSE
    with connected(talk) as client:
        with Meter(talk, file, verb="submitted") as meter:
            done = loading.submit(
                *(client, loaded, campaign),
                skip_bad=given["skip_bad"],
                unknown=unknown,
                progress=meter.update,
            )
        known = sum(done.known.values())
        if not talk.as_json or given["wait"]:
            total = count(done.new + known, "task")
            click.echo(
                f"campaign {campaign}: {total}: {done.new:,} new, {known:,} known",
                err=given["wait"] or talk.as_json,
            )
        if given["wait"]:
            talk.interrupted = f"interrupted; it goes on: `taskyard wait --campaign {campaign}`"
            group = group_of(client, campaign=campaign)
            settled = wait_for(talk, group)
            more = {"campaign": campaign, "new": done.new, "known": known}
            report(talk, "load", group, settled=settled, **more)
            return group.exit_code()
    if talk.as_json:
        print_document("load", campaign=campaign, new=done.new, known=known)
    return ExitCode.GOOD


def _look(talk: Talk, file: str, options: Options, given: dict[str, Any]) -> ExitCode:
    """Say what there is to say about a file without a broker."""
    loaded = read_campaign(file, options)
    good = loaded if given["wait_for_unknown"] else _without_strangers(loaded)
    if talk.as_json:
        survey = msgspec.to_builtins(loaded.survey)
        listed = [{"line": one.line, "reason": one.reason} for one in good.bad[:BAD_LISTED_MAX]]
        print_document("load", file=loaded.file, **survey, bad_lines=len(good.bad), bad=listed)
    else:
        _print_survey(loaded)
        loading.print_bad(good.bad)
    if not good.bad:
        return ExitCode.GOOD
    lines = count(len(good.bad), "bad line")
    if not given["skip_bad"]:
        raise UserError(f"{file} has {lines}; mend them: nothing was submitted")
    talk.say(f"{lines} would be left out, {count(len(good.specs), 'task')} submitted")
    return ExitCode.GOOD


def _without_strangers(loaded: Loaded) -> Loaded:
    """Names that the file does not have are as bad, as far as can be seen without a broker."""
    names = [stranger.name for stranger in loaded.survey.unknown]
    return reject_strangers(loaded, names) if names else loaded


def _print_survey(loaded: Loaded) -> None:
    survey = loaded.survey
    services = ", ".join(f"{plain(name)} {number:,}" for name, number in survey.services.items())
    lines = {
        "tasks": f"{survey.tasks:,}",
        "edges": f"{survey.edges:,}",
        "roots": f"{survey.roots:,}",
        "depth": f"{survey.depth:,}",
        "width": f"{survey.width:,} (on level {survey.widest:,})" if survey.width else "0",
        "services": services or "none",
        "unknown": f"{len(survey.unknown):,}",
        "duplicates": f"{len(survey.duplicates):,}",
        "cycles": f"{len(survey.cycles):,}",
    }
    click.echo(plain(loaded.file))
    for name, value in lines.items():
        click.echo(f"  {name:<10}  {value}")
