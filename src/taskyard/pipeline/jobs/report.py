"""`pipeline report`: what happened, as one page with pictures, and the tables beside it.

Reads events and edges, has the transforms make the datasets, and collects aggregates alone: the
page of a million tasks is as large as that of a hundred. Beside the page lie the tables, each as
Parquet and as CSV: a file each, or a directory of files where a table is large.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from msgspec import Struct
from pyspark.sql import functions as f

from taskyard.errors import UserError
from taskyard.pipeline.report import page
from taskyard.pipeline.report.facts import Facts
from taskyard.pipeline.report.pictures import WORKERS_SHOWN_MAX
from taskyard.pipeline.report.stretches import OverTime, over_time, width_for
from taskyard.pipeline.report.summary import page_of
from taskyard.pipeline.report.words import short
from taskyard.pipeline.small import hold
from taskyard.pipeline.transforms import summaries
from taskyard.pipeline.transforms.attempts import attempts_of
from taskyard.pipeline.transforms.critical_path import critical_path
from taskyard.pipeline.transforms.guarantees import Guarantees, guarantees_of
from taskyard.pipeline.transforms.links import links
from taskyard.pipeline.transforms.metrics import marks_of_attempts, marks_of_campaign
from taskyard.pipeline.transforms.steps import steps
from taskyard.pipeline.transforms.tasks import placed_tasks, tasks_alone
from taskyard.pipeline.transforms.workers import workers

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import Column, DataFrame

PAGE: Final = "report.html"

#: Rows that a table may have to be one file; a larger one is a directory of them.
ROWS_A_FILE_MAX: Final = 2_000_000

#: Campaigns that an error names.
_CAMPAIGNS_NAMED_MAX: Final = 10


class Datasets(Struct):
    """What a history comes to. Spark holds them until they are let go."""

    campaign: str | None
    #: Of the campaign; workers are everybody's.
    moves: DataFrame
    tasks: DataFrame
    attempts: DataFrame
    workers: DataFrame
    critical_path: DataFrame
    #: Of the whole history.
    guarantees: Guarantees
    held: list[DataFrame]

    def let_go(self) -> None:
        for frame in self.held:
            frame.unpersist()


def datasets(events: DataFrame, edges: DataFrame, campaign: str | None) -> Datasets:
    """The datasets of one campaign, or of all of them as one. What must never happen is counted
    over the whole history."""
    known = _campaigns(events)
    if campaign is None and len(known) == 1:
        campaign = known[0]
    elif campaign is None:
        together = f.when(f.col("campaign").isNotNull(), f.lit(""))
        events = events.withColumn("campaign", together)
    elif campaign not in known:
        raise UserError(_not_known(campaign, known))
    moves = hold(steps(events))
    attempts = hold(attempts_of(moves))
    alone = hold(tasks_alone(moves))
    between = hold(links(alone, edges))
    tasks = hold(placed_tasks(alone, between))
    stays = hold(workers(events, attempts))
    path = hold(critical_path(tasks))
    own = f.lit(True) if campaign is None else f.col("campaign") == campaign  # noqa: FBT003  # Spark's
    return Datasets(
        campaign=campaign,
        moves=moves.where(own),
        tasks=tasks.where(own),
        attempts=attempts.where(own),
        workers=stays,
        critical_path=path.where(own),
        guarantees=guarantees_of(events, moves, tasks, between),
        held=[moves, attempts, alone, between, tasks, stays, path],
    )


def _campaigns(events: DataFrame) -> list[str]:
    named = events.where(f.col("kind") == "submitted").select("campaign").distinct().toArrow()
    return sorted(named.column("campaign").to_pylist())


def _not_known(campaign: str, known: list[str]) -> str:
    text = f"campaign {short(campaign)} is not in this history"
    if not known:
        return f"{text}: nothing has been submitted"
    names = ", ".join(short(one) or "(none)" for one in known[:_CAMPAIGNS_NAMED_MAX])
    more = ", …" if len(known) > _CAMPAIGNS_NAMED_MAX else ""
    return f"{text}; it has {names}{more}"


def facts_of(found: Datasets) -> Facts:
    """The aggregates that the page shows, collected."""
    totals = summaries.totals(found.tasks).toArrow().to_pylist()[0]
    stays = found.workers.toArrow()
    facts = Facts(
        campaign=found.campaign,
        guarantees=found.guarantees,
        totals=totals,
        over_time=OverTime(1, [], [], [], [], []),
        worker_times={},
        workers=stays,
        worker_runs=summaries.runs_by_worker(found.attempts).toArrow(),
        distributions=summaries.distributions(found.attempts).toArrow(),
        lanes=summaries.lanes(found.attempts).toArrow(),
        setbacks=summaries.setbacks(found.attempts).toArrow(),
        levels=summaries.levels(found.tasks).toArrow(),
        critical_path=found.critical_path.toArrow(),
    )
    began_ns, width_ns = facts.began_us * 1000, width_for(facts.makespan_ns)
    marks = marks_of_campaign(found.moves, found.attempts)
    summed = summaries.stretches(marks, began_ns, width_ns, ()).toArrow()
    facts.over_time = over_time(summed, width_ns)
    if len(stays.column("worker").unique()) <= WORKERS_SHOWN_MAX:
        marks = marks_of_attempts(found.attempts)
        summed = summaries.stretches(marks, began_ns, width_ns, ("worker",)).toArrow()
        facts.worker_times = _by_worker(summed, width_ns)
    return facts


def _by_worker(summed: pa.Table, width_ns: int) -> dict[str, OverTime]:
    names = summed.column("worker").unique().to_pylist()
    return {
        name: over_time(summed.filter(pc.equal(summed.column("worker"), name)), width_ns)
        for name in names
    }


def write(found: Datasets, out: Path, footer: str) -> tuple[Path, Facts]:
    """Write the page and the tables; where the page is, and what it says."""
    facts = facts_of(found)
    if not facts.number("tasks"):
        raise UserError("there is nothing to report yet; submit tasks first")
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    unfinished = path.with_name(PAGE + ".new")
    unfinished.write_text(page.write(page_of(facts, footer)), encoding="utf-8")
    for name in TABLES:
        _write_table(getattr(found, name), out / "tables", name)
    unfinished.rename(path)
    return path, facts


#: The tables beside the page.
TABLES: Final = ("tasks", "attempts", "workers", "critical_path")


def _write_table(frame: DataFrame, directory: Path, name: str) -> None:
    """One table, in both formats. A list or a map has no place in CSV, but as text."""
    directory.mkdir(parents=True, exist_ok=True)
    parquet, csv = directory / f"{name}.parquet", directory / f"{name}.csv"
    for path in (parquet, csv):
        _remove(path)
    if frame.limit(ROWS_A_FILE_MAX + 1).count() > ROWS_A_FILE_MAX:
        frame.write.parquet(parquet.absolute().as_uri())
        flat = [_text(one.name, one.dataType.typeName()) for one in frame.schema.fields]
        frame.select(*flat).write.csv(csv.absolute().as_uri(), header=True)
        return
    table = frame.toArrow()
    pa.parquet.write_table(table, parquet, compression="zstd")
    pa.csv.write_csv(_flat(table), csv)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _text(name: str, kind: str) -> Column:
    column = f.col(name)
    return f.to_json(column).alias(name) if kind in ("array", "map") else column


def _flat(table: pa.Table) -> pa.Table:
    """The same with texts in place of lists and maps."""
    for place, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            texts = [None if one is None else str(one) for one in table.column(place).to_pylist()]
            table = table.set_column(place, field.name, pa.array(texts, pa.string()))
    return table
