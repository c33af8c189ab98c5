"""A broker on PostgreSQL beside one on SQLite: CPU time per task by batch, with the server's."""

import os
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Final

import click
from msgspec.structs import replace

from bench.broker.campaigns import BATCH, Campaign, measure
from bench.broker.host import STORE_VARIABLE
from bench.settings import Kind, Settings
from bench.table import TableLine, table_line
from bench.targets import POSTGRESQL_COST
from pair_demo.postgresql import ThrowawayCluster, find_programs
from taskyard.postgresql import database

#: Tasks by batch size. A backlog of 500,000 is refused while its compaction lags behind.
COUNTS: Final = {1: 5_000, 100: 100_000, 1000: 100_000}
BATCHES: Final = tuple(COUNTS)
KINDS: Final[tuple[Kind, ...]] = ("durable", "postgresql")

#: Instead of a URL: start a server, with its usual settings for durability.
OWN_SERVER: Final = "postgresql"

_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

#: Fields of /proc/PID/stat after the name: the parent, and the CPU time of a process and of its
#: children that have ended.
_PARENT: Final = 1
_OWN: Final = slice(11, 13)
_WITH_CHILDREN: Final = slice(11, 15)


class Server:
    """The processes of a PostgreSQL server on this machine, and an empty store in it."""

    def __init__(self, url: str) -> None:
        self._url = url
        with database.open_database(url) as connection:
            database.init(connection)
            _, anchor = database.read_anchor(connection)
            rows = connection.execute("SELECT count(*) FROM taskyard.journal").fetchall()
            if anchor.sequence or rows != [(0,)]:
                raise click.UsageError("--store: has a journal (give an empty database)")
            try:
                self._pid = int(_stat(connection.info.backend_pid)[_PARENT])
            except FileNotFoundError:
                raise click.UsageError("--store: the server is on another machine") from None

    def clear(self) -> None:
        """Begin a new journal."""
        with database.open_database(self._url) as connection:
            database.clear(connection)
            connection.execute("VACUUM")
            connection.execute("CHECKPOINT")

    def cpu_ns(self) -> int:
        """Return the CPU time of all processes of the server so far."""
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        ticks = 0
        for pid in children:
            with suppress(FileNotFoundError):  # it has ended, and counts for its parent
                ticks += sum(map(int, _stat(int(pid))[_OWN]))
        return _TICK_NS * (ticks + sum(map(int, _stat(self._pid)[_WITH_CHILDREN])))


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def batches(settings: Settings) -> list[TableLine]:
    """Measure campaigns by batch size on both stores, in turns.

    The cost is the mean of two runs, as in the case `batches`.
    """
    if settings.store != OWN_SERVER:
        return _batches(settings)
    with ThrowawayCluster(find_programs()) as cluster:
        return _batches(replace(settings, store=cluster.url()))


def _batches(settings: Settings) -> list[TableLine]:
    server = Server(settings.store)
    os.environ[STORE_VARIABLE] = settings.store
    lines: list[TableLine] = []
    for batch in BATCHES:
        count = settings.count(COUNTS[batch])
        settings.say(f"batch {batch}, SQLite and PostgreSQL: {count:,} tasks")
        runs = [
            [_measure(server, Campaign(count, batch, kind), settings) for kind in KINDS]
            for _ in settings.times()
        ]
        server.clear()
        target = POSTGRESQL_COST if batch == BATCH else None
        ratios = [theirs[0] / ours[0] for ours, theirs in runs]
        lines += [
            table_line(f"batch {batch}, SQLite", "µs/task", [ours[0] for ours, _ in runs]),
            table_line(f"batch {batch}, PostgreSQL", "µs/task", [one[0] for _, one in runs]),
            table_line("  of it the broker", "µs/task", [one[1] for _, one in runs]),
            table_line("  of it the server", "µs/task", [one[2] for _, one in runs]),
            table_line("  PostgreSQL over SQLite", "×", ratios, target),
        ]
    return lines


def _measure(server: Server, campaign: Campaign, settings: Settings) -> tuple[float, float, float]:
    """Return the CPU µs per task of all processes, of the broker and of the server."""
    figures: list[tuple[float, float, float]] = []
    for concurrent in (False, True):
        server.clear()
        before_ns = server.cpu_ns()
        run = measure(Campaign(campaign.count, campaign.batch, campaign.kind, concurrent), settings)
        of_server = (server.cpu_ns() - before_ns) / campaign.count / 1e3
        of_server *= campaign.kind == "postgresql"
        figures.append((run.task_us + of_server, run.broker_us, of_server))
    total, of_broker, of_server = (mean(column) for column in zip(*figures, strict=True))
    return total, of_broker, of_server
