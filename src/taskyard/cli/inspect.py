"""Commands that only read: `why`, `workers`, `status`.

The broker builds the views. This module formats them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from taskyard.cli import documents, scopes
from taskyard.cli.commands import Command
from taskyard.cli.connection import broker_location, connect_read_only
from taskyard.cli.control import format_pauses, format_resumes
from taskyard.cli.format import (
    escape_line,
    escape_pattern,
    format_count,
    format_duration,
    format_free_resources,
    format_moment,
    format_slots,
    full_name,
)
from taskyard.cli.options import CliContext
from taskyard.cli.output import example, print_document, print_table, print_view
from taskyard.cli.progress import format_counts
from taskyard.cli.wait import (
    FAILURES_LISTED_MAX,
    SLOWEST_SEARCHED_MAX,
    format_slowest,
    slowest_tasks,
)
from taskyard.client.requests import problems_of
from taskyard.core.states import TaskState
from taskyard.errors import UnknownName, UserError
from taskyard.net.endpoints import has_addresses
from taskyard.wire.views import Service

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from taskyard.cli.connection import ReadOnlyClient

#: The most campaigns and services in the text of `status`. --json has more.
_STATUS_ROWS_MAX: Final = 20


@click.command(
    cls=Command,
    epilog=example(
        "why join",
        "why fetch-a fetch-b",
        "why --campaign thumbs",
        "why --service smtp --lane a.org",
    ),
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=scopes.complete_name)
@click.option(
    "--lane", metavar="LANE", help="Explain this lane.", shell_complete=scopes.complete_lane
)
@click.option(
    "--service",
    metavar="SERVICE",
    help="Service of the lane. Without --lane, explain all its lanes.",
    shell_complete=scopes.complete_service,
)
@click.option(
    "--campaign",
    cls=scopes.OnceOption,
    metavar="NAME",
    help="Explain the failures of this campaign, and name its slowest tasks.",
    shell_complete=scopes.complete_campaign,
)
@click.pass_obj
def why(
    cli_context: CliContext,
    names: tuple[str, ...],
    lane: str | None,
    service: str | None,
    campaign: str | None,
) -> None:
    """Explain the state of tasks or lanes.

    Prints a sentence for each: why it waits, or how it ended. Of a campaign, the first 20 failed
    tasks are explained.
    """
    chosen = (bool(names), lane is not None or service is not None, campaign is not None)
    if sum(chosen) != 1:
        raise UserError("give names of tasks, or --campaign, or --lane and --service")
    if campaign is not None:
        _explain_campaign(cli_context, campaign)
        return
    with connect_read_only(cli_context) as broker:
        stats = [broker.explain(name) for name in broker.resolve(names)] if names else []
        lines = broker.line_labels(stats)
        found = [] if names else _find_lanes(broker, lane, service)
    if cli_context.as_json:
        print_document(documents.WhyDocument(tasks=stats, lanes=found))
        return
    for one in stats:
        click.echo(f"{_labelled_name(one, lines)}: {escape_line(one['sentence'])}")
    for one in found:
        click.echo(
            f"{escape_line(one['service'])}/{escape_line(one['lane'])}: {escape_line(one['why'])}"
        )


def _labelled_name(view: dict[str, Any], lines: dict[str, str]) -> str:
    """Return the full name of a task, with the line of a file that it is."""
    name = full_name(view)
    line = f" ({lines[name]})" if name in lines else ""
    return escape_line(f"{name}{line}")


def _explain_campaign(cli_context: CliContext, campaign: str) -> None:
    """Print the counts of a campaign, its failures and its slowest tasks."""
    from taskyard.client.requests import scope_of  # noqa: PLC0415  # not needed by completion

    with connect_read_only(cli_context) as broker:
        counts = _campaign_stats(broker.status(), campaign)["counts"]
        total, scope = sum(counts.values()), scope_of(campaign=campaign)
        failed = broker.tasks(scope_of(campaign=campaign, states=[TaskState.FAILED]))
        names = [full_name(view) for view in islice(failed, FAILURES_LISTED_MAX)]
        failures = [broker.explain(name) for name in names]
        lines = broker.line_labels(failures)
        slowest = slowest_tasks(broker, scope) if total <= SLOWEST_SEARCHED_MAX else []
    if cli_context.as_json:
        print_document(documents.WhyDocument(tasks=failures, lanes=[], slowest=slowest))
        return
    click.echo(f"campaign {escape_line(campaign)}: {format_counts(counts)}")
    for one in failures:
        click.echo(f"  {_labelled_name(one, lines)}: {escape_line(one['sentence'])}")
    if counts["failed"] > len(failures):
        more = counts["failed"] - len(failures)
        click.echo(f"  and {more:,} more failed (see `taskyard list --failed`)")
    if total > SLOWEST_SEARCHED_MAX:
        click.echo("  slowest: see `taskyard list --sort duration`")
    elif slowest:
        click.echo(format_slowest(slowest))


def _find_lanes(
    broker: ReadOnlyClient, lane: str | None, service: str | None
) -> list[dict[str, Any]]:
    """Return a lane, or all lanes of a service."""
    meant = scopes.service_of_lane(broker, lane, service)
    found = [*broker.lanes(meant, None if lane is None else escape_pattern(lane))]
    if not found:
        what = "lanes" if lane is None else f"lane {escape_line(lane)}"
        of = f" of service {escape_line(service)}" if service else ""
        raise UserError(f"{what}{of}: no waiting or running tasks (see `taskyard lanes`)")
    return found


@click.command(cls=Command, epilog=example("workers"))
@click.pass_obj
def workers(cli_context: CliContext) -> None:
    """List the workers.

    Shows their load, when the broker last received a message from them, and where they run. A
    worker is idle, running (it has free slots), full or draining (it gets no more tasks). TASKS
    also counts the calls that wait for other tasks, which use no slots. FREE shows its named
    resources that no task has.
    """
    with connect_read_only(cli_context) as broker:
        found = broker.workers()
    if cli_context.as_json:
        print_document(documents.WorkersDocument(workers=found))
        return
    if not found and not cli_context.quiet:
        click.echo("no workers (start one with `taskyard worker`)", err=True)
        return
    columns = ("NAME", "STATE", "SERVICES", "USED", "TASKS", "SEEN", "HOST", "PID", "DIALECT")
    has_resources = any(one["resources"] for one in found)
    free = ("FREE",) if has_resources else ()
    rows = [_worker_row(one)[: len(columns + free)] for one in found]
    print_table((*columns, *free), rows)
    for one in found:
        if one["malformed"] and not cli_context.quiet:
            lines = format_count(one["malformed"], "malformed line")
            click.echo(
                f"agents of {escape_line(one['name'])} wrote {lines} (see its log)", err=True
            )


def _worker_row(one: dict[str, Any]) -> tuple[object, ...]:
    slots = format_slots(one["slots"], one["slots_used"])
    last_seen = f"{format_duration(one['last_seen_ago'])} ago"
    services = ", ".join(one["services"])
    where = (one["host"] or "-", one["pid"] or "-")
    return (
        one["name"],
        one["state"],
        services,
        slots,
        _tasks_text(one["tasks"], one["waiting"]),
        last_seen,
        *where,
        one["dialect"],
        format_free_resources(one["resources"], one["resources_free"]) or "-",
    )


def _tasks_text(tasks: int, waiting: int) -> str:
    """Return the number of tasks, and how many have calls that wait for other tasks."""
    wait = "waits" if waiting == 1 else "wait"
    return f"{tasks} ({waiting} {wait})" if waiting else str(tasks)


@click.command(cls=Command, epilog=example("status", "status --campaign thumbs --json"))
@scopes.campaign_option
@click.pass_obj
def status(cli_context: CliContext, campaign: str | None) -> None:
    """Count the tasks in each state.

    Also counts campaigns, services and workers.
    """
    with connect_read_only(cli_context) as broker:
        stats, address_lines = broker.status(), _address_lines(cli_context, broker)
        if campaign is not None:
            stats = _campaign_stats(stats, campaign)
    if cli_context.as_json and campaign is not None:
        print_document(documents.CampaignStatusDocument(campaign=campaign, counts=stats["counts"]))
    elif cli_context.as_json:
        print_view("status", stats)
    else:
        page = _page_address(cli_context)
        lines = address_lines + _pair_lines((stats["health"] or {}).get("leader"))
        _print_status(stats, [*lines, f"page {page}"] if page else lines)


def _address_lines(cli_context: CliContext, broker: ReadOnlyClient) -> list[str]:
    """Return a line with the address that answers, of a broker that has several."""
    endpoint = broker_location(cli_context).broker
    if endpoint is None or not has_addresses(endpoint):
        return []
    return [f"answered by {getattr(broker, 'address', '')}"]


def _page_address(cli_context: CliContext) -> str | None:
    """Return the address of the page of a broker on this machine.

    With a token on a terminal, where only the owner of the page reads it, and not in a pipe or log.
    """
    from taskyard.web.address import Role, find_page  # noqa: PLC0415  # not for every command

    location = broker_location(cli_context)
    page = find_page(location.state) if location.broker is None else None
    if page is None:
        return None
    return page.with_token(Role.OPERATOR) if sys.stdout.isatty() else page.address


def _campaign_stats(stats: dict[str, Any], campaign: str) -> dict[str, Any]:
    for one in stats["campaigns"]:
        if one["name"] == campaign:
            return {"counts": one["counts"]}
    raise UnknownName(f"unknown campaign {campaign!r} (see `taskyard status`)", campaign)


def _pair_lines(leader: dict[str, Any] | None) -> list[str]:
    """Return a line for the leader and for each standby, of a journal in PostgreSQL."""
    if leader is None:
        return []
    alone = "" if leader["standbys"] else ", no standby"
    lines = [f"leader {_address_text(leader)}: epoch {leader['epoch']}{alone}"]
    for one in leader["standbys"]:
        rows, behind = format_count(one["rows_behind"], "row"), one["seconds_behind"]
        state = f"{rows} and {format_duration(behind)} behind"
        if one["last_seen_ago"] > leader["lease"]:
            state = f"silent for {format_duration(one['last_seen_ago'])}"
        lines.append(f"standby {_address_text(one)}: {state}")
    return lines


def _address_text(one: dict[str, Any]) -> str:
    return escape_line(" ".join((one["host"], *one["endpoints"])))


def _print_status(stats: dict[str, Any], addresses: list[str]) -> None:
    """Print a status, with lines about where the broker and its page are."""
    click.echo(format_counts(stats["counts"], stats.get("behind_failure", 0)))
    if "workers" not in stats:
        return
    click.echo(f"{format_count(stats['workers'], 'worker')}")
    click.echo("".join(f"{line}\n" for line in addresses), nl=False)
    if pauses := format_pauses(stats):
        click.echo(f"{pauses} (undo with {format_resumes(stats)})")
    for problem in problems_of(stats):
        click.echo(escape_line(problem))
    states = ("blocked", "delayed", "ready", "leased", "done", "failed", "cancelled")
    for kind in ("campaigns", "services"):
        named = [one for one in stats[kind] if sum(one["counts"].values())]
        named.sort(key=lambda one: not one["name"])  # tasks without a campaign come last
        if len(named) > _STATUS_ROWS_MAX:
            click.echo(f"\nthe latest {_STATUS_ROWS_MAX} of {len(named):,} {kind}:")
            named = named[-_STATUS_ROWS_MAX:]
        elif named:
            click.echo()
        if named:
            columns = (kind[:-1].upper(), *map(str.upper, states))
            print_table(columns, [(one["name"], *one["counts"].values()) for one in named])


#: The most lanes in a table on a terminal: one screen.
ROWS_SHOWN: Final = 40

_LANE_COLUMNS: Final = (
    *("SERVICE", "LANE", "TASKS", "DUE", "RUNNING", "LIMIT", "OLDEST", "ATTEMPTS", "NEXT DUE"),
    "WHY",
)

#: Left out on a narrow terminal.
_OPTIONAL_LANE_COLUMNS: Final = ("LIMIT", "ATTEMPTS", "NEXT DUE")

#: The `sort_key` of a lane that has workers. Waiting lanes are below it.
_SERVED: Final = 3

_ENDED: Final = ("done", "failed", "cancelled")

_SERVICE_COLUMNS: Final = (
    *("SERVICE", "WORKERS", "USED", "RULE", "LIMIT", "TASKS", "DUE", "RUNNING", "FAILED"),
    *("OLDEST", "NEXT DUE", "WHY"),
)

#: Left out on a narrow terminal.
_OPTIONAL_SERVICE_COLUMNS: Final = ("RULE", "FAILED", "OLDEST", "NEXT DUE")

#: Rules that a row names. An ellipsis stands for more.
_RULES_LISTED_MAX: Final = 2


@click.command(
    cls=Command, epilog=example("lanes", "lanes --service smtp --waiting", "lanes --lane '*.org'")
)
@scopes.service_option
@click.option(
    "--lane", "pattern", metavar="GLOB", help="Only lanes that match this pattern, as in '*.org'."
)
@click.option("--waiting", is_flag=True, help="Only lanes with tasks and without a worker.")
@click.pass_obj
def lanes(
    cli_context: CliContext,
    *,
    service: str | None,
    pattern: str | None,
    waiting: bool,
) -> None:
    """List the lanes and why they wait.

    Waiting lanes come first, the lane with the oldest task on top. On a terminal the table is
    limited to one screen. A pipe gets all lanes.
    """
    with connect_read_only(cli_context) as broker:
        found = [one for one in broker.lanes(service, pattern) if _is_wanted(one, waiting=waiting)]
    found.sort(key=_order)
    if cli_context.as_json:
        print_document(documents.LanesDocument(lanes=found))
        return
    if not found:
        cli_context.info(
            _empty_text(waiting=waiting, chosen=service is not None or pattern is not None)
        )
        return
    shown = found[:ROWS_SHOWN] if is_on_terminal() else found
    rows = [row(one, time.time()) for one in shown]
    print_table(_LANE_COLUMNS, rows, wrapped=("WHY",), optional=_OPTIONAL_LANE_COLUMNS)
    if more := len(found) - len(shown):
        cli_context.info(f"… and {more:,} more (all: `taskyard lanes | less`)")


def _empty_text(*, waiting: bool, chosen: bool) -> str:
    if waiting:
        return "no lane is waiting"
    return "no matching lane has tasks" if chosen else "no lanes: all tasks have ended"


def is_on_terminal() -> bool:
    return sys.stdout.isatty()


def _is_wanted(one: dict[str, Any], *, waiting: bool) -> bool:
    return not waiting or sort_key(one) < _SERVED


def sort_key(one: dict[str, Any]) -> int:
    """Return the rank of a lane: ready, delayed, blocked, served, without tasks."""
    if one["leased"]:
        return _SERVED
    kinds = ("ready", "delayed", "blocked")
    return next((index for index, kind in enumerate(kinds) if one[kind]), _SERVED + 1)


def _order(one: dict[str, Any]) -> tuple[object, ...]:
    return sort_key(one), one["oldest"] or 0.0, one["service"], one["lane"]


def row(one: dict[str, Any], now: float) -> Sequence[object]:
    """Return the table row of a lane."""
    return (
        one["service"],
        one["lane"],
        one["tasks"],
        one["ready"],
        one["leased"],
        one["limit"] or "none",
        time_since(one["oldest"], now),
        one["attempts"],
        time_until(one["next_due"], now),
        one["why"],
    )


def time_since(at: float | None, now: float) -> str:
    return "" if at is None else format_duration(max(0.0, now - at))


def time_until(at: float | None, now: float) -> str:
    """Format the time until a moment."""
    if at is None:
        return ""
    return format_moment(at, now) if at > now else "now"


@click.command(cls=Command, epilog=example("services"))
@click.pass_obj
def services(cli_context: CliContext) -> None:
    """List the services with their workers and waiting tasks.

    USED counts slots of all workers that offer the service. They share the slots with their other
    services. LIMIT is the number of lanes that may be served at once under the rules of the
    settings. `taskyard lanes` explains single lanes.
    """
    with connect_read_only(cli_context) as broker:
        stats, workers = broker.status(), broker.workers()
        lanes = _by_service(broker.lanes())
        found = [_service(one, stats, workers, lanes) for one in stats["services"]]
    if cli_context.as_json:
        print_document(documents.ServicesDocument(services=found, paused=stats["paused"]))
        return
    if not found and not cli_context.quiet:
        click.echo("no services: no task was submitted and no worker has connected", err=True)
        return
    now = time.time()
    print_table(
        _SERVICE_COLUMNS,
        [_service_row(one, now) for one in found],
        wrapped=("WHY",),
        optional=_OPTIONAL_SERVICE_COLUMNS,
    )


def _by_service(lanes: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in lanes:
        found.setdefault(one["service"], []).append(one)
    return found


def _service(
    one: dict[str, Any],
    stats: dict[str, Any],
    workers: list[dict[str, Any]],
    lanes: dict[str, list[dict[str, Any]]],
) -> documents.ServiceRow:
    """Return a service with its slots, its pauses and the sums over its lanes."""
    own = [worker for worker in workers if one["name"] in worker["services"]]
    paused = [pause["lane"] for pause in stats["pauses"] if pause["service"] == one["name"]]
    row = documents.ServiceRow(
        **{field: one[field] for field in Service.__struct_fields__},
        slots=sum(worker["slots"] for worker in own),
        slots_used=sum(worker["slots_used"] for worker in own),
        paused=None in paused,
        lanes_paused=[lane for lane in paused if lane is not None],
        **_lane_totals(lanes.get(one["name"], [])),
    )
    if row.paused or stats["paused"]:
        row.why = "the service is paused" if row.paused else "all services are paused"
    return row


def _lane_totals(lanes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over the lanes of a service."""
    oldest = [one["oldest"] for one in lanes if one["oldest"] is not None]
    due = [one["next_due"] for one in lanes if one["next_due"] is not None]
    limits = {one["rule"]: one["rule_limit"] for one in lanes}
    reasons = Counter(one["reason"] for one in lanes)
    return {
        "lanes": len(lanes),
        "rules": [documents.ServiceRule(name=name, limit=limit) for name, limit in limits.items()],
        "oldest": min(oldest, default=None),
        "next_due": min(due, default=None),
        "reasons": dict(reasons.most_common()),
        "why": _why(lanes, reasons),
    }


def _why(lanes: list[dict[str, Any]], reasons: Counter[str]) -> str:
    """Summarize the reasons of the lanes. A single lane has its full sentence."""
    if not lanes:
        return "no waiting or running tasks"
    if len(lanes) == 1:
        return str(lanes[0]["why"])
    return ", ".join(
        f"{format_count(number, 'lane')}: {reason.replace('-', ' ')}"
        for reason, number in reasons.most_common()
    )


def _service_row(one: documents.ServiceRow, now: float) -> tuple[object, ...]:
    counts: dict[str, int] = msgspec.to_builtins(one.counts)
    tasks = sum(number for state, number in counts.items() if state not in _ENDED)
    return (
        one.name,
        one.workers,
        format_slots(one.slots, one.slots_used),
        _first_few([rule.name or "defaults" for rule in one.rules]),
        _first_few([str(rule.limit or "none") for rule in one.rules]),
        tasks,
        counts["ready"],
        counts["leased"],
        counts["failed"],
        time_since(one.oldest, now),
        time_until(one.next_due, now),
        one.why,
    )


def _first_few(words: list[str]) -> str:
    named = ", ".join(words[:_RULES_LISTED_MAX])
    return named if len(words) <= _RULES_LISTED_MAX else f"{named}, …"
