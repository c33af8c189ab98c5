"""`load --spark`: validate campaign files in Spark and submit them from its partitions.

Read, validate, write the rejects, submit. Nothing is submitted before validation is complete. By
default, a single reject prevents the submission. Tasks are submitted in the order of the files if
every dependency comes before its dependents there, otherwise level by level. So at any time the
broker has every dependency of the tasks that it has. A second run after a kill submits the missing
tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, starmap
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw, Struct

from taskyard.campaign.reader import REJECTED_MAX, RejectedRow, too_many_error
from taskyard.campaign.submitter import SubmitCounts, problem_of
from taskyard.core.identity import split
from taskyard.errors import Refused, TaskProblem, TaskyardError, UserError
from taskyard.pipeline import submit, validate
from taskyard.pipeline.arrow_rows import pack, prepared_to_row, row_text, unpack
from taskyard.pipeline.datasets import REJECTS
from taskyard.pipeline.sources import campaigns
from taskyard.pipeline.sources.campaigns import tasks_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from taskyard.pipeline.fold.columns import Array
    from taskyard.pipeline.sources.campaigns import CampaignFiles
    from taskyard.pipeline.submit import Target
    from taskyard.pipeline.validate import ValidationResult

#: Tasks of a Spark job. Progress is shown after each job, and a job takes a tenth of a second more.
JOB_TASKS: Final = 200_000

#: Tasks that one partition submits if a level has more than a job's.
PORTION_TASKS: Final = 50_000

#: Called with a stage, the number of its rows that are done, and the total, None if unknown.
OnStage = Callable[[str, int, int | None], None]

#: A function that Spark runs in a partition.
_PartitionFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

#: Acts on the tasks of a partition. Adds to the counts, or yields the problems of tasks.
_Action = Callable[[Iterable[pa.RecordBatch], SubmitCounts], Iterable[TaskProblem]]

#: The counts of a partition, and a row for each `TaskProblem`, or one without.
_OUTCOME: Final = "new long, existing long, name string, code string, text string"


def _ignore(_stage: str, _done: int, _total: int | None) -> None:
    pass


class CheckedCampaign(Struct):
    """Validated files. Close it to release the rows that Spark caches."""

    campaign: CampaignFiles
    chunks: DataFrame
    #: All columns but payloads and lanes, in the order of places.
    table: pa.Table
    #: The rows of each chunk in the table, by the chunk's place, in order.
    chunk_rows: dict[int, range]
    validation: ValidationResult
    rejects: list[RejectedRow]

    def revalidate(self, existing: Iterable[str]) -> None:
        """Validate again, and reject dependencies that neither the files nor `existing` have."""
        if not self.validation.unknown:
            return
        where = self.campaign.where
        self.validation = validate.validate(
            self.table, where, existing=existing, reject_unknown=True
        )
        self.rejects = _rejects(self.campaign, self.chunks, self.table, self.validation)

    def close(self) -> None:
        self.chunks.unpersist()

    def rejects_frame(self, spark: SparkSession) -> DataFrame:
        """Return the rejected rows as the dataset `rejects`."""
        encode = msgspec.json.encode
        rows = [(one.file, one.line, one.reason, encode(one.raw).decode()) for one in self.rejects]
        return spark.createDataFrame(rows, REJECTS.schema)


def read(
    spark: SparkSession,
    campaign: CampaignFiles,
    target: Target | None = None,
    on_stage: OnStage = _ignore,
) -> CheckedCampaign:
    """Read and validate campaign files. Raises UserError for an unreadable file.

    Lanes are set by the templates of the target's broker. Without a target, the lanes of bundles
    are their recipients, and other lanes are set when tasks are submitted.
    """
    on_stage("reading", 0, None)
    chunks = campaigns.read(spark, campaign, target).persist()
    found = chunks.select("place", "graph").toArrow().sort_by("place")
    tables = [unpack([graph]) for graph in found["graph"]]
    table = pa.concat_tables([validate.SCHEMA.empty_table(), *tables])
    on_stage("validating", 0, len(table))
    _check_files(table)
    validation = validate.validate(table, campaign.where)
    bounds = pairwise(accumulate(map(len, tables), initial=0))
    rows = dict(zip(found["place"].to_pylist(), starmap(range, bounds), strict=True))
    rejects = _rejects(campaign, chunks, table, validation)
    return CheckedCampaign(campaign, chunks, table, rows, validation, rejects)


def _check_files(table: pa.Table) -> None:
    """Raise UserError if a file can't be read to its end: its missing rows are unknown."""
    is_refused = pc.and_(pc.is_valid(table["reason"]), pc.is_null(table["row"]))
    refused = table.filter(is_refused)["reason"].to_pylist()
    if refused:
        more = f" (and {len(refused) - 1} more files)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0]}{more}")


