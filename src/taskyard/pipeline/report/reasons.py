"""Failures grouped by the form of their reason, and the last lines that failed tasks printed.

Works on a few collected rows.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.client.task_filters import form_of
from taskyard.pipeline.transforms.summaries import EXAMPLES_MAX, LISTED, NO_REASON

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Groups that the report shows.
GROUPS_MAX: Final = 12

#: Lines of output in the report, and the characters of them.
_LINES_MAX: Final = 12
_CHARACTERS_MAX: Final = 4096


class FailureGroup(Struct):
    """Failed tasks whose reasons have one form."""

    form: str
    count: int = 0
    #: The first of them to fail, as rows of `tasks`.
    tasks: list[dict[str, Any]] = []


def failure_groups(failed: pa.Table) -> list[FailureGroup]:
    """Group failed tasks, the most frequent form first. Each row has the `count` that it adds."""
    short_form = cache(_first_line_form)
    groups: dict[str, FailureGroup] = {}
    for row in failed.sort_by([("ended", "ascending"), ("task", "ascending")]).to_pylist():
        form = short_form(row["reason"])
        group = groups.setdefault(form, FailureGroup(form))
        group.count += row["count"]
        if len(group.tasks) < EXAMPLES_MAX:
            group.tasks.append(row)
    return sorted(groups.values(), key=lambda one: (-one.count, one.form))[:GROUPS_MAX]


def _first_line_form(reason: str | None) -> str:
    return form_of((reason or "").strip().partition("\n")[0]) or NO_REASON


def failed_rows(tasks: pa.Table) -> pa.Table:
    """Select the failed tasks of a table in memory, as `summaries.failures` does in a query."""
    mine = tasks.filter(pc.equal(tasks["state"], "FAILED")).select([*LISTED, "reason", "ended"])
    return mine.append_column("count", pa.repeat(1, len(mine)))


def setbacks_by_form(setbacks: pa.Table) -> pa.Table:
    """Add up the unsuccessful attempts of reasons with one form, the most frequent form first."""
    if not len(setbacks):
        return setbacks
    forms = pa.array([form_of(reason) for reason in setbacks["reason"].to_pylist()])
    counts = ("retried", "failed", "lost")
    named = setbacks.set_column(setbacks.schema.get_field_index("reason"), "reason", forms)
    wholes = ("attempts_all", "failed_all")
    added = named.group_by("reason").aggregate(
        [*((name, "sum") for name in counts), *((name, "max") for name in wholes)]
    )
    added = added.rename_columns(["reason", *counts, *wholes])
    every = pc.add(pc.add(added["retried"], added["failed"]), added["lost"])
    order = [("attempts", "descending"), ("reason", "ascending")]
    return added.append_column("attempts", every).sort_by(order).slice(0, GROUPS_MAX)


def last_outputs(tasks: Iterable[dict[str, Any]], printed: pa.Table) -> dict[str, str]:
    """Return the last lines of some tasks by full name, without those that printed nothing.

    `printed` are their `progressed` events.
    """
    wanted = {row["task"] for row in tasks}
    found = {
        event["task"]: _last_lines(event["reason"])
        for event in printed.sort_by("record").to_pylist()
        if event["reason"] and event["task"] in wanted
    }
    return {task: text for task, text in found.items() if text}


def _last_lines(text: str) -> str:
    """Cut a text to its last lines. Control characters become spaces."""
    lines = text[-_CHARACTERS_MAX:].rstrip().splitlines()[-_LINES_MAX:]
    return "\n".join(map(_printable, lines)).strip("\n")


def _printable(line: str) -> str:
    return "".join(one if one.isprintable() or one == "\t" else " " for one in line).rstrip()
