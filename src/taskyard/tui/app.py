"""The application: keys, the timer, the filter, and the banner of a broker that is away.

It requests the status once a second at most, and what the shown screen needs. A broker that goes
away is tried again every second, while the last replies stay on the screen. Changes no task.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Input, RichLog, Static

from taskyard.client import task_filters
from taskyard.errors import BytesMissing, TaskyardError, UserError
from taskyard.tui import screens
from taskyard.tui.screens import LanesScreen, Pace, Screen, TasksScreen, WorkersScreen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from taskyard.client.internal import BrokerLink, InternalClient
    from taskyard.client.task_filters import Filter
    from taskyard.tui.screens import Row, View
    from taskyard.wire.native.task_contents import Part

#: Output before the last so many bytes is not read.
TAIL_BYTES: Final = 64 * 1024

#: Lines that are kept. `taskyard log` has all.
LINES_MAX: Final = 2000

#: Parts of a stream that are read for one drawing, so that a program that prints without end does
#: not keep the screen.
_PARTS_MAX: Final = 4

#: Services whose output is kept with the result.
_FUNCTION_SERVICES: Final = ("call", "pickle")

_ENDED: Final = ("done", "failed", "cancelled")


class StreamReader:
    """Reads stdout or stderr of a task's latest attempt, line by line."""

    def __init__(self, name: str, stream: str) -> None:
        self._name, self._stream = name, stream
        self._attempt: int | None = None
        self._offset = 0
        self._rest = b""

    def read(self, client: InternalClient) -> list[str]:
        """Return the lines that were printed since the last call."""
        lines: list[str] = []
        for _ in range(_PARTS_MAX):
            page = self._page(client)
            if page.attempt != self._attempt:
                self._attempt, self._rest = page.attempt, b""
                self._offset = max(0, page.bytes_total - TAIL_BYTES)
                page = self._page(client)
            lines += self._split(page)
            if not page.data:
                break
        return lines

    def _page(self, client: InternalClient) -> Part:
        count = TAIL_BYTES // _PARTS_MAX
        return client.output_page(self._name, self._offset, self._stream, count=count)

    def _split(self, page: Part) -> list[str]:
        """Return the whole lines of a part. The last line is whole at the end of the attempt."""
        self._offset += len(page.data)
        *whole, self._rest = (self._rest + page.data).split(b"\n")
        if not page.live and self._rest and self._offset >= page.bytes_total:
            whole, self._rest = [*whole, self._rest], b""
        return [screens.output_line(line) for line in whole]


class TaskPane(Vertical):
    """The open task, if any."""

    def __init__(self, link: BrokerLink) -> None:
        super().__init__(id="task")
        self._link = link
        self.pace = Pace()
        #: The full name of the open task. Empty: none is open.
        self.opened = ""
        self._view: View | None = None
        self._why = self.note = ""
        self._readers: list[StreamReader] = []
        self._is_read = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="details", can_focus=False):
            yield Static(id="details-text")
        yield RichLog(id="output", max_lines=LINES_MAX, wrap=True, min_width=20)

    def open(self, name: str) -> None:
        """Show another task, or none."""
        self.opened, self._view, self.note = name, None, ""
        self._readers = [StreamReader(name, stream) for stream in ("stdout", "stderr")]
        self._is_read = False
        self.pace.reset()
        self.query_one("#output", RichLog).clear()
        self.query_one("#details-text", Static).update(Text(screens.one_line(name)))

    async def load(self) -> None:
        """Request and draw the task. Raises `TaskyardError`."""
        name, call = self.opened, self._link.call
        if self.pace.is_due():
            view = await call(lambda client: client.show(name))
            why = await call(lambda client: client.explain(name)["sentence"])
            if name != self.opened:
                return
            if self._view is not None and view["attempt"] != self._view["attempt"]:
                self._is_read = False
            self._view, self._why = view, why
            self.pace.done()
        if self._view is None:
            return
        lines = screens.task_lines(self._view, self._why, time.time())
        self.query_one("#details-text", Static).update(screens.labelled(lines, self.size.width - 2))
        if not self._is_read:
            is_over = self._view["state"] in _ENDED
            try:
                await self._read(self._view, is_over=is_over)
            except BytesMissing as removed:
                self.note, is_over = str(removed), True
            self._is_read = is_over and name == self.opened

    async def _read(self, view: View, *, is_over: bool) -> None:
        """Add what was printed since the last time. An ended task is read once."""
        name = self.opened
        if view["service"] not in _FUNCTION_SERVICES:
            for reader, style in zip(self._readers, ("", "red"), strict=True):
                lines = await self._link.call(reader.read) if view["attempt"] else []
                if name == self.opened:
                    self._write(lines, style)
        elif is_over:
            printed = await self._link.call(lambda client: client.output_page(name).data)
            lines = printed.removesuffix(b"\n").split(b"\n") if printed else []
            self._write([screens.output_line(line) for line in lines], "")
        else:
            self.note = "the output of a function is shown when it has ended"

    def _write(self, lines: list[str], style: str) -> None:
        """Add lines. The end stays in view unless the reader has scrolled up."""
        log = self.query_one("#output", RichLog)
        is_at_end = log.is_vertical_scroll_end
        for line in lines:
            log.write(Text(line, style), scroll_end=is_at_end)
        if lines:
            self.note = f"the end of the output. All of it: taskyard log {shlex.quote(self.opened)}"
        self.note = self.note or "no output"


