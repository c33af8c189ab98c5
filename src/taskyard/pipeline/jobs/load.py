"""`pipeline load`: validate campaign files in Spark and submit them from its partitions.

Read, validate, write the rejects, submit. Nothing is submitted before validation is complete. By
default, a single reject prevents the submission. Tasks are submitted level by level, in waves of
one Spark job each. So at any time the broker has every dependency of the tasks that it has. A
second run after a kill submits the missing tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw, Struct
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from taskyard.campaign.rejects import REJECTED_MAX, RejectedRow, too_many_error
from taskyard.campaign.submitter import SubmitCounts, problem_of
from taskyard.core.identity import split
from taskyard.errors import Refused, TaskProblem, TaskyardError, UserError
from taskyard.pipeline import submit, validate
from taskyard.pipeline.arrow_rows import SharedTerms, pack, prepared_to_row, row_text, unpack
from taskyard.pipeline.datasets import REJECTS
from taskyard.pipeline.sources import campaigns
from taskyard.pipeline.submit import Target
from taskyard.pipeline.validate import Numbers, ValidationResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from taskyard.campaign.formats import FileOptions
    from taskyard.pipeline.sources.campaigns import CampaignFiles

#: The least tasks in a wave of small levels. A Spark job takes a tenth of a second.
WAVE_TASKS_MIN: Final = 50_000

#: Tasks that one partition submits if a level is larger.
PORTION_TASKS: Final = 50_000

#: Called with the number of tasks submitted and the total.
Progress = Callable[[int, int], None]

#: A function that Spark runs in a partition.
_PartitionFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

#: Yields the problems of tasks, in a partition.
_ProblemFinder = Callable[[Iterable[pa.RecordBatch], Target], Iterator[TaskProblem]]

#: The counts of a portion, and a row for each `TaskProblem`, or one without.
_OUTCOME: Final = "new long, existing long, name string, code string, text string"


class CheckedCampaign(Struct):
    """Validated files. Close it to release the rows that Spark caches."""

    campaign: CampaignFiles
    chunks: DataFrame
    #: All columns but the payloads.
    table: pa.Table
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


def read(spark: SparkSession, files: Sequence[str], options: FileOptions) -> CheckedCampaign:
    """Read and validate campaign files. Raises UserError for an unreadable file."""
    campaign = campaigns.plan(files, options)
    chunks = campaigns.read(spark, campaign).persist(StorageLevel.MEMORY_AND_DISK)
    table = unpack(chunks.select("graph").toArrow()["graph"])
    _check_files(table)
    validation = validate.validate(table, campaign.where)
    return CheckedCampaign(
        campaign, chunks, table, validation, _rejects(campaign, chunks, table, validation)
    )


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
    """Return the tasks at these places, as a file would have them."""
    if not places:
        return []
    wanted = pa.array(places, pa.int64())

    def pick(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            tasks = unpack(batch["tasks"])
            found = tasks.filter(pc.is_in(tasks["place"], value_set=wanted)).to_pylist()
            columns = {
                "place": pa.array([task["place"] for task in found], pa.int64()),
                "row": pa.array([row_text(prepared_to_row(task)) for task in found], pa.string()),
            }
            yield pa.RecordBatch.from_pydict(columns)

    picked = chunks.select("tasks").mapInArrow(pick, "place long, row string")
    return [(row.place, row.row) for row in picked.collect()]


# Submitting.


class SubmitPlan(Struct):
    """The order of submission: waves of portions, with one Spark partition for each portion."""

    #: The portion of each task, in the order of `ValidationResult.places`.
    portions: Numbers
    #: The portions of each wave.
    waves: list[range]
    #: Tasks in each wave.
    sizes: list[int]


def plan(
    sizes: Sequence[int], *, wave: int = WAVE_TASKS_MIN, portion: int = PORTION_TASKS
) -> SubmitPlan:
    """Plan the waves.

    A portion may span several small levels. A large level is spread over several portions.
    """
    waves: list[range] = []
    totals: list[int] = []
    portions: list[int] = []
    gathered = 0
    for level, size in enumerate(sizes):
        gathered += size
        if gathered < wave and level < len(sizes) - 1:
            continue
        count = -(-gathered // portion) if gathered == size else 1
        first = waves[-1].stop if waves else 0
        waves.append(range(first, first + count))
        totals.append(gathered)
        portions += [gathered * (n + 1) // count - gathered * n // count for n in range(count)]
        gathered = 0
    return SubmitPlan(np.repeat(np.arange(len(portions)), portions), waves, totals)


def submit_all(
    checked: CheckedCampaign, target: Target, progress: Progress = lambda _done, _total: None
) -> SubmitCounts:
    """Submit all valid tasks, wave by wave. Raises `Refused`."""
    validation = checked.validation
    total = len(validation.places)
    counts = SubmitCounts()
    if not total:
        return counts
    plans = plan(np.bincount(validation.levels).tolist())
    portions = _portions(checked, plans).mapInArrow(_submit_function(target), _OUTCOME).rdd
    context = checked.chunks.sparkSession.sparkContext
    for wave in plans.waves:
        outcomes = context.runJob(portions, list, partitions=list(wave))
        for new, existing, *_ in outcomes:
            counts.add(SubmitCounts(new, existing))
        for *_, name, code, text in outcomes:
            if text is not None:
                where = _place_prefix(checked, name)
                names = (name,) if name else ()
                raise Refused(f"{where}{text}, {counts.partial_note()}", code, names)
        progress(counts.new + counts.existing, total)
    return counts


def conflicts(checked: CheckedCampaign, target: Target) -> list[str]:
    """List tasks that the broker would refuse, such as names in use. Submits nothing."""
    return _find_problems(checked, target, submit.conflicts)


def unplaced_tasks(checked: CheckedCampaign, target: Target) -> list[str]:
    """List tasks whose lane can't be derived by the broker's settings. Submits nothing."""
    shared = SharedTerms(target.campaign.encode(), target.now_ns)
    terms = [shared.get(text) for text in checked.table["terms"].unique().to_pylist() if text]
    with target.client() as client:
        if not client.lane_templates({one.service.decode() for one in terms}):
            return []
    return _find_problems(checked, target, submit.lane_problems)


def _find_problems(checked: CheckedCampaign, target: Target, find: _ProblemFinder) -> list[str]:
    """List the problems of all valid tasks, each with its file and line."""
    validation = checked.validation
    if not len(validation.places):
        return []
    portions = _portions(checked, plan([len(validation.places)]))
    outcomes = portions.mapInArrow(_problem_function(target, find), _OUTCOME)
    found = outcomes.where(F.col("text").isNotNull()).collect()
    return [f"{_place_prefix(checked, row.name)}{row.text}" for row in found]


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


def _portions(checked: CheckedCampaign, plans: SubmitPlan) -> DataFrame:
    """Split chunks by portion, and move each portion to its own partition."""
    spark = checked.chunks.sparkSession
    places = checked.validation.places
    by_place = np.argsort(places)
    # Maps a task's place to its position in the order of submission. It is broadcast, because
    # partitions that read no file do not need it.
    turns = spark.sparkContext.broadcast((places[by_place], by_place, plans.portions))

    def cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for tasks in batch["tasks"]:
                yield _pieces(unpack([tasks]), *turns.value)

    pieces = checked.chunks.select("tasks").mapInArrow(cut, "portion int, tasks binary")
    return pieces.repartitionById(plans.waves[-1].stop, "portion").select("tasks")


def _pieces(tasks: pa.Table, places: Numbers, turns: Numbers, portions: Numbers) -> pa.RecordBatch:
    """Split a chunk by portion. Rejected tasks are in none."""
    found = np.minimum(np.searchsorted(places, tasks["place"].to_numpy()), len(places) - 1)
    is_wanted = places[found] == tasks["place"].to_numpy()
    tasks = tasks.filter(pa.array(is_wanted))
    turn = turns[found[is_wanted]]
    tasks = tasks.set_column(0, "turn", pa.array(turn, pa.int64()))
    portion = portions[turn]
    order = np.argsort(portion, kind="stable")
    tasks, portion = tasks.take(pa.array(order)), portion[order]
    numbers, begins = np.unique(portion, return_index=True)
    ends = [*begins[1:].tolist(), len(tasks)]
    packed = [
        pack(tasks.slice(first, last - first))
        for first, last in zip(begins.tolist(), ends, strict=True)
    ]
    return pa.RecordBatch.from_pydict(
        {"portion": pa.array(numbers, pa.int32()), "tasks": pa.array(packed, pa.binary())}
    )


def _in_submit_order(batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Sort the tasks of a portion in the order of submission."""
    pieces = [piece for batch in batches for piece in batch["tasks"]]
    return unpack(pieces).sort_by("turn").to_batches() if pieces else []


