"""The walk along the graph, from files to files: tasks with their places, and critical paths.

Tasks whose place is final are appended once. Their places are remembered, in the same order: row 7
of `_places` is row 7 of the final files of tasks, counted through all of them. So a critical path
that leads through old tasks finds their rows without a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from taskyard.pipeline.fold import schemas
from taskyard.pipeline.fold.columns import Flags, Ints, kept
from taskyard.pipeline.fold.places import CHAINED, EDGE, NODE, Places
from taskyard.pipeline.history.fold_files import FoldedFiles
from taskyard.pipeline.history.memory import (
    MEMORY,
    Files,
    Memory,
    coded,
    in_schema,
    selected,
    write_rows,
)
from taskyard.pipeline.store.data_file import DataFile, new_name, write_data_file

_NODES: Final = coded(selected(schemas.TASKS_WITHOUT_GRAPH, NODE))
_WHOLE: Final = coded(schemas.TASKS)
_CHAINED: Final = selected(schemas.TASKS, CHAINED)


class WalkedFiles(Struct):
    """The files of tasks and critical paths."""

    #: Tasks that can't change any more, and all others.
    tasks: list[DataFile]
    tasks_open: list[DataFile]
    critical_path: list[DataFile]
    memory: dict[str, list[DataFile]]


class _Piece(Struct, frozen=True):
    """Some tasks of a walk: a table of a share, or those of the memory."""

    name: str
    share: FoldedFiles | None = None
    rows: pa.Table | None = None

    @property
    def is_settled(self) -> bool:
        return self.name != "tasks_open"

    def read(self, columns: tuple[str, ...] | None = None) -> pa.Table:
        if self.rows is None:
            return self.share.table(self.name, columns) if self.share else pa.table({})
        return self.rows if columns is None else self.rows.select(columns)


class GraphWalk:
    """Places all tasks of a run, whose edges may connect any of them."""

    def __init__(
        self,
        memory: Memory,
        tasks: Files,
        paths: Files,
        folded: Sequence[FoldedFiles],
        edges: Files,
    ) -> None:
        """Walk. `tasks` are the final files in the order of `_places`."""
        self._memory, self._tasks, self._paths = memory, tasks, paths
        self._pieces = [_Piece("_unplaced", rows=memory.read("_unplaced"))]
        self._pieces += [_Piece(name, one) for one in folded for name in ("tasks", "tasks_open")]
        nodes = [in_schema(piece.read(NODE), _NODES) for piece in self._pieces]
        #: The first node of each piece.
        self._begins = np.cumsum([0, *map(len, nodes)])
        settled = [piece.is_settled for piece in self._pieces]
        is_settled = np.repeat(settled, np.diff(self._begins))
        self._edges = pa.concat_tables([memory.read("_edges"), edges.read(MEMORY["_edges"])])
        self._known = memory.read("_places")
        self._nodes = pa.concat_tables(nodes).unify_dictionaries()
        self._places = Places(self._known, self._nodes, is_settled, self._edges)
        self._columns = pa.table(self._places.columns())

    def write(self) -> WalkedFiles:
        """Write all files, a piece of the tasks at a time."""
        final: list[DataFile] = []
        places: list[DataFile] = []
        unfinished, unplaced = [], []
        new_places = self._places.new_places()
        done = 0
        for number, piece in enumerate(self._pieces):
            rows, is_final = piece.read(), self._is_final(number)
            whole = self._whole(number, rows)
            count = int(is_final.sum())
            if count:
                # Both files have the same name, because their rows belong together.
                name = new_name("final")
                mine = new_places.slice(done, count)
                tasks = in_schema(kept(whole, is_final), _WHOLE)
                final.append(write_data_file(self._tasks.directory, tasks, "", name))
                places.append(write_data_file(self._memory["_places"].directory, mine, "", name))
                done += count
            unfinished.append(in_schema(kept(whole, ~is_final), _WHOLE))
            if piece.is_settled:
                unplaced.append(in_schema(kept(rows, ~is_final), MEMORY["_unplaced"]))
        still_open = pa.concat_tables(unfinished).unify_dictionaries()
        return WalkedFiles(
            final,
            write_rows(self._tasks.directory, still_open, schemas.TASKS, "open"),
            self._write_paths(),
            {
                "_places": places,
                "_unplaced": self._memory.write(
                    "_unplaced", pa.concat_tables(unplaced).unify_dictionaries()
                ),
                "_edges": self._memory.write(
                    "_edges", kept(self._edges.select(EDGE), self._places.is_edge_open)
                ),
            },
        )

    def _is_final(self, number: int) -> Flags:
        return self._places.is_final[self._begins[number] : self._begins[number + 1]]

    def _whole(self, number: int, rows: pa.Table) -> pa.Table:
        """Return tasks with the columns of their place."""
        mine = self._columns.slice(self._begins[number], len(rows))
        columns = {name: rows[name] for name in rows.column_names}
        columns |= {name: mine[name] for name in mine.column_names}
        return pa.table(columns)

    def _write_paths(self) -> list[DataFile]:
        """Write all critical paths: those of the nodes' campaigns, and the others as they were.

        If all tasks of a campaign are final, so are all tasks before them, of any campaign. So its
        path can't change.
        """
        before = self._paths.read(coded(schemas.CRITICAL_PATH))
        ways = self._places.chains()
        made = self._places.critical_path(ways, self._chained(ways.node))
        changed = pc.unique(self._nodes["campaign"]).cast(pa.string())
        is_same = pc.invert(pc.is_in(before["campaign"].cast(pa.string()), value_set=changed))
        whole = pa.concat_tables(
            [in_schema(one, schemas.CRITICAL_PATH) for one in (before.filter(is_same), made)]
        )
        return write_rows(self._paths.directory, whole, schemas.CRITICAL_PATH, "open")

    def _chained(self, numbers: Ints) -> pa.Table:
        """Return the tasks with these numbers, in this order."""
        wanted = np.unique(numbers)
        count = len(self._known)
        parts = [_CHAINED.empty_table(), *self._old_rows(wanted[wanted < count])]
        nodes = wanted[wanted >= count] - count
        for number, piece in enumerate(self._pieces):
            begin, end = self._begins[number], self._begins[number + 1]
            mine = nodes[(nodes >= begin) & (nodes < end)] - begin
            if len(mine):
                rows = piece.read().take(pa.array(mine))
                states = self._columns["state"].take(pa.array(mine + begin))
                place = rows.schema.get_field_index("state")
                parts.append(in_schema(rows.set_column(place, "state", states), _CHAINED))
        found = pa.concat_tables(parts)
        return found.take(pa.array(np.searchsorted(wanted, numbers)))

    def _old_rows(self, wanted: Ints) -> list[pa.Table]:
        """Read tasks of earlier runs, by their numbers."""
        parts, begin = [], 0
        for name in self._memory.names.get("_places", ()):
            end = begin + self._tasks.row_count(name)
            mine = wanted[(wanted >= begin) & (wanted < end)]
            if len(mine):
                parts.append(self._tasks.read_rows(name, mine - begin, _CHAINED))
            begin = end
        return parts
