"""The fifth screen: one task with its attempts, and its output while it is printed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.text import Text
from textual.containers import VerticalScroll
from textual.widgets import RichLog, Static

from taskyard.client.task_filters import Filter
from taskyard.errors import BytesMissing
from taskyard.tui import text
from taskyard.tui.actions import Place, Target
from taskyard.tui.panes import Pane, Session, places_of
from taskyard.tui.samples import Pace

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from taskyard.client.internal import InternalClient
    from taskyard.tui.text import View
    from taskyard.wire.native.reads import Part

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
            lines += self._split(page)
            if not page.data:
                break
        return lines

    def _page(self, client: InternalClient) -> Part:
        page = client.output_page(
            self._name, self._offset, self._stream, count=TAIL_BYTES // _PARTS_MAX
        )
        if page.attempt == self._attempt:
            return page
        self._attempt, self._rest = page.attempt, b""
        self._offset = max(0, page.bytes_total - TAIL_BYTES)
        return client.output_page(
            self._name, self._offset, self._stream, count=TAIL_BYTES // _PARTS_MAX
        )

    def _split(self, page: Part) -> list[str]:
        """Return the whole lines of a part. The last one is whole at the end of the attempt."""
        self._offset += len(page.data)
        *whole, self._rest = (self._rest + page.data).split(b"\n")
        if not page.live and self._rest and self._offset >= page.bytes_total:
            whole, self._rest = [*whole, self._rest], b""
        return [text.output_line(line) for line in whole]


class OutputPane(Pane):
    """A task: why it is in its state, its attempts, and the end of its output."""

    focus_on = "output"

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._pace = Pace()
        self._opened = ""
        self._view: View | None = None
        self._why = ""
        self._readers: list[StreamReader] = []
        self._attempt = 0
        self._is_read = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="details", can_focus=False):
            yield Static("no task is open: choose one in the list of tasks (4)", id="details-text")
        yield RichLog(id="output", max_lines=LINES_MAX, wrap=True, min_width=20)
        yield Static(classes="note")

    def open(self, name: str) -> None:
        """Show another task."""
        if name == self._opened:
            return
        self._opened, self._view, self._why = name, None, ""
        self._readers = [StreamReader(name, stream) for stream in ("stdout", "stderr")]
        self._attempt, self._is_read = 0, False
        self._pace.reset()
        self.query_one("#output", RichLog).clear()
        self.query_one("#details-text", Static).update(Text(text.one_line(name)))
        self._note("")

    def reload(self) -> None:
        self._pace.reset()
        self._is_read = False

    async def load(self) -> None:
        name, began = self._opened, time.monotonic()
        if not name:
            return
        call = self.session.link.call
        if self._pace.is_due(began):
            view = await call(lambda client: client.show(name))
            why = await call(lambda client: client.explain(name)["sentence"])
            if name != self._opened:
                return
            self._view, self._why = view, why
            self._pace.took(began, time.monotonic())
        view = self._view
        if view is None:
            return
        lines = text.task_lines(view, self._why, time.time())
        self.query_one("#details-text", Static).update(text.labelled(lines, self.size.width - 2))
        if not self._is_read:
            await self._read_output(name, view)

    async def _read_output(self, name: str, view: View) -> None:
        """Add what was printed since the last time. An ended task is read once."""
        is_over = view["state"] in _ENDED
        try:
            if view["service"] in _FUNCTION_SERVICES:
                await self._read_function(name, is_over=is_over)
            elif view["attempt"]:
                await self._read_streams(name, view)
        except BytesMissing as removed:
            self._note(text.one_line(str(removed)))
            is_over = True
        self._is_read = is_over and name == self._opened

    async def _read_function(self, name: str, *, is_over: bool) -> None:
        """Show what a function has printed, which is kept when it has ended."""
        if not is_over:
            self._note("the output of a function is shown when it has ended")
            return
        printed = await self.session.link.call(lambda client: client.output_page(name).data)
        lines = printed.removesuffix(b"\n").split(b"\n") if printed else []
        self._write([text.output_line(line) for line in lines], "")

    async def _read_streams(self, name: str, view: View) -> None:
        if self._attempt and view["attempt"] != self._attempt:
            self._write([f"attempt {view['attempt']}"], "bold reverse")
        self._attempt = view["attempt"]
        for reader, style in zip(list(self._readers), ("", "red"), strict=True):
            lines = await self.session.link.call(reader.read)
            if name != self._opened:
                return
            self._write(lines, style)

    def _write(self, lines: list[str], style: str) -> None:
        """Add lines. The end stays in view unless the reader has scrolled up."""
        log = self.query_one("#output", RichLog)
        is_at_end = log.is_vertical_scroll_end
        for line in lines:
            log.write(Text(line, style), scroll_end=is_at_end)
        if lines:
            self._note(f"the end of the output. All of it: taskyard log {self._quoted()}")
        elif not log.lines:
            self._note("no output")

    def _quoted(self) -> str:
        return text.quoted(self._opened)

    def targets(self) -> list[Target]:
        if self._view is None:
            return []
        return [Target(self._opened, Filter(), self._view)]

    def places(self) -> list[Place]:
        return [Place()] if self._view is None else [*places_of(self._view), Place()]