#: Seconds between two drawings, and while another window has the keyboard.
_TICK_SECONDS: Final = 1.0
_BLURRED_SECONDS: Final = 5.0

#: A broker that has not replied for this long is reported.
_SILENT_SECONDS: Final = 2.0

#: Screens that `Esc` goes back to.
_BACK_MAX: Final = 50

_CSS: Final = """
#title { height: 1; background: $primary-background; text-wrap: nowrap; }
#banner { display: none; height: auto; background: $warning; color: $text; padding: 0 1; }
#counters { height: auto; padding: 0 1; margin: 1 0; }
RowTable { height: 1fr; scrollbar-size-vertical: 1; }
TaskPane { display: none; height: 1fr; }
#details { height: auto; max-height: 50%; padding: 0 1; scrollbar-size-vertical: 1; }
#output { height: 1fr; border-top: solid $primary; padding: 0 1; scrollbar-size-vertical: 1; }
#note { height: 1; padding: 0 1; color: $text-muted; }
#filter { display: none; dock: bottom; margin: 0 0 1 0; }
#banner.shown, #filter.shown, TaskPane.shown { display: block; }
RowTable.hidden { display: none; }
"""


class RowTable(DataTable[Text]):
    """A table whose rows are replaced every second, while the cursor stays on its row."""

    def __init__(self) -> None:
        super().__init__(id="rows", cursor_type="row", zebra_stripes=True)
        self._shown: tuple[str, list[Row]] = ("", [])

    def show_rows(self, screen: Screen, rows: list[Row]) -> None:
        """Draw rows. Only cells that differ are drawn again if the keys are as before."""
        name, before = self._shown
        self._shown = screen.name, rows
        if name != screen.name:
            self.clear(columns=True)
            self.add_columns(*screen.columns)
            before = []
        keys, known = ([key for key, _ in some] for some in (rows, before))
        if keys != known:
            self._replace_rows(rows, keys, known)
            return
        for number, ((_, old_cells), (_, cells)) in enumerate(zip(before, rows, strict=True)):
            for column, (old, new) in enumerate(zip(old_cells, cells, strict=True)):
                if old != new:
                    self.update_cell_at(Coordinate(number, column), new, update_width=True)

    def _replace_rows(self, rows: list[Row], keys: list[str], known: list[str]) -> None:
        number, scroll = self.cursor_row, self.scroll_y
        key = known[number] if 0 <= number < len(known) else None
        self.clear()
        for row_key, cells in rows:
            self.add_row(*cells, key=row_key)
        row = keys.index(key) if key in keys else min(number, len(rows) - 1)
        if known and row > 0:
            self.scroll_to(y=scroll, animate=False)
            self.move_cursor(row=row)


