"""HTML for notebooks: clients, campaigns and futures. All text is escaped.

Each call waits two seconds at most, and never raises: a notebook would print a traceback. Colours
mark states only, and can be read on white and on black. Imports no client: a session is enough.
"""

from __future__ import annotations

import reprlib
import time
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from taskyard.client import requests
from taskyard.client.exchanges import Deadline, request_and_wait, run_exchange
from taskyard.client.progress import Rate
from taskyard.core.states import TaskState
from taskyard.design import PALETTES
from taskyard.errors import BytesTruncated, TaskyardError, TimedOut
from taskyard.process.state_files import page_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.client.exchanges import Exchange
    from taskyard.client.session import Session

_T = TypeVar("_T")

#: Timeout of the request behind a box.
_SECONDS: Final = 1.0

#: A longer result is described, not shown.
_RESULT_CHARACTERS_MAX: Final = 200

#: A longer line is cut.
_LINE_CHARACTERS_MAX: Final = 500

#: Failed tasks of a campaign that are named.
_FAILURES_MAX: Final = 5

#: A campaign is shown again some minutes later. The time left follows from all that was seen.
_RATE_SECONDS: Final = 600.0

#: The states of tasks, most interesting first.
_COLOURS: Final = {
    state: PALETTES["light"][state]
    for state in ("done", "failed", "cancelled", "leased", "ready", "delayed", "blocked")
}

#: How fast the campaigns of a session proceed, as its boxes have shown it.
_rates: Final[WeakKeyDictionary[Session, dict[str, Rate]]] = WeakKeyDictionary()

_BOX: Final = (
    "display:inline-block;border:1px solid rgba(128,128,128,.4);border-radius:6px;"
    "padding:.5em .8em;min-width:20em;max-width:60em;line-height:1.5;overflow-wrap:anywhere"
)
_FAINT: Final = "opacity:.7"
_TRACK: Final = (
    "display:flex;height:.5em;border-radius:.25em;overflow:hidden;margin:.4em 0;"
    "background:rgba(128,128,128,.25)"
)


