"""The floor and the goal of each figure. The tables print them beside it."""

from typing import Final

from msgspec import Struct

from bench.settings import Kind


class Target(Struct, frozen=True):
    """An upper bound of a figure, or with `at_least` a lower bound."""

    floor: float
    goal: float
    at_least: bool = False

    def verdict(self, figure: float) -> str:
        if self._is_reached(figure, self.goal):
            return "goal"
        if self._is_reached(figure, self.floor):
            return "floor"
        return f"missed, {figure / self.floor:.2f} × floor"

    def _is_reached(self, figure: float, mark: float) -> bool:
        return figure >= mark if self.at_least else figure <= mark


#: CPU microseconds to submit, lease and finish a task, scheduler alone, batch 100, 10⁶ tasks.
CORE_TASK_US: Final = {
    "flat": Target(3.0, 2.0),
    "chains": Target(4.0, 3.0),
    "lanes": Target(4.5, 3.5),
}
#: Bytes per queued task with a payload of 20 bytes.
QUEUED_TASK_BYTES: Final = Target(400, 260)
#: Cost per task at the largest size over the cost at a smaller size.
GROWTH: Final = Target(1.5, 1.15)
#: Memory of a broker when all tasks of a steady flow are done, over that at a tenth.
STEADY_GROWTH: Final = Target(1.3, 1.1)
#: Peak memory of a compaction over that of its broker, ten million tasks queued.
COMPACTION_MEMORY: Final = Target(0.5, 0.2)
#: Seconds to recover a million unfinished tasks.
RECOVERY_S: Final = Target(5.0, 2.0)

#: CPU microseconds per task of broker, producer and two workers together, batch 100: durable, or
#: with the journal in memory.
BROKER_TASK_US: Final[dict[Kind, Target]] = {
    "durable": Target(10.0, 6.5),
    "in memory": Target(8.0, 5.5),
}
#: Cost per task on PostgreSQL, with its server, over that on SQLite, batch 100.
POSTGRESQL_COST: Final = Target(1.5, 1.5)
#: Cost per task in chains or lanes over that of flat tasks, whole broker.
SHAPE_COST: Final = Target(1.6, 1.3)
#: Cost per task in lanes with a rate each over that in lanes without, scheduler alone.
LANE_RATE_COST: Final = Target(1.3, 1.15)
#: The largest deviation of a lane from its rate, per cent.
LANE_RATE_DEVIATION: Final = Target(1.0, 0.1)
#: Tasks per second of dwork's own server, batch 1.
DWORK_TASKS_PER_SECOND: Final = 5_500
#: Tasks per second, eight plain peers with one task at a time: 1.5 and 3 times dwork's server.
PLAIN_TASKS_PER_SECOND: Final = Target(
    1.5 * DWORK_TASKS_PER_SECOND, 3.0 * DWORK_TASKS_PER_SECOND, at_least=True
)
#: CPU microseconds of the broker for each of these tasks. dwork's server takes about 100.
PLAIN_BROKER_US: Final = Target(250, 130)
#: Tasks per second by one-task calls in a loop.
CALLS_PER_SECOND: Final = Target(60_000, 100_000, at_least=True)
#: Milliseconds from submit to result of one task, idle broker, the median.
LATENCY_MS: Final[dict[Kind, Target]] = {
    "durable": Target(1.0, 0.65),
    "in memory": Target(0.5, 0.35),
}
#: Seconds from `Executor()` to its first result.
EXECUTOR_FIRST_S: Final = Target(0.5, 0.3)
#: CPU of all processes for small calls, over that of ProcessPoolExecutor in the same run.
EXECUTOR_OVER_POOL: Final = Target(2.0, 1.5)
#: Milliseconds for a page of a listing of a million tasks.
LISTING_MS: Final = Target(200, 50)

#: CPU of the broker with 10,000 idle workers, per cent of a core, and its memory for each of them.
CROWD_CORE_PERCENT: Final = Target(30, 10)
CROWD_WORKER_BYTES: Final = Target(40_000, 40_000)
#: CPU of the broker if these workers connect through ten relays.
RELAYED_CROWD_CORE_PERCENT: Final = Target(10, 6)

#: CPU seconds of `taskyard map` of 1,000 commands `true`, with nothing running before.
MAP_CPU_S: Final = Target(3.0, 1.5)
#: `taskyard run` of 2,000 commands `true` over `xargs -P2`, each minus a run of one command.
RUN_WALL_OVER_XARGS: Final = Target(1.5, 1.1)
RUN_CPU_OVER_XARGS: Final = Target(1.3, 1.1)
#: CPU seconds of `taskyard run` of one command: the start and end of client, broker and worker.
RUN_START_CPU_S: Final = Target(0.6, 0.4)

#: CPU of ten million events to attempts, Parquet to Parquet, over DuckDB's on the same files.
ATTEMPTS_OVER_DUCKDB: Final = Target(5, 2.5)
#: CPU seconds for the history of a million tasks, all datasets, on two cores: the whole command.
HISTORY_CPU_S: Final = Target(40, 25)
#: CPU seconds for 1,000 tasks more, beyond the session.
INCREMENT_CPU_S: Final = Target(3, 3)
#: CPU seconds for the report of the demo, the whole command.
REPORT_CPU_S: Final = Target(12, 8)
#: CPU seconds to load a million tasks with two million dependencies, the whole command.
LOAD_CPU_S: Final = Target(20, 20)
#: Rows per second of wall time through the data source into a durable broker.
SUBMITTED_ROWS_PER_SECOND: Final = Target(40_000, 100_000, at_least=True)
#: Simulated tasks per second of CPU.
SWEPT_TASKS_PER_SECOND: Final = Target(50_000, 150_000, at_least=True)

#: Milliseconds for a view of the page at a million tasks: any request, and the first of its kind.
PAGE_VIEW_MS: Final = Target(200, 50)
PAGE_FIRST_MS: Final = Target(200, 200)
#: Milliseconds for a refresh of a screen of `taskyard top` at a million tasks.
TOP_REFRESH_MS: Final = Target(200, 50)
#: Elements of a view that a browser holds.
PAGE_ELEMENTS: Final = Target(5000, 5000)
#: Throughput of a broker with ten open pages, over that without.
PAGE_THROUGHPUT: Final = Target(0.95, 0.98, at_least=True)

#: CPU of all processes per task, native, durable, batch 100, over gearmand's in the same run.
NATIVE_OVER_GEARMAN: Final = Target(1.5, 1.0)
#: CPU of the broker per task, dwork's protocol, durable, batch 100, over one message of an echo
#: with 100 under way in the same run.
PLAIN_OVER_ECHO: Final = Target(1.0, 0.7)
#: Latency of one task from submit to result, over two round trips of an echo, and two commits on a
#: warm log if it is durable, in the same round.
TASK_OVER_FLOOR: Final = {True: Target(3.6, 2.8), False: Target(3.6, 2.6)}
#: CPU of all processes per task, native, durable, batch 1, over Redis with AOF always.
OVER_REDIS: Final = Target(3.4, 2.6)
#: Tasks per second one at a time, native, durable, over Redis with AOF always, 12 workers and 4
#: producers.
RATE_OVER_REDIS: Final = Target(0.5, 1.0, at_least=True)
