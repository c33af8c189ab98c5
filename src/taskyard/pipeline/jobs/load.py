"""`pipeline load`: campaigns' files, checked by Spark and submitted from its partitions.

Read, judge, write the rejects, submit. Nothing is submitted before all is judged, and nothing at
all while there are rejects, unless they are to be left out. Tasks are submitted level by level: in
waves, each a Spark job of its own, so that whatever the broker has been given at any moment waits
for nothing that it does not have. Run again after a kill it submits what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw, Struct
from pyspark import StorageLevel
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from taskyard.campaign.reader import REJECTED_SUFFIX
from taskyard.errors import Refused, TaskyardError, UserError
from taskyard.pipeline import validate
from taskyard.pipeline.arrow_rows import SharedTerms, pack, prepared_to_row, row_text, unpack
from taskyard.pipeline.datasets import REJECTS
from taskyard.pipeline.sources import campaigns
from taskyard.pipeline.submit import SubmitCounts, Target, find_conflicts, find_unplaced, submit
from taskyard.pipeline.validate import Numbers, ValidationResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from taskyard.campaign.formats import FileOptions
    from taskyard.pipeline.sources.campaigns import CampaignFiles

#: Tasks of one wave at least, where levels are smaller: a Spark job takes a tenth of a second.
WAVE_TASKS_MIN: Final = 50_000

#: Tasks that one partition submits, where a level is larger.
PORTION_TASKS: Final = 50_000

#: Rejects that are kept: beyond this the files are not what they were taken for.
REJECTS_MAX: Final = 1_000_000

#: Told how many tasks are submitted, and of how many.
Progress = Callable[[int, int], None]

#: What a partition does.
_PartitionFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_OUTCOME: Final = "new long, known long, error string"


class Reject(Struct):
    """A row that can't be taken; as `taskyard load` writes it."""

    file: str
    line: int
    reason: str
    raw: Raw

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class CheckedCampaign(Struct):
    """Files that were read and judged. Close it: Spark holds the rows until then."""

    campaign: CampaignFiles
    chunks: DataFrame
    #: All but the payloads.
    table: pa.Table
    validation: ValidationResult
    rejects: list[Reject]

    def revalidate(self, existing: Iterable[str]) -> None:
        """The same, where names that are neither here nor among the known are bad."""
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
        """The dataset `rejects`."""
        rows = ((one.file, one.line, one.reason, bytes(one.raw).decode()) for one in self.rejects)
        return spark.createDataFrame(list(rows), REJECTS.schema)


def read(spark: SparkSession, files: Sequence[str], options: FileOptions) -> CheckedCampaign:
    """Read and judge campaigns' files. Raises UserError for a file that can't be read at all."""
    campaign = campaigns.plan(files, options)
    chunks = campaigns.read(spark, campaign).persist(StorageLevel.MEMORY_AND_DISK)
    table = unpack(chunks.select("graph").toArrow()["graph"])
    _check_files(table)
    validation = validate.validate(table, campaign.where)
    return CheckedCampaign(
        campaign, chunks, table, validation, _rejects(campaign, chunks, table, validation)
    )


def _check_files(table: pa.Table) -> None:
    """Refuse all if a file can't be read to its end: nobody knows what it lacks."""
    is_refused = pc.and_(pc.is_valid(table["reason"]), pc.is_null(table["row"]))
    refused = table.filter(is_refused)["reason"].to_pylist()
    if refused:
        more = f" (and {len(refused) - 1} more files)" if len(refused) > 1 else ""
        raise UserError(f"{refused[0]}{more}")


def _rejects(
    campaign: CampaignFiles, chunks: DataFrame, table: pa.Table, validation: ValidationResult
) -> list[Reject]:
    """What was wrong with rows by themselves, and with their names and dependencies."""
    bad = table.filter(pc.is_valid(table["reason"]))
    if len(bad) + len(validation.rejected) > REJECTS_MAX:
        raise UserError(
            f"more than {REJECTS_MAX:,} rows are bad; see that it is the right format. The first: "
            f"{bad['reason'][0] if len(bad) else next(iter(validation.rejected.values()))}"
        )
    found = [
        (place, reason, Raw(row.encode()))
        for place, reason, row in zip(
            *(bad[name].to_pylist() for name in ("place", "reason", "row")), strict=True
        )
    ]
    rows = _rows_at_places(chunks, list(validation.rejected))
    found += [(place, validation.rejected[place], Raw(row.encode())) for place, row in rows]
    found.sort(key=lambda one: one[0])
    return [Reject(*campaign.where(place), reason, row) for place, reason, row in found]


def _rows_at_places(chunks: DataFrame, places: list[int]) -> list[tuple[int, str]]:
    """Tasks as they could be written, by their places."""
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


