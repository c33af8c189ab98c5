"""The tables of `taskyard top`, and the broker's replies as their rows and lines of text.

Names, reasons and output come from users and programs, so every character that a terminal would
obey is escaped here.
"""

from __future__ import annotations

import shlex
import textwrap
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text

from taskyard import design
from taskyard.client.requests import full_name
from taskyard.client.task_filters import Filter, TaskSearch
from taskyard.core.durations import duration_text, rough_duration
from taskyard.core.resources import MEMORY, UNIT, format_amount
from taskyard.design import TEXT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskyard.client.internal import BrokerLink

View = dict[str, Any]

#: A row of a table: its key, and its cells.
Row = tuple[str, tuple[Text, ...]]

#: Colours of states, as on the page in dark mode. Their words are always shown too.
STATE_STYLES: Final = {
    name: f"{'bold ' if name == 'failed' else ''}{TEXT['dark'][one.text_colour]}"
    for name, one in design.STATES.items()
}

#: Counters that are left out if they are 0, so that the counters fit a line.
_RARE: Final = ("delayed", "blocked", "cancelled")

#: The order of counters: what moves first, what has ended last.
STATES: Final = ("ready", "leased", "delayed", "blocked", "done", "failed", "cancelled")

LANE_COLUMNS: Final = ("SERVICE", "LANE", "READY", "RUNNING", "OLDEST", "WHY", "NEXT DUE")
WORKER_COLUMNS: Final = ("WORKER", "STATE", "SLOTS", "TASKS", "SEEN", "SERVICES", "FREE", "HOST")
TASK_COLUMNS: Final = ("TASK", "STATE", "TRY", "SINCE", "DETAIL", "SERVICE", "LANE", "PRIORITY")

#: Lanes are often host names. Longer names are shortened.
_LANE_WIDTH_MAX: Final = 24
_NAME_WIDTH_MIN: Final = 16

#: The part of a table's width that a name may take.
_NAME_SHARE: Final = 0.42

_TAB_WIDTH: Final = 8
_GAP: Final = 3
_LABEL_WIDTH: Final = 12


def one_line(text: str) -> str:
    """Return a text on one line, with control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def output_line(line: bytes) -> str:
    """Return a line that a program has printed. Tabs are kept as spaces."""
    text = line.decode(errors="backslashreplace").rstrip("\r").expandtabs(_TAB_WIDTH)
    return one_line(text.rpartition("\r")[2])  # a progress bar has overwritten what was before


def shortened(text: str, width: int) -> str:
    """Replace the middle of a name that is too long."""
    text = one_line(text)
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def name_width(width: int) -> int:
    """Return the width of names in a table of this width."""
    return max(_NAME_WIDTH_MIN, int(width * _NAME_SHARE))


def count(number: int, thing: str) -> str:
    """Format a count: `1 task`, `2,000 tasks`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def since(at: float | None, now: float) -> str:
    return "" if at is None else rough_duration(max(0.0, now - at))


def until(at: float | None, now: float) -> str:
    if at is None:
        return ""
    return f"in {rough_duration(at - now)}" if at > now else "now"


def _number(number: int, style: str = "") -> Text:
    """Return a number at the right of its cell. Zeros are dim."""
    return Text(f"{number:,}", style if number else "dim", justify="right")


def _word(text: object, style: str = "") -> Text:
    return Text(one_line(str(text)), style)


# The head.


def counters(counts: dict[str, int], width: int) -> Text:
    """Return the numbers of tasks in each state, on one line or two."""
    cells = [
        Text.assemble((f"{counts[state]:,}", f"{STATE_STYLES[state]} bold"), f" {state}")
        for state in STATES
        if counts[state] or state not in _RARE
    ]
    lines = [Text()]
    for cell in cells:
        if lines[-1] and lines[-1].cell_len + cell.cell_len + _GAP > width:
            lines.append(Text())
        lines[-1].append_text(Text(" " * _GAP if lines[-1] else "") + cell)
    return Text("\n").join(lines)


def facts(stats: View) -> Text:
    """Return workers, pauses, and tasks that wait for failed tasks."""
    line = Text(count(stats["workers"], "worker"), "dim")
    paused = ["everything"] if stats["paused"] else []
    paused += [_place(one["service"], one["lane"]) for one in stats["pauses"]]
    if paused:
        line.append(f"   paused: {', '.join(paused)}", "not dim yellow")
    if behind := stats["behind_failure"]:
        line.append(f"   {count(behind, 'blocked task')} behind failed ones", "not dim red")
    return line