class Top(App[None]):
    """`taskyard top`."""

    CSS = _CSS
    TITLE = "taskyard top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1,l", "show('lanes')", "Lanes", key_display="1"),
        Binding("2,w", "show('workers')", "Workers", key_display="2"),
        Binding("3,t", "show('tasks')", "Tasks", key_display="3"),
        Binding("enter", "open", "Open", key_display="Enter"),
        Binding("slash", "edit_filter", "Filter", key_display="/"),
        Binding("escape", "leave", "Back", key_display="Esc"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, link: BrokerLink, name: str, wanted: Filter) -> None:
        """Show the broker behind a link. `name` is its endpoint or its state directory."""
        # Without colours, not even greys: a terminal may have a light background.
        super().__init__(ansi_color=bool(os.environ.get("NO_COLOR")))
        self.animation_level = "none"
        self._link, self._broker_name, self._wanted = link, name, wanted
        kinds = (LanesScreen, WorkersScreen, TasksScreen)
        self._tables: dict[str, Screen] = {kind.name: kind(link) for kind in kinds}
        #: The name of the screen, below an open task.
        self.shown = "tasks" if wanted.text else "lanes"
        #: Screens and filters to go back to.
        self._back: list[tuple[str, Filter]] = []
        self._wake = asyncio.Event()
        self._is_focused = True
        #: Number of finished drawings, for tests.
        self.drawings = 0

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="banner")
        yield Static(id="counters")
        yield RowTable()
        yield TaskPane(self._link)
        yield Static(id="note")
        yield Input(id="filter", placeholder="--campaign NAME --failed part-of-name", compact=True)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._show_banner("loading")
        self._change()
        self.run_worker(self._poll(), exit_on_error=True)

    # The timer.

    async def _poll(self) -> None:
        """Draw once a second, and at once after a key."""
        while True:
            self._wake.clear()
            try:
                await self._draw()
            except NoMatches:
                if self.is_running:
                    raise
                return  # widgets are removed in turn when it closes
            seconds = _TICK_SECONDS if self._is_focused else _BLURRED_SECONDS
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _draw(self) -> None:
        """Request and draw everything that is shown."""
        loading = asyncio.ensure_future(self._load())
        try:
            await asyncio.wait([loading], timeout=_SILENT_SECONDS)
            if not loading.done():
                self._show_banner(f"{self._broker_name}: the broker does not answer")
            await loading
        except TaskyardError as error:
            self._show_banner(str(error))
        else:
            is_live = self._link.is_live
            self._show_banner("" if is_live else "no broker is running: this is the last state")
        finally:
            loading.cancel()
            self.drawings += 1

    async def _load(self) -> None:
        stats, width = await self._link.ask("status"), self.size.width
        head = Text("\n").join([screens.counters(stats["counts"], width - 2), screens.facts(stats)])
        self.query_one("#counters", Static).update(head)
        task, name, wanted = self.query_one(TaskPane), self.shown, self._wanted
        if task.opened:
            await task.load()
            self._note(task.note)
            return
        screen = self._tables[name]
        await screen.load(wanted)
        if (name, wanted) == (self.shown, self._wanted):  # no key was typed meanwhile
            self.query_one(RowTable).show_rows(screen, screen.rows(width))
            shown = wanted.text if name != "workers" else ""
            self._note(screen.note() + (f"   filter {shown}" if shown else ""))

    def _note(self, words: str) -> None:
        self.query_one("#note", Static).update(Text(screens.one_line(words)))

    def _show_banner(self, words: str) -> None:
        banner = self.query_one("#banner", Static)
        banner.set_class(bool(words), "shown")
        banner.update(Text(screens.one_line(words)))

    def reload(self) -> None:
        """Make all requests due."""
        self.query_one(TaskPane).pace.reset()
        for screen in self._tables.values():
            screen.pace.reset()

    def on_resize(self) -> None:
        self._change()

    def on_app_blur(self, _event: events.AppBlur) -> None:
        self._is_focused = False

    def on_app_focus(self, _event: events.AppFocus) -> None:
        self._is_focused = True
        self._wake.set()

    # Screens.

    def _change(self) -> None:
        """Show another screen, filter or task, and draw at once."""
        task, table = self.query_one(TaskPane), self.query_one(RowTable)
        task.set_class(bool(task.opened), "shown")
        table.set_class(bool(task.opened), "hidden")
        self.query_one("#filter", Input).remove_class("shown")
        (task.query_one("#output") if task.opened else table).focus()
        title = Text(" taskyard top ", "bold")
        for number, name in enumerate(self._tables, start=1):
            title.append(f" {number} {name} ", "bold reverse" if name == self.shown else "")
        title.append(f" {screens.shortened(self._broker_name, self.size.width // 2)}", "dim")
        self.query_one("#title", Static).update(title)
        self._wake.set()

    def _go(self, name: str, wanted: Filter) -> None:
        """Show a screen. `Esc` returns to this screen."""
        if (name, wanted) != (self.shown, self._wanted):
            self._back = [*self._back[-_BACK_MAX:], (self.shown, self._wanted)]
        self.shown, self._wanted = name, wanted
        self.query_one(TaskPane).open("")
        self._change()

    def action_show(self, name: str) -> None:
        self._go(name, self._wanted)

    def action_leave(self) -> None:
        task = self.query_one(TaskPane)
        if not self.query_one("#filter", Input).has_class("shown"):
            if task.opened:
                task.open("")
            elif self._back:
                self.shown, self._wanted = self._back.pop()
        self._change()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        key = event.row_key.value or ""
        wanted = self._tables[self.shown].opened(key)
        if wanted is None:
            self.query_one(TaskPane).open(key)
            self._change()
        else:
            self._go("tasks", wanted)

    # The filter.

    def action_edit_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = self._wanted.text
        field.add_class("shown")
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            wanted = task_filters.parse(event.value)
        except UserError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self._go("lanes" if self.shown == "lanes" else "tasks", wanted)


def key_table() -> Iterator[tuple[str, str]]:
    """Yield the keys and what they do, for the documentation."""
    for binding in Top.BINDINGS:
        if isinstance(binding, Binding):
            keys = binding.key.split(",")[1:]
            yield " or ".join([binding.key_display or binding.key, *keys]), binding.description
