"""The screens of `taskyard top`: overview, lanes and services, workers, tasks.

A pane requests what it shows, and nothing while another one is shown. `output_pane` has the fifth,
a task with its output.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Struct
from rich.text import Text
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import DataTable, Sparkline, Static

from taskyard.client.requests import full_name
from taskyard.client.task_filters import Filter, TaskSearch
from taskyard.core.durations import rough_duration
from taskyard.tui import text
from taskyard.tui.actions import Place, Target
from taskyard.tui.samples import Pace, Throughput
from taskyard.tui.table import RowTable

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from taskyard.client.broker_link import BrokerLink
    from taskyard.tui.text import View

#: Rows on one page of a table. More than a terminal has lines, and few enough to draw at once.
PAGE_ROWS: Final = 100

#: Lanes that are read, in one request.
_LANES_MAX: Final = 1000

#: Rates below have a decimal.
_WHOLE_RATE: Final = 10


class Session(Struct):
    """The link, the filter and the latest status, shared by all panes."""

    link: BrokerLink
    wanted: Filter
    throughput: Throughput
    stats: View | None = None


class Opened(Message):
    """A row was opened: show the tasks of a filter, or one task."""

    def __init__(self, wanted: Filter | None = None, name: str = "") -> None:
        super().__init__()
        self.wanted, self.name = wanted, name


class Pane(Vertical):
    """One screen."""

    #: The table that has the keyboard when the pane is shown.
    focus_on: ClassVar = ""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(id=name)
        self.session = session

    async def load(self) -> None:
        """Request and draw what is shown. Raises `TaskyardError`."""
        raise NotImplementedError

    def reload(self) -> None:
        """Make everything due, after an action or another filter."""

    def turn_page(self, step: int) -> None:
        """Show the next page, or the one before."""

    def targets(self) -> list[Target]:
        """Return what an action may be for, the likeliest first."""
        return []

    def places(self) -> list[Place]:
        """Return what may be paused, the likeliest first."""
        return [Place()]

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        key = event.row_key.value
        if key is not None:
            self.open_row(event.data_table, key)

    def open_row(self, table: DataTable[Any], key: str) -> None:
        raise NotImplementedError

    def _table(self, name: str) -> RowTable:
        return self.query_one(f"#{name}", RowTable)

    def _note(self, words: str) -> None:
        self.query_one(".note", Static).update(Text(words))


class OverviewPane(Pane):
    """Counters, throughput and campaigns."""

    focus_on = "campaigns-table"

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._pace = Pace()
        self._oldest: float | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="counters")
        yield Sparkline([0.0], id="rates", summary_function=max)
        yield Static(id="facts")
        yield RowTable(text.CAMPAIGN_COLUMNS, name="campaigns-table")
        yield Static(classes="note")

    async def load(self) -> None:
        stats = self.session.stats
        if stats is None:
            return
        await self._find_oldest(stats)
        width = self.size.width
        self.query_one("#counters", Static).update(text.counters(stats["counts"], width - 2))
        columns = max(width - 2, 1)  # one bar for each, the latest at the right
        rates = self.session.throughput.rates()[-columns:]
        self.query_one("#rates", Sparkline).data = [0.0] * (columns - len(rates)) + rates
        self.query_one("#facts", Static).update(self._facts(stats))
        campaigns = [one for one in reversed(stats["campaigns"]) if sum(one["counts"].values())]
        shown = campaigns[:PAGE_ROWS]
        self._table("campaigns-table").show_rows([text.campaign_row(one, width) for one in shown])
        more = len(campaigns) - len(shown)
        note = f"the newest {len(shown):,} campaigns of {len(campaigns):,}" if more else ""
        self._note(note or ("" if shown else "no campaigns"))

    async def _find_oldest(self, stats: View) -> None:
        """Find the oldest ready task: the first one in the order of submission."""
        if not stats["counts"]["ready"]:
            self._oldest = None
            return
        began = time.monotonic()
        if not self._pace.is_due(began):
            return
        search = TaskSearch(Filter(only=("ready",)), 1)
        while not await self.session.link.call(search.step):
            pass
        self._oldest = search.rows[0]["submitted"] if search.rows else None
        self._pace.took(began, time.monotonic())

    def _facts(self, stats: View) -> Text:
        throughput = self.session.throughput
        rate, left = throughput.rate(), throughput.seconds_left()
        rate_text = f"{rate:,.0f}" if rate >= _WHOLE_RATE else f"{rate:.1f}"
        facts = [
            ("ended", f"{rate_text} tasks/s"),
            ("time left", "unknown" if left is None else rough_duration(left)),
            ("oldest ready", text.since(self._oldest, time.time()) or "none"),
            ("workers", f"{stats['workers']:,}"),
        ]
        line = Text("   ").join(
            [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in facts]
        )
        if paused := text.pauses(stats):
            line.append(f"\npaused: {paused}", "yellow")
        if stats["behind_failure"]:
            behind = text.count(stats["behind_failure"], "blocked task")
            line.append(f"\n{behind} behind failed ones", "red")
        return line

    def targets(self) -> list[Target]:
        key = self._table("campaigns-table").cursor_key
        return [] if key is None else [Target("", Filter(campaign=key))]

    def open_row(self, table: DataTable[Any], key: str) -> None:  # noqa: ARG002  # there is one
        self.post_message(Opened(Filter(campaign=key)))


class LanesPane(Pane):
    """Services, and lanes with why they wait. The filter's service and lane apply."""

    focus_on = "lanes-table"

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._pace = Pace()
        self._lanes: list[View] = []
        self._first = 0

    def compose(self) -> ComposeResult:
        yield RowTable(text.SERVICE_COLUMNS, name="services-table")
        yield RowTable(text.LANE_COLUMNS, name="lanes-table")
        yield Static(classes="note")

    def reload(self) -> None:
        self._pace.reset()
        self._first = 0

    async def load(self) -> None:
        stats, wanted = self.session.stats, self.session.wanted
        if stats is None:
            return
        services = [
            text.service_row(one, stats)
            for one in stats["services"]
            if wanted.service in (None, one["name"])
        ]
        self._table("services-table").show_rows(services[:PAGE_ROWS])
        began = time.monotonic()
        if self._pace.is_due(began):
            self._lanes = await self.session.link.call(
                lambda client: list(islice(client.lanes(wanted.service, wanted.lane), _LANES_MAX))
            )
            self._lanes.sort(key=text.lane_order)
            self._pace.took(began, time.monotonic())
        now = time.time()
        shown = self._lanes[self._first : self._first + PAGE_ROWS]
        self._table("lanes-table").show_rows([text.lane_row(one, now) for one in shown])
        total = len(self._lanes)
        note = f"lanes {self._first + 1:,} to {self._first + len(shown):,} of {total:,}"
        more = " (others: filter by --service or --lane)" if total >= _LANES_MAX else ""
        self._note(note + more if total else "no lane has waiting or running tasks")

    def turn_page(self, step: int) -> None:
        first = self._first + step * PAGE_ROWS
        if 0 <= first < len(self._lanes):
            self._first = first

    def _selected(self) -> Place | None:
        """Return the service or lane under the cursor of the table with the keyboard."""
        if self._table("services-table").has_focus:
            key = self._table("services-table").cursor_key
            return None if key is None else Place(key)
        key = self._table("lanes-table").cursor_key
        if key is None:
            return None
        service, _, lane = key.partition("\0")
        return Place(service, lane)

    def targets(self) -> list[Target]:
        place = self._selected()
        if place is None:
            return []
        return [Target("", Filter(service=place.service, lane=place.lane))]

    def places(self) -> list[Place]:
        place = self._selected()
        if place is None:
            return [Place()]
        return [place, Place(place.service), Place()]

    def open_row(self, table: DataTable[Any], key: str) -> None:
        service, _, lane = key.partition("\0")
        one = table.id == "lanes-table"
        self.post_message(Opened(Filter(service=service, lane=lane if one else None)))


