"""The top of the report: a summary in sentences, key figures, and the table of guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.pipeline.report import charts, comparison, details
from taskyard.pipeline.report.format import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    shorten_name,
)
from taskyard.pipeline.report.page import Link, Page, Section, Table, Tile
from taskyard.pipeline.report.summary import columns

if TYPE_CHECKING:
    from taskyard.pipeline.report.summary import ReportSummary


#: Times are rounded. Up to this overlap, the tasks of a lane count as run one by one.
OVERLAP_PART_MAX: Final = 0.001

#: Brokers in a sentence, and campaigns in a cell of the table of brokers.
BROKERS_NAMED_MAX: Final = 10
CAMPAIGNS_NAMED_MAX: Final = 5


def page_of(summary: ReportSummary, footer: str) -> Page:
    """Build the whole report."""
    name = summary.campaign
    title = (
        f"Campaign {shorten_name(name)}" if name else "All campaigns" if name is None else "Report"
    )
    drawers = (
        guarantees,
        details.failures,
        charts.over_time,
        details.places,
        charts.workers,
        details.slowest,
        charts.times,
        charts.lanes,
        charts.setbacks,
        charts.levels,
        charts.critical_path,
    )
    drawn = (draw(summary) for draw in drawers)
    sections = [section for section in drawn if section is not None]
    if len(summary.brokers) > 1:
        sections.insert(1, brokers(summary))
    if summary.comparison is not None:
        sections.insert(0, comparison.section(summary.comparison, summary.campaign))
    return Page(title, sentences(summary), tiles(summary), sections, footer)


def sentences(summary: ReportSummary) -> list[str]:
    return [
        text
        for text in (
            _ends_text(summary),
            _open_text(summary),
            "" if summary.comparison is None else comparison.sentence(summary.comparison),
            _brokers_text(summary),
            _busiest_worker_text(summary),
            limiting_factor(summary),
        )
        if text
    ]


def _ends_text(summary: ReportSummary) -> str:
    """Describe how tasks ended, and how long it took."""
    tasks, done = summary.number("tasks"), summary.number("done")
    ends = {
        "failed": summary.number("failed"),
        "cancelled": summary.number("cancelled"),
        "blocked by a failure": summary.number("blocked"),
    }
    ends["unfinished"] = tasks - done - sum(ends.values())
    parts = [f"{done:,} done", *(f"{one:,} {caption}" for caption, one in ends.items() if one)]
    text = "all done" if done == tasks else ", ".join(parts)
    text = f"{format_count(tasks, 'task')}: {text}."
    if summary.totals.get("ended") is None:
        return text
    last = "last one so far" if summary.open_tasks else "last one"
    return (
        f"{text} The {last} ended {format_duration(summary.makespan_ns)} after the first "
        "submission."
    )


def _open_text(summary: ReportSummary) -> str:
    """State that a campaign was still running when the report was made."""
    number = summary.open_tasks
    if not number:
        return ""
    subject = "The campaigns are" if summary.campaign is None else "The campaign is"
    have = "has" if number == 1 else "have"
    return (
        f"{subject} still running: {format_count(number, 'task')} {have} not ended. All numbers "
        "are those so far."
    )


def _brokers_text(summary: ReportSummary) -> str:
    """Name the brokers of the campaign, if several were read."""
    if len(summary.brokers) == 1:
        return ""
    labels = [shorten_name(one.label) for one in summary.campaign_brokers]
    more = ", …" if len(labels) > BROKERS_NAMED_MAX else ""
    names = ", ".join(labels[:BROKERS_NAMED_MAX]) + more
    found = f"From {format_count(len(summary.brokers), 'broker')}"
    if summary.campaign is None:
        return f"{found}: {names}."
    return f"{found}, with this campaign at {names}."


def _busiest_worker_text(summary: ReportSummary) -> str:
    """Name the worker, and the service, with the most work."""
    names, run_ns = columns(summary.worker_runs, "worker", "run_ns")
    work: dict[str, int] = {}
    for name, time_ns in zip(names, run_ns, strict=True):
        work[str(name)] = work.get(str(name), 0) + int(str(time_ns or 0))
    if not any(work.values()):
        return ""
    name = max(work, key=lambda one: work[one])
    text = (
        f"Of {format_count(len(work), 'worker')}, {shorten_name(name)} was the busiest, with "
        f"{format_duration(work[name])} of {format_duration(sum(work.values()))} of work"
    )
    services = _service_work(summary)
    if len(services) > 1:
        service = max(services, key=lambda one: services[one])
        part = services[service] / (sum(services.values()) or 1)
        text += f". {format_percent(part)} of all work was for service {shorten_name(service)}"
    return f"{text}."


def _service_work(summary: ReportSummary) -> dict[str, int]:
    names, phases, times_ns = columns(summary.distributions, "service", "phase", "time_ns")
    work: dict[str, int] = {}
    for name, phase, time_ns in zip(names, phases, times_ns, strict=True):
        if phase == "run":
            work[str(name)] = work.get(str(name), 0) + int(str(time_ns or 0))
    return work


def limiting_factor(summary: ReportSummary) -> str:
    """Name the part of the critical path that took the most time."""
    path = summary.critical_path
    if not path.num_rows:
        return ""
    parts = {
        name: sum(int(str(one or 0)) for one in columns(path, name)[0])
        for name in ("held_ns", "wait_ns", "queued_ns", "retry_ns", "run_ns")
    }
    whole = sum(parts.values()) or 1
    most = max(parts, key=lambda name: parts[name])
    part = format_percent(parts[most] / whole)
    if most == "wait_ns":
        return (
            f"Bottleneck: waiting for a worker, {part} of the critical path. With any number of "
            f"workers, it takes at least {format_duration(lower_bound_ns(summary))}."
        )
    if most == "queued_ns":
        return f"Bottleneck: tasks queued in a worker, {part} of the critical path."
    if most == "retry_ns":
        return f"Bottleneck: unsuccessful attempts, {part} of the critical path."
    if most == "held_ns":
        return f"Bottleneck: tasks not submitted or not due yet, {part} of the critical path."
    return (
        f"Bottleneck: the tasks themselves, {part} of the critical path. More workers would "
        "change little."
    )


def lower_bound_ns(summary: ReportSummary) -> int:
    """Return the least time that the campaign can take.

    That is its longest chain, with submissions as they were, or its longest serial lane. A lane
    that ran several tasks at once is not serial, and gives no bound.
    """
    rows = zip(*columns(summary.lanes, "run_ns", "alone_ns"), strict=True)
    lanes = [(int(str(run or 0)), int(str(alone or 0))) for run, alone in rows]
    serial = [alone for run, alone in lanes if run - alone <= run * OVERLAP_PART_MAX]
    return max([summary.number("floor_ns"), *serial])


def tiles(summary: ReportSummary) -> list[Tile]:
    done = summary.number("done")
    shown = [
        Tile(f"{summary.number('tasks'):,}", "tasks"),
        Tile(f"{done:,}", "done"),
        Tile(f"{summary.number('failed'):,}", "failed"),
        Tile(format_duration(summary.makespan_ns), _makespan_caption(summary)),
    ]
    seconds = summary.makespan_ns / 1e9
    if seconds:
        shown.append(Tile(f"{done / seconds:,.1f}", "done per second"))
    if details.cpu_ns(summary):
        shown.append(Tile(format_duration(details.cpu_ns(summary)), "CPU time"))
    if details.memory_max_bytes(summary):
        shown.append(Tile(format_bytes(details.memory_max_bytes(summary)), "peak memory"))
    first = summary.setbacks.slice(0, 1).to_pylist()
    retried = sum(row["attempts_all"] - row["failed_all"] for row in first)
    if retried:
        shown.append(Tile(f"{retried:,}", "retry" if retried == 1 else "retries"))
    return shown


def _makespan_caption(summary: ReportSummary) -> str:
    return "makespan so far" if summary.open_tasks else "makespan"


def guarantees(summary: ReportSummary) -> Section:
    """Tabulate the counts that prove the guarantees."""
    found = summary.guarantees
    parts = {
        "done": found.done,
        "failed": found.failed,
        "cancelled": found.cancelled,
        "blocked by a failure": found.blocked_behind_failure,
        "unfinished": found.unfinished,
    }
    ends = " + ".join(f"{number:,} {end}" for end, number in parts.items() if number) or "0"
    adds_up = sum(parts.values()) == found.submitted
    rows: list[list[str | Link]] = [
        [
            "every task is accounted for",
            f"{found.submitted:,} submitted = {ends}",
            _status_word(adds_up),
        ],
        ["no task is lost", f"{found.lost:,} lost", _status_word(not found.lost)],
        [
            "no task is completed twice",
            f"{found.completed_twice:,} completed twice",
            _status_word(not found.completed_twice),
        ],
        [
            "no task starts before its dependencies are done",
            f"{format_count(found.dependencies_broken, 'task')} started too early",
            _status_word(not found.dependencies_broken),
        ],
        [
            "results of expired leases are refused",
            f"{format_count(found.stale_refused, 'stale result')} refused",
            _status_word(good=True),
        ],
    ]
    if found.unknown:
        counted = f"{format_count(found.unknown, 'task')} without a submission"
        rows.append(["the history is complete", counted, _status_word(good=False)])
    table = Table(["guarantee", "counted", "result"], rows)
    text = "Counted from the history's events, independently of the broker"
    is_part = summary.number("tasks") < found.submitted
    text += ", over all campaigns" if is_part else ""
    text += " of all brokers." if len(summary.brokers) > 1 else "."
    return Section("guarantees", "Guarantees", [text], table=table)


def brokers(summary: ReportSummary) -> Section:
    """Tabulate the brokers: their campaigns, how tasks ended, and whether the guarantees hold."""
    rows: list[list[str | Link]] = []
    for one in summary.brokers:
        counts = one.guarantees
        unfinished = counts.unfinished + counts.blocked_behind_failure + counts.lost
        ends = (counts.submitted, counts.done, counts.failed, counts.cancelled, unfinished)
        rows.append(
            [
                one.label,
                _campaigns_text(one.campaigns),
                *(f"{number:,}" for number in ends),
                _status_word(counts.is_clean),
                one.directory,
                one.broker,
            ]
        )
    head = ["broker", "campaigns", "tasks", "done", "failed", "cancelled", "not ended"]
    table = Table([*head, "guarantees", "history", "id"], rows, numbers=(2, 3, 4, 5, 6))
    text = (
        "Counted for each broker over its whole history. Names of workers and lanes begin with "
        "their broker. A forwarded task is a task of each of its brokers."
    )
    return Section("brokers", "Brokers", [text], table=table)


def _campaigns_text(names: list[str]) -> str:
    shown = [shorten_name(name) or "(none)" for name in names[:CAMPAIGNS_NAMED_MAX]]
    more = len(names) - len(shown)
    return ", ".join([*shown, *([f"{more:,} more"] if more else [])])


def _status_word(good: bool) -> str:  # noqa: FBT001  # one of two words
    return "holds" if good else "broken"
