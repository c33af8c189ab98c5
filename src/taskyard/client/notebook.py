"""How clients, campaigns and futures look in a notebook. Everything that is shown is escaped.

A look asks the broker once more, waits a second at most, and never raises: who evaluates a name in
a cell wants to see something. Colours are set only where they mean a state, and are such that they
can be read on white and on black; the rest is the notebook's.
"""

from __future__ import annotations

import reprlib
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Final, TypeVar

from taskyard.client import requests
from taskyard.errors import OutputTruncated, TaskyardError, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from taskyard.client.aio import AsyncClient, AsyncFuture
    from taskyard.client.client import Client
    from taskyard.client.futures import Future
    from taskyard.client.requests import Exchange

_T = TypeVar("_T")

#: Nobody waits longer to see what a name stands for.
_SECONDS: Final = 1.0

#: A result that is longer than this is not shown.
_RESULT_CHARACTERS_MAX: Final = 200

#: The states of tasks, in the order in which a person asks for them.
_COLOURS: Final = {
    "done": "#2f9e58",
    "failed": "#d9483b",
    "cancelled": "#9a6b4f",
    "leased": "#3b82d6",
    "ready": "#7c8aa0",
    "delayed": "#b58a1c",
    "blocked": "#9467bd",
}

_BOX: Final = (
    "display:inline-block;border:1px solid rgba(128,128,128,.4);border-radius:6px;"
    "padding:.5em .8em;min-width:20em;max-width:100%;line-height:1.5"
)
_FAINT: Final = "opacity:.7"
_TRACK: Final = (
    "display:flex;height:.5em;border-radius:.25em;overflow:hidden;margin:.4em 0;"
    "background:rgba(128,128,128,.25)"
)


def client_html(client: Client | AsyncClient) -> str:
    """Where the broker is, its tasks by state, its workers."""
    title = _title(type(client).__name__, client.broker)
    return _box(title, client, lambda: _client_lines(client))


def _client_lines(client: Client | AsyncClient) -> list[str]:
    told = _query(client, requests.status(_SECONDS))
    workers = told["workers"]
    note = f"{workers:,} worker{'' if workers == 1 else 's'}"
    if told["behind_failure"]:
        note += f", {told['behind_failure']:,} blocked behind a failure"
    if not told["accepting"]:
        note += ", takes no more tasks"
    if told["paused"]:
        note += ", paused"
    return [*_counts_bar(told["counts"]), _line(note)]


def campaign_html(client: Client | AsyncClient, name: str) -> str:
    """A campaign's tasks by state."""
    return _box(
        _title("Campaign", name),
        client,
        lambda: _counts_bar(_query(client, requests.campaign_counts(name, _SECONDS))),
    )


def future_html(client: Client | AsyncClient, future: Future | AsyncFuture) -> str:
    """Where a task is, what it waits for, what came of it."""
    title = _title("Future of task", future.full_name)
    if future.done():
        return _box(title, client, lambda: _ended_lines(future))
    return _box(title, client, lambda: _waiting_lines(client, future.full_name))


def _ended_lines(future: Future | AsyncFuture) -> list[str]:
    if future.cancelled():
        return [_state("cancelled")]
    error = future.exception()
    if error is not None:
        state = "done" if isinstance(error, OutputTruncated) else "failed"
        return [_state(state), _line(str(error))]
    return [_state("done"), _line(f"result: {_result(future.result())}")]


def _result(value: object) -> str:
    """The result if it is short, else what it is."""
    text = _shorten.repr(value)
    if len(text) <= _RESULT_CHARACTERS_MAX and _CUT not in text:
        return text
    size = f", {len(value):,} long" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


#: Stands where something is left out, and in no text that is shown.
_CUT: Final = "\0"

_shorten: Final = reprlib.Repr()
_shorten.fillvalue = _CUT
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = _RESULT_CHARACTERS_MAX
_shorten.maxlist = _shorten.maxtuple = _shorten.maxdict = 20


def _waiting_lines(client: Client | AsyncClient, name: str) -> list[str]:
    state, sentence = _query(client, requests.state_and_why(name, _SECONDS))
    return [_state(state), _line(sentence)]


def progress_html(ended: int, failed: int, total: int, text: str) -> str:
    """A bar, and how far it is in words."""
    well, rest = (_COLOURS["done"], ended - failed), ("transparent", total - ended)
    bar = _bar([well, (_COLOURS["failed"], failed), rest])
    return f'<div style="max-width:40em">{bar}{_line(text)}</div>'


def _query(client: Client | AsyncClient, exchange: Exchange[_T]) -> _T:
    """Ask, also on behalf of an `AsyncClient`: a notebook does not wait for what is awaited."""
    courier = client._session  # noqa: SLF001  # these pages are the client's own
    return requests.run_exchange(exchange, partial(requests.request_and_wait, courier))


def _box(title: str, client: Client | AsyncClient, lines: Callable[[], list[str]]) -> str:
    """A box, with what is wrong in it where something is."""
    try:
        inside = lines()
    except TimedOut:
        inside = [_line(f"no broker answers at {client.broker} (waited {_SECONDS:g} s)")]
    except TaskyardError as error:
        inside = [_line(str(error))]
    except Exception as error:  # noqa: BLE001  # a notebook would show a traceback instead
        inside = [_line(f"can't be shown: {error!r}")]
    return f'<div style="{_BOX}">{title}{"".join(inside)}</div>'


def _title(kind: str, name: str) -> str:
    return f"<div>{escape(kind)} <code>{escape(name)}</code></div>"


def _line(text: str) -> str:
    return f'<div style="{_FAINT}">{escape(text)}</div>'


def _state(state: str) -> str:
    return f"<div>{_dot(state)}{escape(state)}</div>"


def _counts_bar(counts: dict[str, int]) -> list[str]:
    """A bar of all tasks, and their numbers by state; states that nobody is in are left out."""
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
