"""Sessions for small histories: most of what Spark does for large ones takes longer than the rows.

Owns when a history is small, and what is done otherwise then. Transforms that care ask `is_small`
of the session of their frames.
"""

from typing import Final

from pyspark.sql import DataFrame, SparkSession

#: Histories up to this size are a matter of seconds, of which Spark would take most to make code.
SMALL_BYTES: Final = 32 * 1024 * 1024

#: A setting of ours in a session for small histories.
_TUNED_KEY: Final = "taskyard.small"

#: No code is made, no plan is changed on the way, nothing is spread.
_SETTINGS: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    _TUNED_KEY: "true",
}


def tune_session(spark: SparkSession, history_bytes: int) -> SparkSession:
    """The same session, set up for a history of this size."""
    if history_bytes > SMALL_BYTES:
        return spark
    quick = spark.newSession()
    for key, value in _SETTINGS.items():
        quick.conf.set(key, value)
    return quick


def is_small(spark: SparkSession) -> bool:
    return spark.conf.get(_TUNED_KEY, "false") == "true"


def cache(frame: DataFrame) -> DataFrame:
    """Let Spark keep what it has computed. Of a small history without how: a plan of a plan of a
    plan takes longer to read than the rows."""
    return frame.localCheckpoint() if is_small(frame.sparkSession) else frame.persist()


def cache_if_small(frame: DataFrame) -> DataFrame:
    """The same of a small history alone: of a large one it costs more to keep it than to compute it
    again."""
    return frame.localCheckpoint() if is_small(frame.sparkSession) else frame
