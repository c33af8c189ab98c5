"""A table whose rows are replaced every second, while the cursor stays on its row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.tui.text import Row


class RowTable(DataTable[Text]):
    """A table of rows with keys."""

    def __init__(self, columns: Sequence[str], *, name: str) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True)
        self._titles = columns
        self._shown: list[Row] = []

    def on_mount(self) -> None:
        self.add_columns(*self._titles)

    @property
    def cursor_key(self) -> str | None:
        """Return the key of the row under the cursor. None: there are no rows."""
        row = self.cursor_row
        return self._shown[row][0] if 0 <= row < len(self._shown) else None

    def show_rows(self, rows: list[Row]) -> None:
        """Draw these rows. Only cells that differ are drawn again if the keys are the same."""
        if [key for key, _ in rows] == [key for key, _ in self._shown]:
            self._update_cells(rows)
        else:
            self._replace_rows(rows)
        self._shown = rows

    def _update_cells(self, rows: list[Row]) -> None:
        for number, ((_, before), (_, after)) in enumerate(zip(self._shown, rows, strict=True)):
            for column, (old, new) in enumerate(zip(before, after, strict=True)):
                if old != new:
                    self.update_cell_at(Coordinate(number, column), new, update_width=True)

    def _replace_rows(self, rows: list[Row]) -> None:
        key, number, scroll = self.cursor_key, self.cursor_row, self.scroll_y
        self.clear()
        for row_key, cells in rows:
            self.add_row(*cells, key=row_key)
        keys = [row_key for row_key, _ in rows]
        place = keys.index(key) if key in keys else min(number, len(rows) - 1)
        if place > 0:
            self.scroll_to(y=scroll, animate=False)
            self.move_cursor(row=place)
