"""Compare the tables of the fold with those of Spark's transforms, column by column.

    python tools/compare_fold.py [SCHEDULES] [--start SEED]
    python tools/compare_fold.py --state DIR

Takes the histories of simulated schedules as one, or the exported history of a state. Runs the
transforms on Spark and the fold, and prints the differences of each table. Exits with 1 if there
are any but those of `is_expected`.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Struct

from simulator.histories import history
from taskyard.journal.history import parts
from taskyard.journal.parquet_file import EDGES, EVENTS, TABLES, read_table
from taskyard.pipeline.fold.buckets import MINUTE_NS
from taskyard.pipeline.fold.histograms import bins
from taskyard.pipeline.fold.metrics import metrics
from taskyard.pipeline.fold.places import placed_tasks
from taskyard.pipeline.fold.share import fold_share
from taskyard.pipeline.fold.stays import fold_stays

BROKER: Final = "compared"

#: A second, so that the short schedules have many intervals.
SECOND_NS: Final = 1_000_000_000

#: Columns that identify a row.
KEYS: Final = {
    "attempts": ("campaign", "task", "attempt", "leased_record"),
    "tasks": ("campaign", "task", "generation"),
    "workers": ("worker", "stay"),
    "critical_path": ("campaign", "position"),
    "metrics": ("scope", "campaign", "service", "lane", "worker", "bucket"),
}

#: Percentiles have the same rank, and come from the middle of their bin.
_BINNED: Final = tuple(f"{name}_{part}_ns" for name in ("wait", "run") for part in ("p50", "p95"))


Rows = list[dict[str, Any]]


def is_expected(name: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> bool:
    """Return whether two rows differ on purpose, if they do.

    Before a worker's first start, a lease alone made a row without slots, and none up to the start.
    """
    return (
        name == "metrics"
        and new is not None
        and new["scope"] == "worker"
        and new["running"] == new["busy_ns"] == 0
        and (old is None or old["utilisation"] is None)
    )


class Tables(Struct, frozen=True):
    """The tables of one history, by name."""

    by_name: dict[str, pa.Table]


def merged(seeds: Iterable[int]) -> tuple[pa.Table, pa.Table]:
    """Return the events and edges of some schedules as one history. Names get a prefix."""
    events, edges, last = [EVENTS.empty_table()], [EDGES.empty_table()], 0
    for seed in seeds:
        found = history(seed)
        prefix = f"s{seed} "
        events.append(_moved(found.events, last, prefix, ("campaign", "task", "worker")))
        edges.append(_moved(found.edges, last, prefix, ("task", "after")))
        last = max(pc.max(events[-1][name]).as_py() for name in ("sequence", "record"))
    return pa.concat_tables(events), pa.concat_tables(edges)


def read_state(state: Path) -> tuple[pa.Table, pa.Table]:
    """Return the events and edges in the history files of a state."""
    whole, _ = parts(state)
    files = [part.paths(state) for part in whole]
    events, edges = (
        pa.concat_tables([TABLES[table].empty_table(), *(read_table(one[table]) for one in files)])
        for table in ("events", "edges")
    )
    return events, edges


def _moved(table: pa.Table, last: int, prefix: str, names: tuple[str, ...]) -> pa.Table:
    columns = {name: table[name] for name in table.column_names}
    for name in names:
        columns[name] = pc.binary_join_element_wise(prefix, columns[name], "")
    for name in ("sequence", "record"):
        columns[name] = pc.add(columns[name], last)
    return pa.table(columns, schema=table.schema)


def fold_tables(events: pa.Table, edges: pa.Table, bucket_ns: int = MINUTE_NS) -> Tables:
    """Return all tables of a history by the fold, as one share."""
    folded = fold_share(events, BROKER, bucket_ns=bucket_ns)
    attempts = pa.concat_tables([folded.attempts, folded.attempts_open]).unify_dictionaries()
    tasks = pa.concat_tables([folded.tasks, folded.tasks_open]).unify_dictionaries()
    placed = placed_tasks(tasks, edges)
    stays = fold_stays(events, folded.attempts, folded.attempts_open, BROKER)
    workers = pa.concat_tables([stays.workers, stays.workers_open]).unify_dictionaries()
    found = metrics([folded.buckets, folded.buckets_open], workers, bucket_ns)
    return Tables(
        {
            "attempts": attempts,
            "tasks": placed.tasks,
            "workers": workers,
            "critical_path": placed.critical_path,
            "metrics": found,
        }
    )


def transform_tables(events: pa.Table, edges: pa.Table, directory: Path) -> Tables:
    """Return all tables of a history by the transforms, with intervals of a second."""
    from taskyard.pipeline import datasets  # noqa: PLC0415  # Spark is only for the comparison
    from taskyard.pipeline.placement import tasks_from_steps  # noqa: PLC0415
    from taskyard.pipeline.session import cache, session_scope  # noqa: PLC0415
    from taskyard.pipeline.sources.history import frame  # noqa: PLC0415
    from taskyard.pipeline.transforms import metrics as by_spark  # noqa: PLC0415
    from taskyard.pipeline.transforms.steps import attempts_from_steps, steps  # noqa: PLC0415
    from taskyard.pipeline.transforms.tasks import critical_path  # noqa: PLC0415
    from taskyard.pipeline.transforms.workers import workers  # noqa: PLC0415

    # The shortest width that has enough intervals is used. Spark counts in 64 bits for the second.
    by_spark.WIDTHS_SECONDS = (1, 10)  # type: ignore[misc, assignment]
    by_spark.BUCKETS_MAX = 10_000_000  # type: ignore[misc]
    files = {"events": directory / "events.parquet", "edges": directory / "edges.parquet"}
    pq.write_table(events, files["events"])
    pq.write_table(edges, files["edges"])
    with session_scope("compare", "local[2]") as spark:
        all_events = frame(spark, datasets.EVENTS, [files["events"]])
        task_steps = cache(steps(all_events.where("campaign is not null")))
        made = cache(attempts_from_steps(task_steps))
        known = cache(tasks_from_steps(task_steps, frame(spark, datasets.EDGES, [files["edges"]])))
        stays = cache(workers(all_events, made))
        of_campaigns = by_spark.metrics_table(
            by_spark.campaign_sums(task_steps, made), by_spark.campaign_times(task_steps, made)
        )
        of_workers = by_spark.metrics_table(
            by_spark.worker_sums(made, stays), by_spark.worker_times(made)
        )
        frames = {
            "attempts": made,
            "tasks": known,
            "workers": stays,
            "critical_path": critical_path(known),
            "metrics": of_campaigns.unionByName(of_workers),
        }
        return Tables({name: one.toArrow() for name, one in frames.items()})


def differences(name: str, old: Rows, new: Rows) -> list[str]:
    """Describe the differences between two tables. Columns that only the fold has are left out."""
    found: list[str] = []
    old_rows, new_rows = (_by_key(name, rows) for rows in (old, new))
    for key in [*old_rows, *(key for key in new_rows if key not in old_rows)]:
        one, other = old_rows.get(key), new_rows.get(key)
        if is_expected(name, one, other):
            continue
        if one is None or other is None:
            found.append(f"{name} {key}: only in the {'fold' if one is None else 'old table'}")
            continue
        found += [
            f"{name} {key}: {column} is {other.get(column, 'missing')}, was {value}"
            for column, value in one.items()
            if column not in other or value != other[column]
        ]
    return found


def _by_key(name: str, rows: Rows) -> dict[Any, dict[str, Any]]:
    plain_rows = [
        {column: _plain_value(column, value) for column, value in row.items()} for row in rows
    ]
    found = {tuple(row[key] for key in KEYS[name]): row for row in plain_rows}
    if len(found) != len(rows):
        raise ValueError(f"{name}: rows share a key")
    return found


def _plain_value(column: str, value: Any) -> Any:  # noqa: ANN401  # values of any column
    """Return a value as both sides have it: Spark's times are naive, Arrow's maps are lists."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    if column in _BINNED and value is not None:
        return int(bins(np.array([value]))[0])
    return value


def compare(old: Tables, new: Tables) -> list[str]:
    """Describe all differences between the tables of a history."""
    return [
        line for name in KEYS for line in differences(name, old.by_name[name], new.by_name[name])
    ]


def main(arguments: list[str]) -> int:
    """Compare the tables of simulated schedules. Return 1 if they differ."""
    parser = argparse.ArgumentParser(prog="compare_fold.py", description=__doc__)
    parser.add_argument("schedules", nargs="?", type=int, default=60)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--state", type=Path, help="a state directory, in place of schedules")
    options = parser.parse_args(arguments)
    seeds = range(options.start, options.start + options.schedules)
    events, edges = merged(seeds) if options.state is None else read_state(options.state)
    with tempfile.TemporaryDirectory(prefix="taskyard-compare-") as directory:
        old = transform_tables(events, edges, Path(directory))
    new = fold_tables(events, edges, SECOND_NS)
    found = compare(old, new)
    for line in found:
        print(line)
    rows = {name: len(table) for name, table in old.by_name.items()}
    print(f"{len(events)} events, {len(edges)} edges, rows {rows}: {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
