"""The application: keys, the timer, the filter, and the banner of a broker that is away.

It requests the status once a second at most, and what the shown screen needs. A broker that goes
away is tried again every second, while the last replies stay on the screen.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.css.query import NoMatches
from textual.widgets import ContentSwitcher, Footer, Input, Static

from taskyard.client import task_filters
from taskyard.client.requests import full_name
from taskyard.errors import TaskyardError, UserError
from taskyard.tui import actions, text
from taskyard.tui.dialogs import Confirmation, Help
from taskyard.tui.output_pane import OutputPane
from taskyard.tui.panes import (
    LanesPane,
    Opened,
    OverviewPane,
    Pane,
    Session,
    TasksPane,
    WorkersPane,
)
from taskyard.tui.samples import Throughput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.screen import Screen

    from taskyard.client.broker_link import BrokerLink
    from taskyard.client.task_filters import Filter
    from taskyard.tui.actions import Choice

#: Seconds between two drawings.
_TICK_SECONDS: Final = 1.0

#: Seconds between two drawings while another window has the keyboard.
_BLURRED_SECONDS: Final = 5.0

#: A broker that has not replied for this long is reported.
_SILENT_SECONDS: Final = 2.0

#: The name of the broker is left out of the title if there is less room.
_NAME_WIDTH_MIN: Final = 8

#: Screens that `Esc` goes back to.
_BACK_MAX: Final = 50

_PANES: Final = {
    "overview": OverviewPane,
    "lanes": LanesPane,
    "workers": WorkersPane,
    "tasks": TasksPane,
    "task": OutputPane,
}

_CSS: Final = """
#title { height: 1; background: $primary-background; text-wrap: nowrap; }
#banner { display: none; height: auto; background: $warning; color: $text; padding: 0 1; }
#banner.shown { display: block; }
ContentSwitcher { height: 1fr; }
Pane { height: 1fr; }
#counters { height: auto; padding: 0 1; margin: 1 0 0 0; }
#rates { height: 3; padding: 0 1; }
#facts { height: auto; padding: 0 1; margin: 0 0 1 0; }
RowTable { height: 1fr; scrollbar-size-vertical: 1; }
#services-table { height: auto; max-height: 40%; margin: 0 0 1 0; }
#filter-line { height: 1; padding: 0 1; }
.note { height: 1; padding: 0 1; color: $text-muted; }
#details { height: auto; max-height: 50%; padding: 0 1; }
#output { height: 1fr; border-top: solid $primary; padding: 0 1; overflow-y: auto; }
#output, #details, #dialog { scrollbar-size-vertical: 1; }
#filter { display: none; dock: bottom; margin: 0 0 1 0; }
#filter.shown { display: block; }
Confirmation, Help { align: center middle; }
#dialog {
    width: 90%; max-width: 100; height: auto; max-height: 100%; padding: 0 2;
    border: round $primary; background: $surface;
}
#dialog OptionList { height: auto; max-height: 12; margin: 1 0; padding: 0; border: none; }
#dialog #priority { margin: 1 0 0 0; }
"""


class Top(App[None]):
    """`taskyard top`."""

    CSS = _CSS
    TITLE = "taskyard top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1,o", "pane('overview')", "Overview", show=False),
        Binding("2,l", "pane('lanes')", "Lanes and services", show=False),
        Binding("3,w", "pane('workers')", "Workers", show=False),
        Binding("4,t", "pane('tasks')", "Tasks", show=False),
        Binding("5", "pane('task')", "Task under the cursor, with its output", show=False),
        Binding("enter", "open", "Open what is under the cursor", show=False),
        Binding("slash", "edit_filter", "Filter", key_display="/"),
        Binding("r", "act('retry')", "Retry"),
        Binding("c", "act('cancel')", "Cancel"),
        Binding("p", "pause", "Pause or resume"),
        Binding("plus", "act('priority')", "Priority", key_display="+"),
        Binding("n", "page(1)", "Next page", show=False),
        Binding("b", "page(-1)", "Page before", show=False),
        Binding("tab", "app.focus_next", "Next table", show=False),
        Binding("escape", "leave", "Back", key_display="Esc"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, link: BrokerLink, name: str, wanted: Filter) -> None:
        """Show the broker behind a link. `name` is its endpoint or its state directory."""
        # Without colours, not even greys: a terminal may have a light background.
        super().__init__(ansi_color=bool(os.environ.get("NO_COLOR")))
        self.animation_level = "none"
        self._link, self._broker_name = link, name
        self._session = Session(link, wanted, Throughput())
        #: Screens and filters to go back to.
        self._back: list[tuple[str, Filter]] = []
        self._wake = asyncio.Event()
        self._is_focused = True
        #: Number of finished drawings, for tests.
        self.drawings = 0

    # Widgets.

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="banner")
        initial = "tasks" if self._session.wanted.text else "overview"
        with ContentSwitcher(initial=initial):
            for name, kind in _PANES.items():
                yield kind(self._session, name)
        yield Input(
            id="filter", placeholder="--campaign NAME --failed part-of-a-name", compact=True
        )
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._focus_pane()
        self._show_banner("loading")
        self.run_worker(self._poll(), exit_on_error=True)

    @property
    def _base(self) -> Screen[object]:
        """Return the screen below all dialogs."""
        return self.screen_stack[0]

    @property
    def pane_name(self) -> str:
        return self._base.query_one(ContentSwitcher).current or "overview"

    @property
    def pane(self) -> Pane:
        return self._base.query_one(f"#{self.pane_name}", Pane)

    def _focus_pane(self) -> None:
        self._draw_title()
        self.pane.query_one(f"#{self.pane.focus_on}").focus()

    def _draw_title(self) -> None:
        title = Text(" taskyard top ", "bold")
        for number, name in enumerate(_PANES, start=1):
            style = "bold reverse" if name == self.pane_name else ""
            title.append(f" {number} {name} ", style)
        room = self.size.width - title.cell_len - 2
        if room > _NAME_WIDTH_MIN:
            title.append(f" {text.shortened(self._broker_name, room)}", "dim")
        self._base.query_one("#title", Static).update(title)

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
                return  # widgets are removed one by one when it closes
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
        stats = await self._link.ask("status")
        self._session.stats = stats
        self._session.throughput.add(time.monotonic(), stats["counts"])
        await self.pane.load()

    def _show_banner(self, words: str) -> None:
        banner = self._base.query_one("#banner", Static)
        banner.set_class(bool(words), "shown")
        banner.update(Text(text.one_line(words)))

    def _refresh_soon(self) -> None:
        """Request everything again, after an action or a key."""
        self.pane.reload()
        self._wake.set()

    def on_resize(self) -> None:
        self._draw_title()
        self._wake.set()

    def on_app_blur(self, _event: events.AppBlur) -> None:
        self._is_focused = False

    def on_app_focus(self, _event: events.AppFocus) -> None:
        self._is_focused = True
        self._wake.set()

    # Screens.

    def _go(self, name: str) -> None:
        """Show a screen. `Esc` returns to this one."""
        if name != self.pane_name:
            self._remember()
        self._base.query_one(ContentSwitcher).current = name
        self._focus_pane()
        self._wake.set()

    def _remember(self) -> None:
        self._back = [*self._back[-_BACK_MAX:], (self.pane_name, self._session.wanted)]

    def action_pane(self, name: str) -> None:
        tasks = self._base.query_one(TasksPane)
        if name == "task" and self.pane_name == "tasks" and (view := tasks.selected()) is not None:
            self._base.query_one(OutputPane).open(full_name(view))
        self._go(name)

    def action_leave(self) -> None:
        if self._base.query_one("#filter", Input).has_class("shown"):
            self._hide_filter()
        elif self._back:
            name, wanted = self._back.pop()
            self._set_filter(wanted)
            self._base.query_one(ContentSwitcher).current = name
            self._focus_pane()
            self._wake.set()

    def action_page(self, step: int) -> None:
        self.pane.turn_page(step)
        self._wake.set()

    def action_help(self) -> None:
        self.push_screen(Help(key_table()))

    def on_opened(self, event: Opened) -> None:
        if event.wanted is None:
            self._base.query_one(OutputPane).open(event.name)
            self._go("task")
            return
        self._remember()
        self._set_filter(event.wanted)
        self._base.query_one(ContentSwitcher).current = "tasks"
        self._focus_pane()
        self._wake.set()

    # The filter.

    def _set_filter(self, wanted: Filter) -> None:
        if wanted != self._session.wanted:
            self._session.wanted = wanted
            self._base.query_one(TasksPane).restart()
            self._base.query_one(LanesPane).reload()

    def action_edit_filter(self) -> None:
        field = self._base.query_one("#filter", Input)
        field.value = self._session.wanted.text
        field.add_class("shown")
        field.focus()

    def _hide_filter(self) -> None:
        self._base.query_one("#filter", Input).remove_class("shown")
        self._focus_pane()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            wanted = task_filters.parse(event.value)
        except UserError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        if wanted != self._session.wanted:
            self._remember()
            self._set_filter(wanted)
        self._hide_filter()
        if self.pane_name != "lanes":
            self._base.query_one(ContentSwitcher).current = "tasks"
            self._focus_pane()
        self._wake.set()

    # Actions.

    def action_act(self, name: str) -> None:
        self.run_worker(self._act(actions.VERBS[name]), group="action", exclusive=True)

    async def _act(self, verb: actions.Verb) -> None:
        """Confirm an action on tasks, and carry it out."""
        targets, stats = self.pane.targets(), self._session.stats
        if not targets or stats is None:
            self.notify(f"nothing to {verb.name}: choose a task, a campaign or a lane")
            return
        try:
            choices = await actions.task_choices(self._link, stats, verb, targets)
        except TaskyardError as error:
            self._report(error)
            return
        priority = None
        if verb.name == "priority":
            view = targets[0].view
            priority = 0 if view is None else int(view["priority"])
        await self._confirm(verb.question, choices, priority)

    def action_pause(self) -> None:
        self.run_worker(self._pause(), group="action", exclusive=True)

    async def _pause(self) -> None:
        """Confirm a pause, or its end, and carry it out."""
        stats = self._session.stats
        if stats is None:
            return
        try:
            choices = await actions.pause_choices(self._link, stats, self.pane.places())
        except TaskyardError as error:
            self._report(error)
            return
        await self._confirm("Pause or resume", choices)

    async def _confirm(
        self, title: str, choices: list[Choice], priority: int | None = None
    ) -> None:
        chosen = await self.push_screen_wait(Confirmation(title, choices, priority))
        if chosen is None:
            return
        number, value = chosen
        act = choices[number].act
        if act is None:
            return
        try:
            done = await self._link.act(lambda client: act(client, value))
        except TaskyardError as error:
            self._report(error)
        else:
            self.notify(done, markup=False)
        self._refresh_soon()

    def _report(self, error: TaskyardError) -> None:
        """Show why a request was refused, or failed."""
        self.notify(text.one_line(str(error)), severity="error", timeout=10, markup=False)


def key_table() -> Iterator[tuple[str, str]]:
    """Yield the keys and what they do, for the help and the documentation."""
    for binding in Top.BINDINGS:
        if isinstance(binding, Binding):
            keys = binding.key_display or binding.key.replace(",", " or ")
            yield {"enter": "Enter", "tab": "Tab"}.get(keys, keys), binding.description
