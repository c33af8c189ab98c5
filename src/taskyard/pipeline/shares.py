"""Shares of the work of `pipeline history`: from table files to table files, without Spark.

A campaign's tables come from its own events, so each share takes some campaigns, or a part of the
tasks of a large one. The graph and the metrics then need all files of linked campaigns. Spark
places and retries the shares: a second try writes the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from msgspec import Struct
from pyspark.sql.pandas.types import to_arrow_schema

from taskyard.pipeline.datasets import (
    ATTEMPTS,
    EVENTS,
    METRICS,
    TASKS_WITHOUT_GRAPH,
    WORKERS,
    Dataset,
)
from taskyard.pipeline.fold.columns import (
    INT_MAX,
    INT_MIN,
    Text,
    constant,
    kept,
    number,
    plain,
    text,
)
from taskyard.pipeline.fold.metrics import WIDTHS_SECONDS, chart_width_ns, divisor_ns, metrics
from taskyard.pipeline.fold.schemas import BUCKETS
from taskyard.pipeline.fold.share import fold_share, share_numbers, worker_buckets
from taskyard.pipeline.fold.stays import MEMBER_COLUMNS, fold_stays
from taskyard.pipeline.fold.steps import CODED, COLUMNS, KINDS
from taskyard.pipeline.layout import DAY, KEY, NO_CAMPAIGN, NO_DAY, campaign_key, folder

#: Events that one share folds at a time. Each takes about a kilobyte of memory.
EVENTS_PER_SHARE: Final = 4_000_000

#: Rows that are read at a time, of a campaign of which a share takes a part.
_ROWS_PER_BATCH: Final = 1_000_000

#: The time whose day a row is stored under.
_DAY_OF: Final = {
    "attempts": "leased",
    "tasks_without_graph": "submitted",
    "workers": "joined",
    "metrics": "bucket",
    "critical_path": "started",
}

_PLACE: Final = pa.schema([(KEY, pa.string()), (DAY, pa.string())])

#: No limit on the directories, one for each campaign and day.
_PARTITIONS_MAX: Final = 1 << 30

_CODED_COLUMNS: Final = ("worker", "outcome", "reason", "kind", "dialect")
_CODED_TYPE: Final = pa.dictionary(pa.int32(), pa.string())

#: The directory of buckets among staged tables, and of the first and last step of each campaign.
_BUCKETS: Final = "buckets"
_SPANS: Final = "spans"
_SPAN: Final = pa.schema([("campaign", pa.string()), ("first", pa.int64()), ("last", pa.int64())])


def key_files(table: Path, keys: Iterable[str]) -> list[Path]:
    """List the files of a table under some keys, in the order of their rows."""
    found = [path for key in keys for path in (table / folder(key)).glob("*/*.parquet")]
    return sorted(found, key=lambda path: (path.name, path.parent))


def row_count(files: Iterable[Path]) -> int:
    return sum(pq.read_metadata(file).num_rows for file in files)


class CampaignFold(Struct, frozen=True):
    """Folds the events of campaigns, or of a part of the tasks of one, into staged tables."""

    keys: tuple[str, ...]
    events: Path
    staged: Path
    #: The number of this share, unique in the run, and its part of the tasks.
    number: int
    part: int = 0
    parts: int = 1

    def __call__(self) -> None:
        events = pa.concat_tables([*self._read()])
        spans = _spans(events)
        spans_ns = pc.subtract(spans["last"], spans["first"]).to_pylist()
        widths = [divisor_ns(chart_width_ns(span_ns)) for span_ns in spans_ns]
        # A long campaign has far too many of the buckets that a short one needs.
        for place, bucket_ns in enumerate(sorted(set(widths))):
            mine = spans.filter(pa.array([width == bucket_ns for width in widths]))
            codes = text(events["campaign"])
            is_mine = codes.is_any(tuple(mine["campaign"].to_pylist()))
            number = self.number * len(WIDTHS_SECONDS) + place
            self._fold(kept(events, is_mine), mine, bucket_ns, number)

    def _fold(self, events: pa.Table, spans: pa.Table, bucket_ns: int, number: int) -> None:
        """Fold campaigns with buckets of one width, and write files of this number."""
        folded = fold_share(events, "", bucket_ns=bucket_ns)
        write_rows(ATTEMPTS, [folded.attempts, folded.attempts_open], self.staged, number)
        write_rows(TASKS_WITHOUT_GRAPH, [folded.tasks, folded.tasks_open], self.staged, number)
        buckets = pa.concat_tables([folded.buckets, folded.buckets_open])
        mine = buckets.filter(pc.not_equal(buckets["scope"], "worker"))
        for name, table in ((_BUCKETS, mine), (_SPANS, spans)):
            path = self.staged / name / f"{number:06}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)

    def _read(self) -> Iterator[pa.Table]:
        """Read the events of this share. Of a large campaign, only some rows are kept."""
        types = {field.name: field.type for field in arrow_schema(EVENTS, COLUMNS)}
        types |= dict.fromkeys(CODED, _CODED_TYPE)
        schema = pa.schema([(name, types[name]) for name in COLUMNS])
        yield schema.empty_table()
        for file in key_files(self.events, self.keys):
            source = pq.ParquetFile(file, read_dictionary=[*CODED])
            for batch in source.iter_batches(_ROWS_PER_BATCH, columns=[*COLUMNS]):
                table = pa.Table.from_batches([batch])
                if self.parts > 1:
                    shares = share_numbers(table["task"], self.parts)
                    table = table.filter(pa.array(shares == self.part))
                yield table.select(COLUMNS).cast(schema)


def fold_shares(keys: Iterable[str], events: Path, staged: Path) -> Iterator[CampaignFold]:
    """Divide campaigns into shares of about equal size. A large one is divided by its tasks."""
    number, waiting, waiting_rows = 0, list[str](), 0
    for key in keys:
        rows = row_count(key_files(events, [key]))
        parts = -(-rows // EVENTS_PER_SHARE)
        if parts > 1:
            for part in range(parts):
                yield CampaignFold((key,), events, staged, number, part, parts)
                number += 1
            continue
        if waiting and waiting_rows + rows > EVENTS_PER_SHARE:
            yield CampaignFold(tuple(waiting), events, staged, number)
            number, waiting, waiting_rows = number + 1, [], 0
        waiting.append(key)
        waiting_rows += rows
    if waiting:
        yield CampaignFold(tuple(waiting), events, staged, number)


def _spans(events: pa.Table) -> pa.Table:
    """Return the first and the last step of each campaign."""
    campaigns, times_ns = text(events["campaign"]), number(events["time_ns"]).values
    known = (campaigns.codes >= 0) & text(events["kind"]).is_any(KINDS)
    first = np.full(len(campaigns.values), INT_MAX)
    last = np.full(len(campaigns.values), INT_MIN)
    np.minimum.at(first, campaigns.codes[known], times_ns[known])
    np.maximum.at(last, campaigns.codes[known], times_ns[known])
    found = pa.table({"campaign": campaigns.values, "first": first, "last": last}, schema=_SPAN)
    return found.filter(pa.array(first <= last))


class CampaignMetrics(Struct, frozen=True):
    """Turns staged buckets into the metrics of all campaigns of a run."""

    staged: Path
    number: int = 0

    def __call__(self) -> None:
        if not (self.staged / _BUCKETS).is_dir():
            return
        buckets = ds.dataset(self.staged / _BUCKETS, schema=BUCKETS).to_table(use_threads=False)
        spans = ds.dataset(self.staged / _SPANS, schema=_SPAN).to_table(use_threads=False)
        whole = spans.group_by("campaign").aggregate([("first", "min"), ("last", "max")])
        spans_ns = pc.subtract(whole["last_max"], whole["first_min"]).to_pylist()
        widths = [chart_width_ns(span_ns) for span_ns in spans_ns]
        none = arrow_schema(WORKERS).empty_table()
        made = []
        for width_ns in sorted(set(widths)):
            names = whole["campaign"].filter(pa.array([one == width_ns for one in widths]))
            mine = buckets.filter(pc.is_in(buckets["campaign"], names.combine_chunks()))
            made.append(metrics([mine], none, width_ns))
        write_rows(METRICS, made, self.staged, self.number)


class WorkersFold(Struct, frozen=True):
    """Makes the tables of workers and of their metrics from all attempts."""

    events: Path
    attempts: Path
    staged: Path

    def __call__(self) -> None:
        members = _read(EVENTS, MEMBER_COLUMNS, key_files(self.events, [NO_CAMPAIGN]))
        attempts = _read(ATTEMPTS, _ATTEMPT_COLUMNS, sorted(self.attempts.rglob("*.parquet")))
        is_open = pc.is_null(attempts["settled"])
        ended, still_open = attempts.filter(pc.invert(is_open)), attempts.filter(is_open)
        stays = fold_stays(members, ended, still_open, "")
        workers = pa.concat_tables([stays.workers, stays.workers_open]).unify_dictionaries()
        write_rows(WORKERS, [workers], self.staged, 0)
        if len(attempts):
            width_ns = chart_width_ns(_span_ns(attempts))
            buckets = worker_buckets(attempts, "", width_ns)
            write_rows(METRICS, [metrics([buckets], workers, width_ns)], self.staged, 0)


def _span_ns(attempts: pa.Table) -> int:
    """Return the time from the first lease to the last end, which may be after the last lease."""
    leased_ns = number(attempts["leased_ns"]).values
    start_ns = leased_ns + number(attempts["queued_ns"]).filled(0)
    run_ns, settled = number(attempts["run_ns"]), number(attempts["settled"])
    over_ns = np.where(settled.is_known, settled.values * 1000, start_ns)
    end_ns = np.where(run_ns.is_known, start_ns + run_ns.values, over_ns)
    return int(end_ns.max() - leased_ns.min())


#: Columns of attempts that stays and the metrics of workers need.
_ATTEMPT_COLUMNS: Final = (
    *("worker", "leased_record", "leased_ns", "queued_ns", "run_ns", "wait_ns", "settled"),
    *("outcome", "own_fault", "reason"),
)


def arrow_schema(dataset: Dataset, names: Iterable[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of a dataset, or of some of its columns."""
    whole = to_arrow_schema(dataset.schema, timezone="UTC")
    return whole if names is None else pa.schema([whole.field(name) for name in names])