def _place(service: str, lane: str | None) -> str:
    """Name a service or one of its lanes."""
    which = "" if lane is None else f"lane {one_line(lane) or '-'} of "
    return f"{which}service {one_line(service)}"


# Lanes and workers.


def lane_row(one: View, now: float) -> Row:
    return lane_key(one["service"], one["lane"]), (
        _word(one["service"]),
        Text(shortened(one["lane"], _LANE_WIDTH_MAX) or "-"),
        _number(one["ready"]),
        _number(one["leased"]),
        _word(since(one["oldest"], now)),
        _word(one["why"]),
        _word(until(one["next_due"], now)),
    )


def lane_key(service: str, lane: str) -> str:
    """Return the key of a lane's row."""
    return f"{service}\0{lane}"


def lane_order(one: View) -> tuple[object, ...]:
    """Sort waiting lanes first, and the lane with the oldest task on top."""
    return bool(one["leased"]), not one["ready"], one["oldest"] or 0.0, one["service"], one["lane"]


def worker_row(one: View, width: int) -> Row:
    slots, used = one["slots"], one["slots_used"]
    free = [
        f"{format_amount(name.encode(), _amount(name, one['resources_free'].get(name, 0)))} {name}"
        for name in one["resources"]
    ]
    state = one["agent_error"] or one["state"]
    return one["name"], (
        Text(shortened(one["name"], name_width(width))),
        _word(state, "bold red" if one["agent_error"] else ""),
        Text(f"{min(used, slots)} of {slots}" if slots else str(used), justify="right"),
        _number(one["tasks"]),
        _word(f"{rough_duration(one['last_seen_ago'])} ago"),
        _word(", ".join(one["services"])),
        _word(", ".join(free)),
        _word(one["host"] or ""),
    )


def _amount(name: str, amount: float) -> int:
    return round(amount * (1 if name.encode() == MEMORY else UNIT))


# Tasks.


def task_row(view: View, width: int, now: float) -> Row:
    state = view["state"]
    at = view["ended"] or view["leased"] or (None if state == "delayed" else view["submitted"])
    return full_name(view), (
        Text(shortened(full_name(view), name_width(width))),
        Text(state, STATE_STYLES[state]),
        _number(view["attempt"]),
        Text(since(at, now)),
        _word(_detail(view, now)),
        _word(view["service"]),
        _word(view["lane"] or "-"),
        _number(view["priority"]),
    )


def _detail(view: View, now: float) -> str:
    """Return what matters in a task's state."""
    if view["state"] == "leased":
        percent = "" if view["percent"] is None else f" {view['percent']} %"
        return f"{view['worker']}{percent} {view['progress']}".strip()
    if view["state"] == "delayed":
        return f"due {until(view['due'], now)}. {view['reason']}".rstrip(". ")
    if view["state"] == "blocked":
        return f"waits for {count(view['waits_for'], 'task')}"
    return str(view["reason"])


def task_lines(view: View, why: str, now: float) -> Iterator[tuple[str, Text]]:
    """Yield the labels and values of one task, the most important first."""
    state = view["state"]
    yield "task", Text(one_line(full_name(view)), "bold")
    yield "state", Text(state, STATE_STYLES[state])
    yield "why", _word(why)
    work = shlex.join(view["argv"] or []) or view["call"] or ""
    yield "work", _word(work)
    lane = f", lane {view['lane']}" if view["lane"] else ""
    yield "place", _word(f"service {view['service']}{lane}, priority {view['priority']}")
    after = ", ".join(view["after"])
    yield "after", _word(after)
    dependents = view["dependents"]
    yield "before", _word(count(dependents, "task") if dependents else "")
    for attempt in view["attempts"]:
        yield f"attempt {attempt['attempt']}", _word(_attempt(attempt, now))


def _attempt(one: View, now: float) -> str:
    """Return one attempt on a line: outcome, worker, times and measurements."""
    started, ended = one["started"], one["ended"]
    words = [one["outcome"] or "running", f"on {one['worker']}"]
    if one["host"]:
        words.append(f"at {one['host']}")
    if started is not None:
        words.append(f"from {time.strftime('%H:%M:%S', time.localtime(started))}")
        words.append(f"for {duration_text(max(0.0, (ended or now) - started))}")
    if one["cpu_seconds"] is not None:
        words.append(f"CPU {one['cpu_seconds']:.2f} s")
    if one["memory_max"] is not None:
        words.append(f"memory {format_amount(MEMORY, one['memory_max'])}")
    if one["exit_status"]:
        words.append(f"exit {one['exit_status']}")
    reason = one["reason"] or one["note"]
    return " ".join(words) + (f": {reason}" if reason else "")


