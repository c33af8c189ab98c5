"""What a dataset is: columns with meanings, a schema made of them, and a check against it.

Knows no dataset by name.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from taskyard.errors import UserError

LONG: Final = LongType()
DOUBLE: Final = DoubleType()
STRING: Final = StringType()
BOOLEAN: Final = BooleanType()
TIME: Final = TimestampType()
STRINGS: Final = ArrayType(STRING)
COUNTS: Final = MapType(STRING, LONG)


class Column(msgspec.Struct, frozen=True):
    """One column, and what it means."""

    name: str
    kind: DataType
    meaning: str


class Dataset(msgspec.Struct, frozen=True):
    """A table: what a row is, and its columns in order."""

    name: str
    #: What one row is.
    row_meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> StructType:
        """Every column may be null: Parquet that Spark writes says so too."""
        return StructType([StructField(one.name, one.kind, nullable=True) for one in self.columns])

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def check(self, frame: DataFrame) -> DataFrame:
        """The frame with these columns alone, in their order. Raises UserError that names every
        column that is missing or of another type; columns that are too many are left out."""
        found = {field.name: field.dataType for field in frame.schema.fields}
        missing = [column.name for column in self.columns if column.name not in found]
        drifted = [
            f"{column.name} is {found[column.name].simpleString()} instead of "
            f"{column.kind.simpleString()}"
            for column in self.columns
            if column.name in found and not _same_type(found[column.name], column.kind)
        ]
        wrong = [f"it lacks {', '.join(missing)}"] if missing else []
        if wrong or drifted:
            raise UserError(
                f"this is no table of {self.name}: {'; '.join(wrong + drifted)}; "
                "see that it was made by this version, else make it anew"
            )
        return frame.select(*self.names)

    def empty(self, spark: SparkSession) -> DataFrame:
        return spark.createDataFrame([], self.schema)

    def frame(self, spark: SparkSession, rows: Iterable[dict[str, object]]) -> DataFrame:
        """A frame of rows by the names of columns; what a row does not have is null."""
        names = self.names
        table = [tuple(row_meaning.get(name) for name in names) for row_meaning in rows]
        return spark.createDataFrame(table, self.schema)


def _same_type(found: DataType, wanted: DataType) -> bool:
    """The same type; what may be null inside of it does not matter."""
    return found.simpleString() == wanted.simpleString()