class WorkersPane(Pane):
    """Workers with their slots, resources and tasks."""

    focus_on = "workers-table"

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._pace = Pace()
        self._workers: list[View] = []
        self._first = 0

    def compose(self) -> ComposeResult:
        yield RowTable(text.WORKER_COLUMNS, name="workers-table")
        yield Static(classes="note")

    def reload(self) -> None:
        self._pace.reset()

    async def load(self) -> None:
        began = time.monotonic()
        if self._pace.is_due(began):
            found = await self.session.link.ask("workers")
            self._workers = sorted(found, key=lambda one: str(one["name"]))
            self._pace.took(began, time.monotonic())
        if self._first >= len(self._workers):
            self._first = 0
        shown = self._workers[self._first : self._first + PAGE_ROWS]
        width = self.size.width
        self._table("workers-table").show_rows([text.worker_row(one, width) for one in shown])
        total = len(self._workers)
        note = f"workers {self._first + 1:,} to {self._first + len(shown):,} of {total:,}"
        self._note(note if total else "no workers")

    def turn_page(self, step: int) -> None:
        first = self._first + step * PAGE_ROWS
        if 0 <= first < len(self._workers):
            self._first = first

    def targets(self) -> list[Target]:
        key = self._table("workers-table").cursor_key
        return [] if key is None else [Target("", Filter(worker=key))]

    def open_row(self, table: DataTable[Any], key: str) -> None:  # noqa: ARG002  # there is one
        self.post_message(Opened(Filter(worker=key)))


