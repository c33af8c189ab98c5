"""The report's opening: sentences that a person can quote, and the numbers to be read from afar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taskyard.pipeline.report import charts
from taskyard.pipeline.report.format import (
    format_count,
    format_duration,
    format_percent,
    shorten_name,
)
from taskyard.pipeline.report.page import Page, Section, Table, Tile
from taskyard.pipeline.report.summary import columns

if TYPE_CHECKING:
    from taskyard.pipeline.report.summary import ReportSummary


#: Times of a lane are rounded: if no more than this part overlaps, its tasks ran one by one.
OVERLAP_PART_MAX: Final = 0.001


def page_of(facts: ReportSummary, footer: str) -> Page:
    """The whole report."""
    name = facts.campaign
    title = (
        f"Campaign {shorten_name(name)}" if name else "All campaigns" if name is None else "Report"
    )
    drawers = (
        guarantees,
        charts.over_time,
        charts.workers,
        charts.times,
        charts.lanes,
        charts.setbacks,
        charts.levels,
        charts.critical_path,
    )
    sections = [draw(facts) for draw in drawers]
    return Page(title, sentences(facts), tiles(facts), sections, footer)


def sentences(facts: ReportSummary) -> list[str]:
    return [
        text
        for text in (_ends_text(facts), _busiest_worker_text(facts), limiting_factor(facts))
        if text
    ]


def _ends_text(facts: ReportSummary) -> str:
    """How many tasks came to which end, and how long it took."""
    tasks, done = facts.number("tasks"), facts.number("done")
    ends = {
        "failed": facts.number("failed"),
        "cancelled": facts.number("cancelled"),
        "waiting behind a failure": facts.number("blocked"),
    }
    ends["not ended yet"] = tasks - done - sum(ends.values())
    parts = [f"{done:,} are done", *(f"{one:,} {caption}" for caption, one in ends.items() if one)]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    if done == tasks:
        listed = "all are done"
    return (
        f"Of {format_count(tasks, 'task')} {listed}, {format_duration(facts.makespan_ns)} after "
        f"the first came."
    )


def _busiest_worker_text(facts: ReportSummary) -> str:
    """Who had the most to do."""
    names, run_ns = columns(facts.worker_runs, "worker", "run_ns")
    work: dict[str, int] = {}
    for name, time_ns in zip(names, run_ns, strict=True):
        work[str(name)] = work.get(str(name), 0) + int(str(time_ns or 0))
    if not any(work.values()):
        return ""
    name = max(work, key=lambda one: work[one])
    text = f"The busiest of {format_count(len(work), 'worker')} was {shorten_name(name)}"
    text += (
        f" with {format_duration(work[name])} of work of {format_duration(sum(work.values()))} in "
        f"all"
    )
    services = _service_work(facts)
    if len(services) > 1:
        service = max(services, key=lambda one: services[one])
        part = services[service] / (sum(services.values()) or 1)
        text += f"; {format_percent(part)} of it was for the service {shorten_name(service)}"
    return f"{text}."


def _service_work(facts: ReportSummary) -> dict[str, int]:
    names, whats, times_ns = columns(facts.distributions, "service", "what", "time_ns")
    work: dict[str, int] = {}
    for name, caption, time_ns in zip(names, whats, times_ns, strict=True):
        if caption == "run":
            work[str(name)] = work.get(str(name), 0) + int(str(time_ns or 0))
    return work


def limiting_factor(facts: ReportSummary) -> str:
    """What decided how long it took."""
    path = facts.critical_path
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
            f"What held it back: {part} of the critical path was waiting for a worker; whatever "
            f"their number, it can't take less than {format_duration(lower_bound_ns(facts))}."
        )
    if most == "queued_ns":
        return (
            f"What held it back: for {part} of the critical path tasks were with a worker that did "
            "not run them yet."
        )
    if most == "retry_ns":
        return f"What held it back: {part} of the critical path went to attempts that failed."
    if most == "held_ns":
        return (
            f"What held it back: for {part} of the critical path tasks were not submitted or not "
            "due yet."
        )
    return (
        f"What held it back: the tasks themselves; {part} of the critical path was work, and more "
        "workers would change little."
    )


def lower_bound_ns(facts: ReportSummary) -> int:
    """Return what it can't be quicker than: its longest chain, or serial lane.

    Tasks of a chain are submitted when they were. A lane of which several tasks ran at once is not
    serial, and says nothing about the least time.
    """
    rows = zip(*columns(facts.lanes, "run_ns", "alone_ns"), strict=True)
    lanes = [(int(str(run or 0)), int(str(alone or 0))) for run, alone in rows]
    serial = [alone for run, alone in lanes if run - alone <= run * OVERLAP_PART_MAX]
    return max([facts.number("floor_ns"), *serial])


def tiles(facts: ReportSummary) -> list[Tile]:
    done = facts.number("done")
    shown = [
        Tile(f"{facts.number('tasks'):,}", "tasks"),
        Tile(f"{done:,}", "done"),
        Tile(f"{facts.number('failed'):,}", "failed"),
        Tile(format_duration(facts.makespan_ns), "makespan"),
    ]
    seconds = facts.makespan_ns / 1e9
    if seconds:
        shown.append(Tile(f"{done / seconds:,.1f}", "done a second"))
    rows = facts.setbacks.to_pylist()
    retried = sum(row["retried"] + row["lost"] for row in rows if row["reason"] is None)
    if retried:
        shown.append(Tile(f"{retried:,}", "retries"))
    return shown


def guarantees(facts: ReportSummary) -> Section:
    """The counts that prove them, from the events alone."""
    found = facts.guarantees
    parts = {
        "done": found.done,
        "failed": found.failed,
        "cancelled": found.cancelled,
        "blocked behind a failure": found.blocked_behind_failure,
        "unfinished": found.unfinished,
    }
    told = " + ".join(f"{number:,} {what}" for what, number in parts.items() if number) or "0"
    adds_up = sum(parts.values()) == found.submitted
    rows = [
        [
            "every task is accounted for",
            f"{found.submitted:,} submitted = {told}",
            _status_word(adds_up),
        ],
        ["no task is lost", f"{found.lost:,} lost", _status_word(not found.lost)],
        [
            "no task is completed twice",
            f"{found.completed_twice:,} completed twice",
            _status_word(not found.completed_twice),
        ],
        [
            "no task begins before what it waits for is done",
            f"{found.dependencies_broken:,} dependencies broken",
            _status_word(not found.dependencies_broken),
        ],
        [
            "results of leases that are over are refused",
            f"{found.stale_refused:,} stale results refused",
            _status_word(good=True),
        ],
    ]
    if found.unknown:
        what = f"{found.unknown:,} tasks without a submission"
        rows.append(["the history is whole", what, _status_word(good=False)])
    table = Table(["promise", "counted", "verdict"], rows)
    paragraphs = "Counted from the history's events alone, by other means than the broker's"
    is_part = facts.number("tasks") < found.submitted
    paragraphs += ", over all the campaigns in it." if is_part else "."
    return Section("guarantees", "What is proved", [paragraphs], table=table)


def _status_word(good: bool) -> str:  # noqa: FBT001  # a verdict is one or the other
    return "holds" if good else "broken"
