"""Submission to a running broker: a file of tasks, one task, or one payload for many recipients.

Files are read and checked here for `run` too, and their bad lines are printed.
"""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.formats import FileOptions
from taskyard.campaign.lines import InvalidCampaign, file_label
from taskyard.campaign.reader import (
    LoadedCampaign,
    default_campaign_name,
    read_campaign,
    reject_unknown_dependencies,
    write_rejected,
)
from taskyard.campaign.submitter import BatchSubmitter, submit_campaign
from taskyard.campaign.task_spec import InvalidTask, check_task
from taskyard.campaign.values import shown
from taskyard.cli import documents, task_options
from taskyard.cli.connection import connect_client, stream_parts, whole_result
from taskyard.cli.format import escape_line, format_count
from taskyard.cli.input_rows import rows
from taskyard.cli.options import CliContext
from taskyard.cli.output import (
    OutputDirectory,
    print_document,
    result_fields,
    warn_if_truncated,
    write_bytes,
    write_result,
)
from taskyard.cli.progress import ProgressBar
from taskyard.cli.templates import InputRow
from taskyard.cli.wait import report, wait_for, wait_target
from taskyard.client import submit
from taskyard.core.events import UnknownPolicy
from taskyard.core.identity import spelling
from taskyard.core.states import TaskState
from taskyard.errors import ExitCode, Refused, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from taskyard.campaign.reader import RejectedRow
    from taskyard.campaign.shell_lines import SkippedLines
    from taskyard.client.internal import InternalClient

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
        defaults=task_options.task_keys(values),
    )