class TasksPane(Pane):
    """A page of the tasks that match the filter."""

    focus_on = "tasks-table"

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._pace = Pace()
        self._found = TaskSearch(session.wanted, PAGE_ROWS)
        #: Where the pages up to this one begin.
        self._places = [0]

    def compose(self) -> ComposeResult:
        yield Static(id="filter-line")
        yield RowTable(text.TASK_COLUMNS, name="tasks-table")
        yield Static(classes="note")

    def reload(self) -> None:
        self._pace.reset()

    def restart(self) -> None:
        """Show the first page, of another filter."""
        self._places = [0]
        self._found = TaskSearch(self.session.wanted, PAGE_ROWS)
        self._pace.reset()

    async def load(self) -> None:
        began = time.monotonic()
        places, wanted = self._places, self.session.wanted
        if self._pace.is_due(began):
            search = TaskSearch(wanted, PAGE_ROWS, places[-1])
            while not await self.session.link.call(search.step):
                if wanted is not self.session.wanted:
                    return  # another filter was typed meanwhile
            if places is not self._places or wanted is not self.session.wanted:
                return
            self._found = search
            self._pace.took(began, time.monotonic())
        now, width = time.time(), self.size.width
        rows = [text.task_row(view, width, now) for view in self._found.rows]
        self._table("tasks-table").show_rows(rows)
        self.query_one("#filter-line", Static).update(
            Text.assemble(("filter ", "dim"), text.one_line(wanted.text) or "none: all tasks")
        )
        self._note(self._page_text())

    def _page_text(self) -> str:
        """Return a line on the page that is shown."""
        if not self._found.rows:
            return "no task matches"
        words = [f"page {len(self._places):,}", text.count(len(self._found.rows), "task")]
        if self._found.next_place:
            words.append("more on the next page (n)")
        if self._found.is_partial:
            words.append("not all tasks were searched")
        return ", ".join(words)

    def turn_page(self, step: int) -> None:
        if step > 0 and self._found.next_place:
            self._places = [*self._places, self._found.next_place]
        elif step < 0 and len(self._places) > 1:
            self._places = self._places[:-1]
        self._pace.reset()

    def selected(self) -> View | None:
        """Return the task under the cursor."""
        key = self._table("tasks-table").cursor_key
        by_name = {full_name(view): view for view in self._found.rows}
        return None if key is None else by_name.get(key)

    def targets(self) -> list[Target]:
        view, wanted = self.selected(), self.session.wanted
        one = [] if view is None else [Target(full_name(view), wanted, view)]
        return [*one, Target("", wanted)]

    def places(self) -> list[Place]:
        view, wanted = self.selected(), self.session.wanted
        found = [] if view is None else places_of(view)
        if wanted.service is not None:
            found.append(Place(wanted.service, wanted.lane))
        return [*found, Place()]

    def open_row(self, table: DataTable[Any], key: str) -> None:  # noqa: ARG002  # there is one
        self.post_message(Opened(name=key))


def places_of(view: View) -> list[Place]:
    """Return the lane and the service of a task."""
    return [Place(view["service"], view["lane"]), Place(view["service"])]
