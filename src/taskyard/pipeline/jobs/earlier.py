"""The earlier campaign of `report --compare`: found without Spark, then summarized beside the new.

It is a campaign of the same history, or one in another directory: a state, its history, the tables
of `pipeline history`, or the output of an earlier report.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from msgspec import Struct
from pyspark.sql import functions as f

from taskyard.errors import UserError
from taskyard.journal import state_check
from taskyard.pipeline import tables
from taskyard.pipeline.datasets import ATTEMPTS, TASKS, Dataset
from taskyard.pipeline.jobs.broker_tables import BrokerTables, frame_of, make_tables
from taskyard.pipeline.report.comparison import Comparison, compared
from taskyard.pipeline.report.format import shorten_name
from taskyard.pipeline.sources import history
from taskyard.pipeline.sources.history import HistoryFiles
from taskyard.pipeline.transforms import comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

#: Campaigns that an error lists.
CAMPAIGNS_LISTED_MAX: Final = 10

#: The folder of a report's tables.
REPORT_TABLES: Final = "tables"


class EarlierCampaign(Struct):
    """The campaign to compare with, and where it is."""

    #: None: all campaigns.
    campaign: str | None
    #: The directory that was given. Empty: the history of the report.
    source: str = ""
    #: The history in the directory, or the tables of a report.
    files: HistoryFiles | None = None
    tables: Path | None = None

    @property
    def size_bytes(self) -> int:
        """The approximate size of the files to read, besides those of the report."""
        return 0 if self.files is None else self.files.size_bytes

    @property
    def directories(self) -> list[Path]:
        """The directories to read, besides those of the report."""
        return [Path(self.source)] if self.source else []


def find_earlier(
    text: str, campaign: str | None, known: Sequence[str], scratch: Path
) -> EarlierCampaign:
    """Find the campaign that `--compare` names, for a report about `campaign`.

    `known` has the campaigns of the report's history. Raises UserError.
    """
    if text in known:
        if campaign is None:
            raise UserError(f"--compare {shorten_name(text)}: needs --campaign")
        if text == campaign:
            raise UserError(
                f"--compare {shorten_name(text)}: the campaign of the report itself "
                f"({listed(known)})"
            )
        return EarlierCampaign(text)
    directory, name = Path(text), campaign
    before, colon, after = text.rpartition(":")
    if not directory.is_dir() and colon and Path(before).is_dir():
        directory, name = Path(before), after
    if not directory.is_dir():
        raise UserError(
            f"--compare {shorten_name(text)}: neither a campaign nor a directory ({listed(known)})"
        )
    found = _in_directory(directory, name, scratch)
    names = _campaigns(found)
    if name is not None and name not in names:
        raise UserError(
            f"--compare {directory}: unknown campaign {shorten_name(name)!r} ({listed(names)}, or "
            "use PATH:CAMPAIGN)"
        )
    return found


def listed(names: Sequence[str]) -> str:
    """List the campaigns of a history for an error."""
    if not names:
        return "this history has no tasks"
    shown = ", ".join(shorten_name(one) or "(none)" for one in names[:CAMPAIGNS_LISTED_MAX])
    more = ", …" if len(names) > CAMPAIGNS_LISTED_MAX else ""
    return f"this history has {shown}{more}"


def _in_directory(directory: Path, name: str | None, scratch: Path) -> EarlierCampaign:
    source = str(directory)
    for place in (directory, directory / REPORT_TABLES):
        if all((place / f"{one.name}.parquet").exists() for one in (TASKS, ATTEMPTS)):
            return EarlierCampaign(name, source, tables=place)
    is_state = state_check.has_journal(directory) and not tables.are_tables(directory)
    find = history.find if is_state else history.find_directory
    return EarlierCampaign(name, source, find(directory, scratch))


def _campaigns(found: EarlierCampaign) -> list[str]:
    if found.files is not None:
        return found.files.campaigns()
    assert found.tables is not None  # noqa: S101  # one of both
    rows = pa.dataset.dataset(found.tables / f"{TASKS.name}.parquet", format="parquet")
    return sorted(pc.unique(rows.to_table(columns=["campaign"])["campaign"]).to_pylist())


class _Side(Struct):
    """The tables of one campaign."""

    spark: SparkSession
    campaign: str | None
    #: Of brokers, or of a report.
    brokers: list[BrokerTables]
    tables: Path | None = None

    def frame(self, dataset: Dataset, names: Sequence[str]) -> DataFrame:
        if self.tables is None:
            return frame_of(self.spark, self.brokers, dataset, self.campaign, names)
        path = self.tables / f"{dataset.name}.parquet"
        found = self.spark.read.parquet(tables.spark_read_path(path))
        if self.campaign is not None:
            found = found.where(f.col("campaign") == self.campaign)
        return found.select(*names)


def compare(
    spark: SparkSession,
    brokers: list[BrokerTables],
    campaign: str | None,
    earlier: EarlierCampaign,
    scratch: Path,
) -> Comparison:
    """Compute the figures of both campaigns in one query."""
    then = brokers
    if earlier.files is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        then = [make_tables(spark, earlier.files, scratch)]
    sides = {
        "now": _Side(spark, campaign, brokers),
        "earlier": _Side(spark, earlier.campaign, then, earlier.tables),
    }
    tasks, attempts = (
        _united(sides, dataset, names)
        for dataset, names in (
            (TASKS, comparison.TASK_COLUMNS),
            (ATTEMPTS, comparison.ATTEMPT_COLUMNS),
        )
    )
    rows = {row["side"]: row for row in comparison.figures(tasks, attempts).toArrow().to_pylist()}
    return Comparison(earlier.campaign, earlier.source, compared(rows))


def _united(sides: dict[str, _Side], dataset: Dataset, names: Sequence[str]) -> DataFrame:
    """Return some columns of both campaigns, with the column `side`."""
    now, then = (
        one.frame(dataset, names).withColumn("side", f.lit(side)) for side, one in sides.items()
    )
    return now.unionByName(then)