class NamedFuture(Protocol):
    """A future of a task."""

    @property
    def full_name(self) -> str: ...

    def done(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...

    def result(self) -> object: ...


def client_html(session: Session, kind: str) -> str:
    """Return a box with the broker's endpoint, its tasks by state and its workers."""
    return _box(_title(kind, session.endpoint), session, lambda: _client_lines(session))


def _client_lines(session: Session) -> list[str]:
    status = _query(session, requests.status(_SECONDS))
    workers = status["workers"]
    note = f"{workers:,} worker{'' if workers == 1 else 's'}"
    if status["behind_failure"]:
        note += f", {status['behind_failure']:,} blocked behind a failure"
    if not status["accepting"]:
        note += ", accepts no more tasks"
    if status["paused"]:
        note += ", paused"
    return [*_counts_bar(status["counts"]), _line(note), *_page_link(session.endpoint)]


def _page_link(endpoint: str) -> list[str]:
    """Return a link to the page of a broker on this machine, if one runs. It has no token."""
    scheme, _, path = endpoint.partition("://")
    address = page_address(Path(path).parent) if scheme == "ipc" else None
    if address is None:
        return []
    return [f'<div><a href="{escape(address)}" target="_blank">{escape(address)}</a></div>']


def campaign_html(session: Session, name: str) -> str:
    """Return a box with a campaign's tasks by state, its time left and its failures."""
    return _box(_title("Campaign", name), session, lambda: _campaign_lines(session, name))


def _campaign_lines(session: Session, name: str) -> list[str]:
    found = _query(session, requests.campaign_counts(name, Deadline.after(_SECONDS)))
    counts, ended, left = found.by_state, found.ended, found.left
    lines = _counts_bar(counts)
    rate = _rates.setdefault(session, {}).setdefault(name, Rate(_RATE_SECONDS))
    texts = rate.texts(time.monotonic(), ended, left)
    if ended and left:
        lines.append(_line(", ".join([f"{ended / (ended + left):.0%} ended", *texts])))
    if counts["failed"]:
        lines += _failure_lines(session, name, counts["failed"])
    return lines


def _failure_lines(session: Session, campaign: str, total: int) -> list[str]:
    """Return the first failed tasks with their reasons. The counts alone are useful too."""
    scope = requests.scope_of(campaign=campaign, states=[TaskState.FAILED])
    deadline = Deadline.after(_SECONDS)
    page = requests.tasks_page(scope, deadline=deadline, count=_FAILURES_MAX)
    try:
        views, _ = _query(session, page)
    except TimedOut:
        return []
    lines = [_line(f"{view['name']} failed: {view['reason']}") for view in views]
    return [*lines, *([_line(f"and {total - len(views):,} more")] if total > len(views) else [])]


def future_html(session: Session, future: NamedFuture) -> str:
    """Return a box with a task's state, and its result or why it has none yet."""
    title = _title("Future of task", future.full_name)
    if future.done():
        return _box(title, session, lambda: _ended_lines(future))
    return _box(title, session, lambda: _waiting_lines(session, future.full_name))


def _ended_lines(future: NamedFuture) -> list[str]:
    if future.cancelled():
        return [_state("cancelled")]
    error = future.exception()
    if error is not None:
        state = "done" if isinstance(error, BytesTruncated) else "failed"
        return [_state(state), _line(str(error))]
    return [_state("done"), _line(f"result: {_result(future.result())}")]


def _result(value: object) -> str:
    """Return the result if it is short, else its type and length."""
    text = _shorten.repr(value)
    if len(text) <= _RESULT_CHARACTERS_MAX and _CUT not in text:
        return text
    size = f", {len(value):,} long" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


#: Marks an omission. No shown text contains it.
_CUT: Final = "\0"

_shorten: Final = reprlib.Repr()
_shorten.fillvalue = _CUT
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = _RESULT_CHARACTERS_MAX
_shorten.maxlist = _shorten.maxtuple = _shorten.maxdict = 20


def _waiting_lines(session: Session, name: str) -> list[str]:
    view = _query(session, requests.show(name, _SECONDS))
    return [_state(view["state"]), _line(_query(session, requests.why(name, _SECONDS)))]


def _query(session: Session, exchange: Exchange[_T]) -> _T:
    """Run an exchange by blocking. A notebook can't await the HTML of an `AsyncClient`."""
    return run_exchange(exchange, partial(request_and_wait, session))


def _box(title: str, session: Session, lines: Callable[[], list[str]]) -> str:
    """Return a box with these lines, or with the error that they raise."""
    try:
        inside = lines()
    except TimedOut:
        inside = [_line(f"broker at {session.endpoint}: no answer within {_SECONDS:g} s")]
    except TaskyardError as error:
        inside = [_line(str(error))]
    except Exception as error:  # noqa: BLE001  # a notebook would show a traceback instead
        inside = [_line(f"can't be shown: {error!r}")]
    return f'<div style="{_BOX}">{title}{"".join(inside)}</div>'


def _title(kind: str, name: str) -> str:
    return f"<div>{escape(kind)} <code>{escape(_short(name))}</code></div>"


def _line(text: str) -> str:
    return f'<div style="{_FAINT}">{escape(_short(text))}</div>'


def _short(text: str) -> str:
    cut = len(text) > _LINE_CHARACTERS_MAX
    return f"{text[:_LINE_CHARACTERS_MAX]}…" if cut else text


def _state(state: str) -> str:
    return f"<div>{_dot(state)}{escape(state)}</div>"


def _counts_bar(counts: dict[str, int]) -> list[str]:
    """Return a bar of all tasks, and their numbers by state. Skip empty states."""
    total = sum(counts.values())
    if not total:
        return [_line("no tasks")]
    some = {state: counts[state] for state in _COLOURS if counts.get(state)}
    numbers = [
        f'<span style="margin-right:1em;white-space:nowrap">{_dot(state)}{number:,} {state}</span>'
        for state, number in some.items()
    ]
    bar = _bar((_COLOURS[state], number) for state, number in some.items())
    return [bar, f"<div>{''.join(numbers)}</div>"]


def _bar(parts: Iterable[tuple[str, int]]) -> str:
    pieces = [
        f'<div style="flex:{number};min-width:3px;background:{colour}"></div>'
        for colour, number in parts
        if number
    ]
    return f'<div style="{_TRACK}">{"".join(pieces)}</div>'


def _dot(state: str) -> str:
    return (
        '<span style="display:inline-block;width:.7em;height:.7em;border-radius:50%;'
        f'margin-right:.4em;background:{_COLOURS.get(state, "gray")}"></span>'
    )