def _rejects(
    campaign: CampaignFiles, chunks: DataFrame, table: pa.Table, validation: ValidationResult
) -> list[RejectedRow]:
    """List invalid rows, then rows with invalid names or dependencies."""
    bad = table.filter(pc.is_valid(table["reason"]))
    if len(bad) + len(validation.rejected) > REJECTED_MAX:
        reasons = validation.rejected
        if len(bad):
            reasons = {bad["place"][0].as_py(): bad["reason"][0].as_py()}
        place, reason = next(iter(reasons.items()))
        raise too_many_error(RejectedRow(*campaign.where(place), reason, None))
    found = [
        (place, reason, Raw(row.encode()))
        for place, reason, row in zip(
            *(bad[name].to_pylist() for name in ("place", "reason", "row")), strict=True
        )
    ]
    rows = _rows_at_places(chunks, list(validation.rejected))
    found += [(place, validation.rejected[place], Raw(row.encode())) for place, row in rows]
    found.sort(key=lambda one: one[0])
    return [RejectedRow(*campaign.where(place), reason, row) for place, reason, row in found]


def _rows_at_places(chunks: DataFrame, places: list[int]) -> list[tuple[int, str]]:
    """Return the tasks or bundles at these places, as a file would have them."""
    if not places:
        return []
    wanted = pa.array(places, pa.int64())

    def pick(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in range(batch.num_rows):
                tasks = tasks_of(batch, number)
                rows = tasks.filter(pc.is_in(tasks["place"], value_set=wanted)).to_pylist()
                found = {task["place"]: task for task in reversed(rows)}  # the first of a bundle
                texts = [row_text(prepared_to_row(task)) for task in found.values()]
                columns = [pa.array(found, pa.int64()), pa.array(texts, pa.string())]
                yield pa.RecordBatch.from_arrays(columns, ["place", "row"])

    picked = chunks.mapInArrow(pick, "place long, row string")
    return [(row.place, row.row) for row in picked.collect()]


# Submitting.


class _Selection(Struct):
    """The rows of some chunks that are submitted, as sent to partitions."""

    #: The rows of each chunk, by the chunk's place.
    chunk_rows: dict[int, range]
    #: Whether each row is submitted, from the first chunk on. None: all are.
    is_valid: Array | None

    def tasks(self, chunk: pa.RecordBatch, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the tasks of a chunk, by its number in the batch."""
        tasks = tasks_of(chunk, number)
        if self.is_valid is not None:
            first = next(iter(self.chunk_rows.values())).start
            rows = self.chunk_rows[chunk["place"][number].as_py()]
            is_valid = self.is_valid[rows.start - first : rows.stop - first]
            tasks = tasks.filter(pa.array(is_valid))
        yield from tasks.combine_chunks().to_batches()


def submit_all(
    checked: CheckedCampaign, target: Target, on_stage: OnStage = _ignore
) -> SubmitCounts:
    """Submit all valid tasks, in Spark jobs one after the other. Raises `Refused`."""
    total = len(checked.validation.rows)
    counts = SubmitCounts()
    on_stage("submitting", 0, total)
    make_jobs = _jobs_by_file if checked.validation.is_topological else _jobs_by_level
    for job in make_jobs(checked, target) if total else ():
        outcomes = job.collect()
        for row in outcomes:
            counts.add(SubmitCounts(row.new, row.existing))
        for row in outcomes:
            if row.text is not None:
                raise _refusal(checked, row, counts)
        on_stage("submitting", counts.new + counts.existing, total)
    return counts


def _refusal(checked: CheckedCampaign, row: Row, counts: SubmitCounts) -> Refused:
    names = (row.name,) if row.name else ()
    text = f"{_place_prefix(checked, row.name)}{row.text}, {counts.partial_note()}"
    return Refused(text, row.code, names)


def conflicts(checked: CheckedCampaign, target: Target, on_stage: OnStage = _ignore) -> list[str]:
    """List tasks that the broker would refuse, such as names in use. Submits nothing."""
    if not len(checked.validation.rows):
        return []
    on_stage("comparing with the broker", 0, len(checked.validation.rows))

    def find(tasks: Iterable[pa.RecordBatch], _counts: SubmitCounts) -> Iterable[TaskProblem]:
        return submit.conflicts(tasks, target)

    selection = _selection(checked, [*checked.chunk_rows])
    found = checked.chunks.mapInArrow(_function(_any_order(selection), find), _OUTCOME)
    problems = found.where("text IS NOT NULL").collect()
    return [f"{_place_prefix(checked, row.name)}{row.text}" for row in problems]


def _place_prefix(checked: CheckedCampaign, full_name: str) -> str:
    """Return the file and line of a task for a message, or "" for no task."""
    if not full_name:
        return ""
    name = split(full_name, checked.campaign.options.campaign)
    row = pc.index(checked.table["name"], name).as_py()
    if row < 0:
        return ""
    file, line = checked.campaign.where(checked.table["place"][row].as_py())
    return f"{file}:{line}: "


def _submit_action(target: Target) -> _Action:
    def submit_tasks(
        tasks: Iterable[pa.RecordBatch], counts: SubmitCounts
    ) -> Iterable[TaskProblem]:
        submit.submit(tasks, target, counts)
        return ()

    return submit_tasks


def _function(
    tasks_in: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], act: _Action
) -> _PartitionFunction:
    """Return the function that acts on the tasks that `tasks_in` finds in the rows of Spark."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = SubmitCounts()
        try:
            problems = list(act(tasks_in(batches), counts))
        except TaskyardError as error:  # returned as data: Spark would retry, and print pages
            problems = [problem_of(error)]
        yield _outcome(counts, problems)

    return run


def _outcome(counts: SubmitCounts, problems: Sequence[TaskProblem]) -> pa.RecordBatch:
    rows: Sequence[Sequence[str | None]] = problems or [[None] * 3]
    names, codes, texts = zip(*rows, strict=True)
    first = [1, *([0] * (len(rows) - 1))]  # the counts are of the partition, not of each row
    return pa.RecordBatch.from_pydict(
        {
            "new": pa.array([counts.new * one for one in first], pa.int64()),
            "existing": pa.array([counts.existing * one for one in first], pa.int64()),
            "name": pa.array(names, pa.string()),
            "code": pa.array(codes, pa.string()),
            "text": pa.array(texts, pa.string()),
        }
    )


# In the order of the files.


def _jobs_by_file(checked: CheckedCampaign, target: Target) -> Iterator[DataFrame]:
    """Yield a job for some consecutive chunks.

    Tasks without dependencies are submitted by all partitions at once, others by one partition.
    """
    is_flat = len(checked.validation.sizes) == 1
    for places in _groups(checked.chunk_rows):
        chunks = checked.chunks.where(f"place BETWEEN {places[0]} AND {places[-1]}")
        selection = _selection(checked, places)
        tasks_in = _any_order(selection) if is_flat else _file_order(selection)
        chunks = chunks if is_flat else chunks.coalesce(1)
        yield chunks.mapInArrow(_function(tasks_in, _submit_action(target)), _OUTCOME)


def _groups(chunk_rows: dict[int, range]) -> Iterator[list[int]]:
    """Yield the places of consecutive chunks that have enough tasks for a job."""
    places: list[int] = []
    rows = 0
    for place, own in chunk_rows.items():
        places.append(place)
        rows += len(own)
        if rows >= JOB_TASKS:
            yield places
            places, rows = [], 0
    if places:
        yield places


def _selection(checked: CheckedCampaign, places: Sequence[int]) -> _Selection:
    """Return the valid rows of consecutive chunks."""
    chunk_rows = {place: checked.chunk_rows[place] for place in places}
    is_valid = np.zeros(len(checked.table), bool)
    is_valid[checked.validation.rows] = True
    own = is_valid[chunk_rows[places[0]].start : chunk_rows[places[-1]].stop]
    return _Selection(chunk_rows, None if own.all() else own)


def _any_order(
    selection: _Selection,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def tasks_in(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in range(batch.num_rows):
                yield from selection.tasks(batch, number)

    return tasks_in


def _file_order(
    selection: _Selection,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def tasks_in(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the tasks of all chunks. A chunk that arrives early waits for those before it."""
        places = iter(sorted(selection.chunk_rows))
        place = next(places)
        waiting: dict[int, tuple[pa.RecordBatch, int]] = {}
        for batch in batches:
            for number, arrived in enumerate(batch["place"].to_pylist()):
                waiting[arrived] = (batch, number)
                while place in waiting:
                    yield from selection.tasks(*waiting.pop(place))
                    place = next(places, -1)

    return tasks_in


# Level by level.


def plan(
    sizes: Sequence[int], *, wave: int = JOB_TASKS, portion: int = PORTION_TASKS
) -> list[list[int]]:
    """Plan the waves. A wave is the bounds of its portions in the order of submission.

    Small levels share a portion. A level that is larger than a wave is spread over portions.
    """
    waves: list[list[int]] = []
    done = gathered = 0
    for size in [*sizes, wave + 1]:
        if gathered and gathered + size > wave:
            waves.append([done, done + gathered])
            done, gathered = done + gathered, 0
        if size > wave:
            count = -(-size // portion)
            waves.append([done + size * number // count for number in range(count + 1)])
            done += size
        else:
            gathered += size
    return waves[:-1]


def _jobs_by_level(checked: CheckedCampaign, target: Target) -> Iterator[DataFrame]:
    """Yield a job for each wave, with one partition for each of its portions."""
    validation = checked.validation
    turns = np.full(len(checked.table), len(checked.table), np.uint32)
    turns[validation.rows] = np.arange(len(validation.rows))
    places = checked.table["place"].to_numpy()[validation.rows]
    # A bundle is one message, so no portion ends within it.
    begins = np.append(np.flatnonzero(np.diff(places, prepend=-1)), len(places))
    for bounds in plan(np.bincount(validation.levels).tolist()):
        whole = begins[np.searchsorted(begins, bounds)]
        cut = _cut_function(checked.chunk_rows, turns, whole)
        pieces = checked.chunks.mapInArrow(cut, "portion int, tasks binary")
        portions = pieces.repartitionById(len(bounds) - 1, "portion").select("tasks")
        yield portions.mapInArrow(_function(_sorted_portion, _submit_action(target)), _OUTCOME)


def _cut_function(chunk_rows: dict[int, range], turns: Array, bounds: Array) -> _PartitionFunction:
    """Return the function that divides chunks by portion. Other tasks are left out."""

    def cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number, place in enumerate(batch["place"].to_pylist()):
                rows = chunk_rows[place]
                turn = turns[rows.start : rows.stop]
                is_wanted = (turn >= bounds[0]) & (turn < bounds[-1])
                if is_wanted.any():
                    tasks = tasks_of(batch, number).filter(pa.array(is_wanted))
                    yield _pieces(tasks, turn[is_wanted], bounds)

    return cut


def _pieces(tasks: pa.Table, turns: Array, bounds: Array) -> pa.RecordBatch:
    """Split tasks by portion, in the order of submission."""
    order = np.argsort(turns)
    ends = np.searchsorted(turns[order], bounds)
    tasks = tasks.append_column("turn", pa.array(turns, pa.int64())).take(pa.array(order))
    numbers = np.flatnonzero(np.diff(ends))
    packed = [
        pack(tasks.slice(ends[number], ends[number + 1] - ends[number]))
        for number in numbers.tolist()
    ]
    return pa.RecordBatch.from_pydict(
        {"portion": pa.array(numbers, pa.int32()), "tasks": pa.array(packed, pa.binary())}
    )


def _sorted_portion(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the tasks of a portion in the order of submission."""
    pieces = [piece for batch in batches for piece in batch["tasks"]]
    if pieces:
        yield from unpack(pieces).sort_by("turn").combine_chunks().to_batches()