def _read(dataset: Dataset, names: tuple[str, ...], files: list[Path]) -> pa.Table:
    """Read some columns of files of a table. Columns of few strings are coded."""
    fields = [
        pa.field(field.name, _CODED_TYPE) if field.name in _CODED_COLUMNS else field
        for field in arrow_schema(dataset, names)
    ]
    schema = pa.schema(fields)
    coded = [name for name in names if name in _CODED_COLUMNS]
    tables = [
        pq.read_table(file, columns=[*names], read_dictionary=coded, partitioning=None).cast(schema)
        for file in files
    ]
    return pa.concat_tables([schema.empty_table(), *tables]).unify_dictionaries()


def write_rows(dataset: Dataset, tables: list[pa.Table], staged: Path, share: int) -> None:
    """Write rows of a dataset to files by campaign and day."""
    names = dataset.names
    rows = pa.concat_tables([table.select(names) for table in tables]).unify_dictionaries()
    if not len(rows):
        return
    key, day = _keys(dataset, rows), _days(rows[_DAY_OF[dataset.name]])
    if len(key.values) == len(day.values) == 1:
        path = staged / dataset.name / folder(key.values[0].as_py()) / f"{DAY}={day.values[0]}"
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{share:06}-0.parquet"
        pq.write_table(rows, file, compression="zstd", store_schema=False)
        return
    whole = plain(rows, arrow_schema(dataset))
    for name, column in ((KEY, key), (DAY, day)):
        whole = whole.append_column(name, column.arrow.cast(pa.string()))
    kind = ds.ParquetFileFormat()
    ds.write_dataset(
        whole,
        staged / dataset.name,
        format=kind,
        file_options=kind.make_write_options(compression="zstd"),
        partitioning=ds.partitioning(_PLACE, flavor="hive"),
        basename_template=f"{share:06}-{{i}}.parquet",
        # A second try by Spark writes the same files.
        existing_data_behavior="overwrite_or_ignore",
        max_partitions=_PARTITIONS_MAX,
        use_threads=False,
    )


def _keys(dataset: Dataset, rows: pa.Table) -> Text:
    """Return the key of each row's campaign, computed once for each name."""
    if "campaign" not in dataset.names:
        return text(constant(NO_CAMPAIGN, len(rows)))
    campaigns = text(rows["campaign"])
    keys = [campaign_key(name) for name in campaigns.values.to_pylist()]
    return _filled(Text(campaigns.codes, pa.array(keys, pa.string())), NO_CAMPAIGN)


def _days(times: pa.ChunkedArray) -> Text:
    """Return the day of each time, formatted once for each day."""
    return _filled(text(pc.dictionary_encode(times.cast(pa.date32()))), NO_DAY)


def _filled(column: Text, value: str) -> Text:
    """Return a column with a value in place of null."""
    is_null = column.codes < 0
    if not is_null.any():
        return column
    values = pa.concat_arrays([column.values, pa.array([value], pa.string())])
    return Text(np.where(is_null, len(column.values), column.codes), values)
