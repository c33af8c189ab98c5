"""One task: why it is in its state, its attempts, and its output while it is printed."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Final

from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.widgets import RichLog, Static

from taskyard.errors import BytesMissing
from taskyard.tui import text
from taskyard.tui.screens import Pace

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from taskyard.client.broker_link import BrokerLink
    from taskyard.client.internal import InternalClient
    from taskyard.tui.text import View
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
        """Return the whole lines of a part. The last one is whole at the end of the attempt."""
        self._offset += len(page.data)
        *whole, self._rest = (self._rest + page.data).split(b"\n")
        if not page.live and self._rest and self._offset >= page.bytes_total:
            whole, self._rest = [*whole, self._rest], b""
        return [text.output_line(line) for line in whole]


class TaskPane(Vertical):
    """The open task, if there is one."""

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
        self.query_one("#details-text", Static).update(Text(text.one_line(name)))

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
        lines = text.task_lines(self._view, self._why, time.time())
        self.query_one("#details-text", Static).update(text.labelled(lines, self.size.width - 2))
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
            self._write([text.output_line(line) for line in lines], "")
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
