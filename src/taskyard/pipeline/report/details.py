"""Sections about single tasks and machines: failures, the slowest tasks, when and where it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taskyard.pipeline.report.charts import row_height
from taskyard.pipeline.report.figures import TimeUnit, axis, bar_trace, escape_label, figure
from taskyard.pipeline.report.format import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_time,
    shorten_name,
)
from taskyard.pipeline.report.page import Block, Link, Section, Table
from taskyard.pipeline.report.summary import int_of
from taskyard.pipeline.transforms.summaries import NO_REASON

if TYPE_CHECKING:
    import pyarrow as pa

    from taskyard.pipeline.report.reasons import FailureGroup
    from taskyard.pipeline.report.summary import ReportSummary

#: Hosts that the table lists. The rest is one row.
HOSTS_MAX: Final = 20


def failures(summary: ReportSummary) -> Section | None:
    """List failed tasks by the form of their reason, with the last output of one of each."""
    if not summary.failures:
        return None
    failed, shown = summary.number("failed"), sum(group.count for group in summary.failures)
    text = f"{format_count(failed, 'task').capitalize()} failed, grouped by the form of the reason."
    if shown < failed:
        text += f" The most frequent forms are shown, with {shown:,} of them."
    blocks = [_failure_block(summary, group) for group in summary.failures]
    return Section("failures", "Failed tasks", [text], blocks=blocks)


def _failure_block(summary: ReportSummary, group: FailureGroup) -> Block:
    pages = summary.links
    links = [Link(shorten_name(row["name"]), pages.task(row["task"])) for row in group.tasks]
    more = group.count - len(links)
    if more:
        alike = {} if group.form == NO_REASON else {"reason_like": group.form}
        links.append(Link(f"{more:,} more", pages.tasks(only=("failed",), **alike)))
    names = [row["task"] for row in group.tasks]
    output = next(
        (summary.outputs[name] for name in names if name in summary.outputs),
        group.tasks[0]["reason"] or "",
    )
    return Block(f"{format_count(group.count, 'task')}: {group.form}", links, output)


def slowest(summary: ReportSummary) -> Section | None:
    """Draw the tasks that ran the longest."""
    rows = summary.slowest.sort_by([("run_ns", "descending"), ("task", "ascending")]).to_pylist()
    if not rows:
        return None
    unit = TimeUnit(rows[0]["run_ns"])
    labels = [f"{place}. {escape_label(row['name'])}" for place, row in enumerate(rows, 1)]
    texts = [
        f"{escape_label(row['worker'] or '')}, {format_count(row['attempts'], 'attempt')}"
        for row in rows
    ]
    trace = bar_trace(
        "run time",
        unit.of([row["run_ns"] for row in rows]),
        labels,
        "@leased",
        orientation="h",
        customdata=texts,
        hovertemplate=f"%{{y}}: %{{x:.3g}} {unit.name}, %{{customdata}}<extra></extra>",
        meta={"links": [summary.links.task(row["task"]) for row in rows]},
    )
    shown = figure(
        [trace],
        xaxis=axis(f"run time over all attempts, {unit.name}", rangemode="tozero"),
        yaxis=axis("", type="category", autorange="reversed"),
        showlegend=False,
    )
    part = sum(row["run_ns"] for row in rows) / (summary.number("run_ns") or 1)
    text = (
        f"The slowest task ran for {format_duration(rows[0]['run_ns'])}. "
        f"The chart has {format_percent(part)} of all run time."
    )
    return Section("slowest", "Slowest tasks", [text], shown, height=row_height(len(rows)))


def places(summary: ReportSummary) -> Section:
    """State when the campaign ran, and tabulate the hosts with their CPU time and memory."""
    began, ended = (format_time(summary.totals.get(name)) for name in ("submitted", "ended"))
    text = f"First submission {began}." + (f" Last end {ended}." if ended else "")
    hosts = summary.hosts.to_pylist()
    if not hosts:
        text += " No attempt was measured: hosts, CPU time and memory are unknown."
        return Section("places", "When and where", [text])
    measured, attempts = sum(row["attempts"] for row in hosts), summary.number("attempts")
    used = f"{format_duration(cpu_ns(summary))} of CPU time"
    peak = max(int_of(row["memory_max_bytes"]) for row in hosts)
    used += f", at most {format_bytes(peak)} of memory in one task" if peak else ""
    whole = "" if measured == attempts else f" {measured:,} of {attempts:,} attempts were measured."
    text += f" {format_count(len(hosts), 'host').capitalize()}, {used}.{whole}"
    head = ["host", "attempts", "run time", "CPU time", "CPU per run time", "peak memory"]
    rows: list[list[str | Link]] = [_host_cells(row) for row in hosts[:HOSTS_MAX]]
    if len(hosts) > HOSTS_MAX:
        rows.append(_host_cells(_added(summary.hosts.slice(HOSTS_MAX))))
    return Section(
        "places", "When and where", [text], table=Table(head, rows, numbers=(1, 2, 3, 4, 5))
    )


def cpu_ns(summary: ReportSummary) -> int:
    """Return the CPU time of all measured attempts."""
    return sum(int_of(one) for one in summary.hosts["cpu_ns"].to_pylist())


def memory_max_bytes(summary: ReportSummary) -> int:
    """Return the most memory that one attempt used. 0 if it is unknown."""
    return max(map(int_of, summary.hosts["memory_max_bytes"].to_pylist()), default=0)


def _host_cells(row: dict[str, Any]) -> list[str | Link]:
    run_ns, used_ns = int_of(row["run_ns"]), int_of(row["cpu_ns"])
    peak = int_of(row["memory_max_bytes"])
    return [
        shorten_name(row["host"]),
        f"{row['attempts']:,}",
        format_duration(run_ns),
        format_duration(used_ns),
        format_percent(used_ns / run_ns) if run_ns else "",
        format_bytes(peak) if peak else "",
    ]


def _added(hosts: pa.Table) -> dict[str, Any]:
    """Add up the hosts that have no row of their own."""
    rows = hosts.to_pylist()
    sums = {
        name: sum(int_of(row[name]) for row in rows) for name in ("attempts", "run_ns", "cpu_ns")
    }
    peak = max(int_of(row["memory_max_bytes"]) for row in rows)
    return {"host": f"{len(rows):,} more hosts", **sums, "memory_max_bytes": peak}
