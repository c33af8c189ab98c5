"""`taskyard pipeline load`: campaigns' files, checked by Spark, submitted from its partitions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from taskyard.cli.connecting import connected
from taskyard.cli.loading import campaign_of, print_bad
from taskyard.cli.options import Talk, broker_options
from taskyard.cli.pipeline import SparkVerb, master_option
from taskyard.cli.printing import example, print_document
from taskyard.cli.progress import Meter
from taskyard.cli.task_options import TaskKey
from taskyard.cli.words import count, plain, span
from taskyard.client.campaign.formats import Format, Options
from taskyard.core.events import UnknownPolicy
from taskyard.core.limits import SECOND_NS
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from taskyard.client.client import Client
    from taskyard.pipeline.jobs.load import Checked
    from taskyard.pipeline.judging import Path as CriticalPath

#: Of what a document lists: more would fill it with one mistake.
LISTED_MAX: Final = 1000

#: Names of a critical path that a line has; a longer one is cut in the middle.
_NAMES_SHOWN: Final = 6


@click.command(
    cls=SparkVerb,
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
def load(talk: Talk, /, files: tuple[str, ...], **given: Any) -> ExitCode:  # noqa: ANN401
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
    form = Format(given["form"]) if given["form"] else None
    campaign = given["campaign"] or _campaign(files, found)
    options = Options(form, given["replay"], given["speedup"], campaign)
    if given["dry_run"]:
        return _look(talk, found, options, given)
    with connected(talk) as client:
        return _load(talk, client, found, options, given)


def _campaign(files: Sequence[str], found: Sequence[str]) -> str:
    if len(files) == 1 and (len(found) == 1 or Path(files[0]).is_dir()):
        return campaign_of(str(Path(files[0]).resolve()) if Path(files[0]).is_dir() else found[0])
    raise UserError(f"these are {count(len(found), 'file')}; name what they make: --campaign NAME")


def _spark(talk: Talk, master: str) -> Any:  # noqa: ANN401  # a context manager of a session
    from taskyard.pipeline.session import borrowed  # noqa: PLC0415

    talk.say(f"starting Spark ({master})")
    return borrowed("taskyard pipeline load", master)


def _read(spark: SparkSession, talk: Talk, found: Sequence[str], options: Options) -> Checked:
    from taskyard.pipeline.jobs import load as job  # noqa: PLC0415

    talk.say(f"reading {count(len(found), 'file')}")
    return job.read(spark, found, options)


def _look(talk: Talk, found: list[str], options: Options, given: dict[str, Any]) -> ExitCode:
    """What there is to say without a broker."""
    with _spark(talk, given["master"]) as spark:
        checked = _read(spark, talk, found, options)
        checked.judge_again(known=())
        if talk.as_json:
            print_document("pipeline load", **_document(checked))
        else:
            _print(found, checked)
        if not checked.rejects:
            return ExitCode.GOOD
        if not talk.as_json:
            print_bad(checked.rejects)
        wrote = _write(checked, given["rejects"]) if given["rejects"] else ""
        rows = count(len(checked.rejects), "bad row")
        if not given["skip_bad"]:
            raise UserError(f"the input has {rows}{wrote}; mend it: nothing was submitted")
        good = count(len(checked.judged.places), "task")
        talk.say(f"{rows} would be left out{wrote}, {good} submitted")
        return ExitCode.GOOD


def _load(
    talk: Talk, client: Client, found: list[str], options: Options, given: dict[str, Any]
) -> ExitCode:
    from taskyard.client.steering import known_predecessors  # noqa: PLC0415
    from taskyard.pipeline.jobs import load as job  # noqa: PLC0415
    from taskyard.pipeline.submitting import target  # noqa: PLC0415

    is_empty = not any(client.status()["counts"].values())
    with _spark(talk, given["master"]) as spark:
        checked = _read(spark, talk, found, options)
        strangers = [] if is_empty else list(checked.judged.unknown)
        checked.judge_again(known_predecessors(client, options.campaign, strangers))
        _settle_rejects(talk, checked, given)
        key = talk.key or talk.settings().broker.key
        campaign = options.campaign
        limit_ns = talk.broker_timeout
        timeout = None if limit_ns is None else limit_ns / SECOND_NS
        to = target(
            client.broker, str(key) if key else None, campaign, UnknownPolicy.REFUSE, timeout
        )
        if not is_empty:
            talk.say("comparing with what the broker knows")
            _check_conflicts(job.conflicts(checked, to))
        _check_lanes(job.unplaced_tasks(checked, to))
        with Meter(talk, campaign, verb="submitted") as meter:
            taken = job.submit_all(checked, to, meter.update)
    rejected = len(checked.rejects)
    if talk.as_json:
        counts = {"new": taken.new, "known": taken.known, "rejected": rejected}
        print_document("pipeline load", campaign=campaign, **counts)
    else:
        total = count(taken.new + taken.known, "task")
        click.echo(f"campaign {plain(campaign)}: {total}: {taken.new:,} new, {taken.known:,} known")
    return ExitCode.GOOD


def _settle_rejects(talk: Talk, checked: Checked, given: dict[str, Any]) -> None:
    """Tell and write what was rejected; go on only if that may be left out."""
    if not checked.rejects:
        return
    print_bad(checked.rejects)
    rows = count(len(checked.rejects), "bad row")
    wrote = _write(checked, given["rejects"])
    if not given["skip_bad"]:
        raise UserError(
            f"the input has {rows}{wrote}, so nothing was submitted; mend it, or leave them out "
            "with --skip-bad"
        )
    talk.say(f"{rows} left out{wrote}")


def _write(checked: Checked, to: Path | None) -> str:
    """Write the rejects. Returns where they are, in words."""
    from taskyard.pipeline.jobs.load import write_rejects  # noqa: PLC0415

    places = write_rejects(checked.rejects, to)
    more = f" and {count(len(places) - 1, 'file')} more" if len(places) > 1 else ""
    return f" (see {places[0]}{more})"


def _check_conflicts(conflicts: list[str]) -> None:
    if conflicts:
        print_bad(conflicts)
        raise Refused(
            f"{count(len(conflicts), 'task')} of these names are known, and not the same, so "
            "nothing was submitted; give them other names, the right --campaign, or another --state"
        )


def _check_lanes(unplaced: list[str]) -> None:
    if unplaced:
        print_bad(unplaced)
        raise Refused(
            f"the lane of {count(len(unplaced), 'task')} can't be made as the broker's settings "
            "say, so nothing was submitted; give them these fields, or a lane of their own"
        )


def _document(checked: Checked) -> dict[str, Any]:
    judged = checked.judged
    return {
        "tasks": judged.tasks,
        "edges": judged.edges,
        "roots": judged.roots,
        "depth": len(judged.sizes),
        "width": judged.width,
        "widest": judged.widest,
        "services": judged.services,
        "unknown": dict(list(judged.unknown.items())[:LISTED_MAX]),
        "duplicates": judged.duplicates,
        "cycles": judged.cycles[:LISTED_MAX],
        "critical_path": judged.critical_path.names[:LISTED_MAX],
        "critical_path_seconds": judged.critical_path.seconds,
        "bad_rows": len(checked.rejects),
        "bad": [
            {"file": one.file, "line": one.line, "reason": one.reason}
            for one in checked.rejects[:LISTED_MAX]
        ],
    }


def _print(found: Sequence[str], checked: Checked) -> None:
    judged = checked.judged
    services = ", ".join(f"{plain(name)} {number:,}" for name, number in judged.services.items())
    lines = {
        "tasks": f"{judged.tasks:,}",
        "edges": f"{judged.edges:,}",
        "roots": f"{judged.roots:,}",
        "depth": f"{len(judged.sizes):,}",
        "width": f"{judged.width:,} (on level {judged.widest:,})" if judged.width else "0",
        "services": services or "none",
        "unknown": f"{len(judged.unknown):,}",
        "duplicates": f"{judged.duplicates:,}",
        "cycles": f"{len(judged.cycles):,}",
        "critical path": _path_text(judged.critical_path),
    }
    more = f" and {count(len(found) - 1, 'file')} more" if len(found) > 1 else ""
    click.echo(f"{plain(found[0])}{more}")
    for name, value in lines.items():
        click.echo(f"  {name:<13}  {value}")


def _path_text(path: CriticalPath) -> str:
    """How long the longest chain takes, as far as the files tell, and which it is."""
    if not path.names:
        return "none"
    names = [*map(plain, path.names)]
    if len(names) > _NAMES_SHOWN:
        half = _NAMES_SHOWN // 2
        names = [*names[:half], f"… {len(names) - 2 * half:,} more …", *names[-half:]]
    takes = "" if path.seconds is None else f", about {span(path.seconds)}"
    return f"{count(len(path.names), 'task')}{takes}: {' → '.join(names)}"