def _load(
    cli_context: CliContext, file: str, campaign: str, options: FileOptions, values: dict[str, Any]
) -> ExitCode:
    loaded = read_or_report(cli_context, file, options, skip_bad=values["skip_bad"])
    unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    with connect_client(cli_context) as client:
        with ProgressBar(cli_context, file, participle="submitted") as bar:
            done = submit_campaign(
                client,
                loaded,
                campaign,
                unknown=unknown,
                on_rejected=partial(report_rejected, file, skip_bad=values["skip_bad"]),
                progress=bar.update,
            )
        for warning in done.warnings:
            cli_context.warn(warning)
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
            document = documents.LoadWaitDocument(
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
        print_document(documents.LoadDocument(campaign=campaign, new=done.new, existing=existing))
    return ExitCode.OK


def _dry_run(
    cli_context: CliContext, file: str, options: FileOptions, values: dict[str, Any]
) -> ExitCode:
    """Check a file without a broker."""
    loaded = read_campaign(file, options)
    good = loaded if values["wait_for_unknown"] else _without_unknown_dependencies(loaded)
    if cli_context.as_json:
        document = documents.LoadDryRunDocument(
            file=loaded.file,
            format=loaded.choice.format.value,
            skipped_blank=loaded.skipped.blank,
            skipped_comments=loaded.skipped.comments,
            **msgspec.structs.asdict(loaded.summary),
            rejected_lines=len(good.rejected),
            rejected=[
                documents.BadLine(line=one.line, reason=one.reason)
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


def submit_task(cli_context: CliContext, argv: tuple[str, ...], values: dict[str, Any]) -> ExitCode:
    """Submit a task and print its name, or with --wait its result."""
    name, output = values["name"], values["output"]
    campaign = values["campaign"] or ""
    if output is not None and not values["wait"]:
        raise UserError("--output: needs --wait")
    if name == "--":
        raise UserError("--name: missing value before --")
    raw = {
        "name": name or f"{campaign or 'task'}-{secrets.token_hex(8)}",
        **task_options.task_keys(values),
    }
    spec = check_task(raw | _work(argv, values), campaign)
    is_warned = task_options.warn_unused_stdin(cli_context, values)
    unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    with connect_client(cli_context) as client:
        submission = encode_batch([spec], campaign.encode(), time.time_ns())
        name = spelling(campaign, spec.name)
        try:
            new = BatchSubmitter(client, unknown).create(submission, values["after_campaign"])
        except Refused as refused:
            raise task_options.explain_refusal(
                refused, f"task {name}", values, "--name"
            ) from refused
        if not new and not cli_context.quiet:
            view = client.existing([name]).get(name, {})
            hint = _CANCELLED if view.get("state") == "cancelled" else ""
            click.echo(f"task {name} exists already: nothing submitted{hint}", err=True)
        if values["wait"]:
            code = _wait(cli_context, client, spec.name, campaign)
            if output is not None:
                _write_output(cli_context, client, output, name)
            if not is_warned:
                task_options.warn_unused_stdin(
                    cli_context, values
                )  # a slow producer may have written meanwhile
            return code
    if cli_context.as_json:
        print_document(documents.SubmitDocument(name=spec.name, campaign=campaign, new=bool(new)))
    else:
        click.echo(name)
    return ExitCode.OK


#: `submit` leaves a cancelled task as it is.
_CANCELLED: Final = " (it is cancelled: `taskyard run` with the same words runs it again)"


def _work(argv: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a task that define its work."""
    task_options.check_one_work(argv, values)
    if values["call"] is not None:
        return {"call": values["call"], "args": task_options.parse_call_arguments(argv)}
    if values["payload"] is not None:
        return {"payload": task_options.read_payload_option(values["payload"])}
    return {"argv": list(argv)}


def _wait(
    cli_context: CliContext, client: InternalClient, own_name: str, campaign: str
) -> ExitCode:
    name = spelling(campaign, own_name)
    cli_context.interrupt_message = f"interrupted; task {name} continues: `taskyard wait {name}`"
    state = client.wait_names([name])[name]
    result = client.kept_result(name) if state is TaskState.DONE else None
    is_long = result is not None and result.blob is not None
    if is_long and not cli_context.as_json:
        for part in stream_parts(client, name):
            write_bytes(part)
        return ExitCode.OK
    if is_long:
        result = whole_result(client, name)
    if cli_context.as_json:
        fields: dict[str, Any] = {"reason": client.why(name)}
        if result is not None:
            fields = result_fields(result)
        document = documents.SubmitWaitDocument(
            name=own_name, campaign=campaign, state=state.name.lower(), **fields
        )
        print_document(document)
    elif result is not None:
        write_result(result.text)
    else:
        click.echo(f"taskyard: task {name}: {client.why(name)}", err=True)
    return exit_code_of(state) if result is None else warn_if_truncated(name, result)


def _write_output(cli_context: CliContext, client: InternalClient, output: str, name: str) -> None:
    with OutputDirectory(cli_context, client, Path(output)) as directory:
        directory.write(name)


def exit_code_of(state: TaskState) -> ExitCode:
    """Return the exit code for the state of a settled task."""
    if state is TaskState.DONE:
        return ExitCode.OK
    return ExitCode.CANCELLED if state is TaskState.CANCELLED else ExitCode.TASK_FAILED


#: File suffixes whose rows have fields. In other files a recipient is a line.
_KINDS: Final = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def submit_bundle(
    cli_context: CliContext, argv: tuple[str, ...], values: dict[str, Any]
) -> ExitCode:
    """Submit one payload for many recipients, and print the bundle's name."""
    _check(argv, values)
    given = [
        InputRow(number, f"--to {one}", one, one) for number, one in enumerate(values["to"], 1)
    ]
    path = values["to_file"]
    recipients = [*given, *(rows(_recipient_format(path), path) if path is not None else ())]
    bundle_spec = _bundle_spec(recipients, path or "--to", values["name"], values)
    with connect_client(cli_context) as client:
        new = _create(client, bundle_spec, recipients)
        if not new and not cli_context.quiet:
            message = f"bundle {escape_line(bundle_spec.name)} exists already: nothing submitted"
            click.echo(message, err=True)
        tasks = len(bundle_spec.specs)
        if values["wait"]:
            return _wait_for_bundle(cli_context, client, bundle_spec, new=new)
    if cli_context.as_json:
        document = documents.BundleDocument(
            name=bundle_spec.name, campaign=bundle_spec.campaign, tasks=tasks, new=new
        )
        print_document(document)
    else:
        cli_context.info(f"{format_count(tasks, 'task')}, {new:,} new")
        click.echo(bundle_spec.name)
    return ExitCode.OK


#: Options of commands, which the same payload for many recipients has none of.
_OF_COMMANDS: Final = (
    *("call", "cwd", "env", "inputs", "outputs", "final_exit_status", "output", "after_campaign"),
)


def _check(argv: tuple[str, ...], values: dict[str, Any]) -> None:
    """Raise `UserError` for options that a bundle can't have."""
    given = [f"--{key.replace('_', '-')}" for key in _OF_COMMANDS if values[key]]
    if argv or given:
        problem = given[0] if given else shown(argv[0])
        raise UserError(f"{problem}: --to and --to-file need --payload, and no command")


def _recipient_format(path: str) -> str:
    """Return the format of a recipients file by its suffix."""
    return _KINDS.get(Path(path.lower().removesuffix(".gz")).suffix, "lines")


def _bundle_spec(
    recipients: Sequence[InputRow], path: str, name: str | None, values: dict[str, Any]
) -> submit.BundleSpec:
    if values["payload"] is None:
        raise UserError("missing payload: give --payload TEXT or --payload @FILE")
    if not recipients:
        raise UserError(f"{path if path == '--to' else file_label(path)}: no recipients")
    entries = [row.text if row.fields is None else row.fields for row in recipients]
    payload = task_options.read_payload_option(values["payload"])
    with _with_line_numbers(recipients):
        bundle_spec = submit.bundle_spec(
            payload, entries, name, values["campaign"], task_options.task_keys(values)
        )
    bundle_spec.unknown = UnknownPolicy.WAIT if values["wait_for_unknown"] else UnknownPolicy.REFUSE
    return bundle_spec


@contextmanager
def _with_line_numbers(recipients: Sequence[InputRow]) -> Iterator[None]:
    """Add the line of the recipient to the message of an `InvalidTask`."""
    try:
        yield
    except InvalidTask as bad:
        place = "the bundle" if bad.offset is None else recipients[bad.offset].place
        raise UserError(f"{place}: {bad}") from bad


def _create(
    client: InternalClient, bundle_spec: submit.BundleSpec, recipients: Sequence[InputRow]
) -> int:
    try:
        with _with_line_numbers(recipients):
            return client.create_bundle(bundle_spec)
    except Refused as refused:
        subject = f"bundle {bundle_spec.name}"
        raise task_options.explain_refusal(
            refused, subject, {"payload": True}, "--name"
        ) from refused


def _wait_for_bundle(
    cli_context: CliContext, client: InternalClient, bundle_spec: submit.BundleSpec, *, new: int
) -> ExitCode:
    campaign, names = escape_line(bundle_spec.campaign), [*bundle_spec.tasks()]
    cli_context.interrupt_message = (
        f"interrupted; the tasks continue: `taskyard wait --campaign {campaign}`"
    )
    is_own = bundle_spec.campaign == bundle_spec.name
    target = (
        wait_target(client, campaign=bundle_spec.name) if is_own else wait_target(client, names)
    )
    settled = wait_for(cli_context, target)
    document = documents.BundleWaitDocument(
        name=bundle_spec.name,
        campaign=bundle_spec.campaign,
        tasks=len(names),
        new=new,
        settled=settled,
        counts=target.counts,
        behind_failure=target.behind_failure,
    )
    report(cli_context, target, document)
    return target.exit_code()