def _submit_function(target: Target) -> _PartitionFunction:
    def submit_portion(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts, problems = SubmitCounts(), list[TaskProblem]()
        try:
            submit.submit(_in_submit_order(batches), target, counts)
        except TaskyardError as error:  # returned as data: Spark would retry, and print pages
            problems = [problem_of(error)]
        yield _outcome(counts, problems)

    return submit_portion


def _problem_function(target: Target, find: _ProblemFinder) -> _PartitionFunction:
    def check_portion(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            problems = list(find(_in_submit_order(batches), target))
        except TaskyardError as error:
            problems = [problem_of(error)]
        yield _outcome(SubmitCounts(), problems)

    return check_portion


def _outcome(counts: SubmitCounts, problems: Sequence[TaskProblem]) -> pa.RecordBatch:
    rows: Sequence[Sequence[str | None]] = problems or [[None] * 3]
    names, codes, texts = zip(*rows, strict=True)
    return pa.RecordBatch.from_pydict(
        {
            "new": pa.array([counts.new] * len(rows), pa.int64()),
            "existing": pa.array([counts.existing] * len(rows), pa.int64()),
            "name": pa.array(names, pa.string()),
            "code": pa.array(codes, pa.string()),
            "text": pa.array(texts, pa.string()),
        }
    )