def write_rejects(rejects: Sequence[Reject], target: Path | None) -> list[Path]:
    """Write what was rejected, an object a line: into one file, or beside each input. Returns
    where. Replaces what an earlier run left there."""
    by_place: dict[Path, list[Reject]] = {}
    for one in rejects:
        by_place.setdefault(target or Path(one.file + REJECTED_SUFFIX), []).append(one)
    for place, some in by_place.items():
        unfinished = place.with_name(f".{place.name}.new")
        try:
            with unfinished.open("wb") as file:
                file.writelines(msgspec.json.encode(one) + b"\n" for one in some)
            os.replace(unfinished, place)  # noqa: PTH105  # the same, said plainly
        except OSError as wrong:
            raise UserError(
                f"{place}: can't be written: {wrong.strerror}; say where to: --rejects FILE"
            ) from None
    return list(by_place)


# Submitting.


class SubmitPlan(Struct):
    """Who submits what, when: waves of portions, each portion a partition of Spark."""

    #: The portion of each task, in the order of `ValidationResult.places`.
    portions: Numbers
    #: The portions of each wave.
    waves: list[range]
    #: Tasks in each wave.
    sizes: list[int]


def plan(
    sizes: Sequence[int], *, wave: int = WAVE_TASKS_MIN, portion: int = PORTION_TASKS
) -> SubmitPlan:
    """Small levels follow each other within one portion; a large one is spread over several."""
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
    """Submit all good tasks, wave by wave. Raises `Refused`."""
    validation = checked.validation
    total = len(validation.places)
    counts = SubmitCounts()
    if not total:
        return counts
    plans = plan(np.bincount(validation.levels).tolist())
    portions = _portions(checked, plans).mapInArrow(_submit_function(target), _OUTCOME).rdd
    context = checked.chunks.sparkSession.sparkContext
    for wave in plans.waves:
        for new, existing, error in context.runJob(portions, list, partitions=list(wave)):
            counts.add(SubmitCounts(new, existing))
            if error:
                so_far = f"{counts.new:,} new tasks were taken before it; mend it and run it again"
                raise Refused(f"{error} ({so_far})")
        progress(counts.new + counts.existing, total)
    return counts


def conflicts(checked: CheckedCampaign, target: Target) -> list[str]:
    """What the broker knows under the same names, and not the same. Nothing is submitted."""
    return _collect_messages(checked, _message_function(target, find_conflicts))


def unplaced_tasks(checked: CheckedCampaign, target: Target) -> list[str]:
    """What is wrong with tasks whose lane the broker's settings make. Nothing is submitted."""
    shared = SharedTerms(target.campaign.encode(), target.now_ns)
    terms = [shared.get(text) for text in checked.table["terms"].unique().to_pylist() if text]
    with target.client() as client:
        if not client.lane_templates({one.service.decode() for one in terms}):
            return []
    return _collect_messages(checked, _message_function(target, find_unplaced))


def _collect_messages(checked: CheckedCampaign, find_messages: _PartitionFunction) -> list[str]:
    """What there is to say of all good tasks."""
    validation = checked.validation
    if not len(validation.places):
        return []
    portions = _portions(checked, plan([len(validation.places)]))
    outcomes = portions.mapInArrow(find_messages, _OUTCOME)
    return [row.error for row in outcomes.where(F.col("error").isNotNull()).collect()]


def _portions(checked: CheckedCampaign, plans: SubmitPlan) -> DataFrame:
    """The chunks cut into pieces, those of a portion in a partition."""
    spark = checked.chunks.sparkSession
    places = checked.validation.places
    by_place = np.argsort(places)
    # What a task's place says of its turn; partitions that read nothing need not have it.
    turns = spark.sparkContext.broadcast((places[by_place], by_place, plans.portions))

    def cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for tasks in batch["tasks"]:
                yield _pieces(unpack([tasks]), *turns.value)

    pieces = checked.chunks.select("tasks").mapInArrow(cut, "portion int, tasks binary")
    return pieces.repartitionById(plans.waves[-1].stop, "portion").select("tasks")


def _pieces(tasks: pa.Table, places: Numbers, turns: Numbers, portions: Numbers) -> pa.RecordBatch:
    """A chunk by portions; tasks that were rejected are in none."""
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
    """The tasks of a portion, in the order of submission."""
    pieces = [piece for batch in batches for piece in batch["tasks"]]
    return unpack(pieces).sort_by("turn").to_batches() if pieces else []


def _submit_function(target: Target) -> _PartitionFunction:
    def submit_portion(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            counts = submit(_in_submit_order(batches), target)
        except TaskyardError as error:  # as data: Spark would try it again, and tell it in pages
            yield _outcome(SubmitCounts(), [str(error)])
        else:
            yield _outcome(counts, [None])

    return submit_portion


def _message_function(
    target: Target, tell: Callable[[Iterable[pa.RecordBatch], Target], Iterator[str]]
) -> _PartitionFunction:
    def tell_portion(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            found = list(tell(_in_submit_order(batches), target))
        except TaskyardError as error:
            found = [str(error)]
        yield _outcome(SubmitCounts(), [*found])

    return tell_portion


def _outcome(counts: SubmitCounts, errors: list[str | None]) -> pa.RecordBatch:
    count = len(errors)
    return pa.RecordBatch.from_pydict(
        {
            "new": pa.array([counts.new] * count, pa.int64()),
            "known": pa.array([counts.existing] * count, pa.int64()),
            "error": pa.array(errors, pa.string()),
        }
    )