def labelled(lines: Iterable[tuple[str, Text]], width: int) -> Text:
    """Return labels and values below each other, with long values wrapped beside their label.

    Empty values are left out.
    """
    text = Text()
    for label, value in lines:
        parts = textwrap.wrap(value.plain, max(width - _LABEL_WIDTH, _NAME_WIDTH_MIN))
        for number, part in enumerate(parts):
            text.append(f"{'' if number else label:<{_LABEL_WIDTH}}", "dim")
            text.append(f"{part}\n", value.style)
    text.rstrip()
    return text


#: Rows of a table. More than a terminal has lines, and few enough to draw at once.
ROWS_MAX: Final = 100

#: Lanes that are read, in one request.
_LANES_MAX: Final = 1000

#: A search that took a second is repeated after this many. So it takes 2 % of a broker's time.
_REST_FACTOR: Final = 50.0

#: The longest time between two requests, for brokers that are far away.
_REST_SECONDS_MAX: Final = 30.0


class Pace:
    """Spaces requests out by what they cost."""

    def __init__(self) -> None:
        self._began = self._next = 0.0

    def is_due(self) -> bool:
        """Return whether a request is due, which begins now."""
        self._began = time.monotonic()
        return self._began >= self._next

    def done(self) -> None:
        """Note that the request was answered."""
        now = time.monotonic()
        self._next = now + min((now - self._began) * _REST_FACTOR, _REST_SECONDS_MAX)

    def reset(self) -> None:
        """Make the next request due."""
        self._next = 0.0


class Screen:
    """A table: what was found for a filter."""

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self.pace = Pace()
        self._wanted: Filter | None = None
        self._found: list[View] = []
        #: There are more than were found.
        self._has_more = False

    async def load(self, wanted: Filter) -> None:
        """Request what is shown, if it is due. Raises `TaskyardError`."""
        if self.pace.is_due() or wanted != self._wanted:
            self._found, self._has_more = await self._request(wanted)
            self._wanted = wanted
            self.pace.done()

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:
        """Return what matches, and whether there is more."""
        raise NotImplementedError

    def rows(self, width: int) -> list[Row]:
        """Return the rows for a terminal of this width."""
        now = time.time()
        return [self._row(one, width, now) for one in self._found[:ROWS_MAX]]

    def _row(self, view: View, width: int, now: float) -> Row:
        raise NotImplementedError

    def note(self) -> str:
        """Return how many rows are shown."""
        number, singular = len(self._found), self.name.removesuffix("s")
        if number > ROWS_MAX or self._has_more:
            known = "" if self._has_more else f" of {number:,}"
            return f"the first {min(number, ROWS_MAX):,}{known} {self.name} (/ filters them)"
        return count(number, singular) if number else f"no {singular} matches"

    def opened(self, key: str) -> Filter | None:
        """Return the filter of the tasks of a row. None: the row is a task."""
        raise NotImplementedError


class LanesScreen(Screen):
    """Lanes with why they wait. The filter's service and lane apply."""

    name = "lanes"
    columns = LANE_COLUMNS

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:
        found = await self._link.call(
            lambda client: list(islice(client.lanes(wanted.service, wanted.lane), _LANES_MAX))
        )
        return sorted(found, key=lane_order), len(found) >= _LANES_MAX

    def _row(self, view: View, width: int, now: float) -> Row:  # noqa: ARG002  # as in every screen
        return lane_row(view, now)

    def opened(self, key: str) -> Filter:
        service, _, lane = key.partition("\0")
        return Filter(service=service, lane=lane)


class WorkersScreen(Screen):
    """Workers with their slots, resources and tasks."""

    name = "workers"
    columns = WORKER_COLUMNS

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:  # noqa: ARG002  # all
        found = await self._link.ask("workers")
        return sorted(found, key=lambda one: str(one["name"])), False

    def _row(self, view: View, width: int, now: float) -> Row:  # noqa: ARG002  # as in every screen
        return worker_row(view, width)

    def opened(self, key: str) -> Filter:
        return Filter(worker=key)


class TasksScreen(Screen):
    """The first tasks that match the filter."""

    name = "tasks"
    columns = TASK_COLUMNS

    async def _request(self, wanted: Filter) -> tuple[list[View], bool]:
        search = TaskSearch(wanted, ROWS_MAX)
        while not await self._link.call(search.step):
            pass
        return search.rows, bool(search.next_offset or search.is_partial)

    def _row(self, view: View, width: int, now: float) -> Row:
        return task_row(view, width, now)

    def opened(self, key: str) -> None:
        """Return None: a task is opened itself."""
