"""The parts of the CPU time of `taskyard map`, each measured by itself.

Owns the bare loops: processes without pipes, processes with pipes, and the commits of a journal
again. They do the same work as Taskyard and nothing else, so a part is a lower bound of what any
program in Python would need for it.
"""

import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from bench.table import TableLine, table_line
from taskyard.journal.sqlite import SqliteStore

_READ_BYTES: Final = 65_536


class Costs(Struct, frozen=True):
    """CPU seconds of one `map`, whole and in parts."""

    whole_s: float
    #: A `map` of one command: imports, three processes, an empty journal.
    start_s: float
    #: Start and end of the commands themselves.
    commands_s: float
    #: Two pipes for each command, read to their ends.
    pipes_s: float
    #: Commits to the journal, with their syncs.
    journal_s: float
    commits: int

    @property
    def rest_s(self) -> float:
        return self.whole_s - self.start_s - self.commands_s - self.pipes_s - self.journal_s


def measure(state: Path, count: int, whole_s: float, start_s: float) -> Costs:
    """Measure the parts of a `map` of `count` commands that has ended on a state directory."""
    program = shutil.which("true") or "/bin/true"
    commands_s = _cpu_s_of(lambda: _spawn(program, count))
    with_pipes_s = _cpu_s_of(lambda: _spawn_with_pipes(program, count))
    rows = _journal_rows(state)
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteStore(Path(directory))
        journal_s = _cpu_s_of(lambda: _commit(store, rows))
        store.close()
    pipes_s = with_pipes_s - commands_s
    return Costs(whole_s, start_s, commands_s, pipes_s, journal_s, len(rows))


def lines(costs: Sequence[Costs]) -> list[TableLine]:
    """Return the parts as lines of a table."""
    if not costs:
        return []
    parts = {
        "start, by a map of one command": [one.start_s for one in costs],
        "commands, by a loop of posix_spawn": [one.commands_s for one in costs],
        "two pipes each, by the same loop": [one.pipes_s for one in costs],
        f"journal, by {costs[-1].commits} commits again": [one.journal_s for one in costs],
        "all other parts": [one.rest_s for one in costs],
    }
    return [table_line(f"of map: {what}", "s", found) for what, found in parts.items()]


def _cpu_s_of(work: Callable[[], None]) -> float:
    """Return the CPU time of a call and of the children that it waits for."""
    before = _cpu_s()
    work()
    return _cpu_s() - before


def _cpu_s() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _spawn(program: str, count: int) -> None:
    for number in range(count):
        os.wait4(os.posix_spawn(program, [program, str(number)], os.environ), 0)


def _spawn_with_pipes(program: str, count: int) -> None:
    for number in range(count):
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        actions = [(os.POSIX_SPAWN_DUP2, end, own) for own, end in enumerate(writers, 1)]
        argv = [program, str(number)]
        pid = os.posix_spawn(program, argv, os.environ, file_actions=actions)
        for end in writers:
            os.close(end)
        for end in readers:
            while os.read(end, _READ_BYTES):
                pass
            os.close(end)
        os.wait4(pid, 0)


def _journal_rows(state: Path) -> list[tuple[bytes, int]]:
    """Return the body of each row of a journal, and the number of its records."""
    store = SqliteStore(state)
    try:
        return [(row.body, row.record_last - row.record_first + 1) for row in store.rows()]
    finally:
        store.close()


def _commit(store: SqliteStore, rows: Sequence[tuple[bytes, int]]) -> None:
    for body, records in rows:
        store.commit(body, records)
