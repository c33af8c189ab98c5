"""The filter box: the options of `taskyard list`, as text, and a search for its tasks.

`--campaign thumbs --failed fetch` selects the same tasks on the page and in `taskyard top` as in a
command. A word without an option is `--match`. `--reason`, `--reason-like` and `--worker` are only
in filters. Text and filter convert both ways, so that every selection of the page has an address.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

from taskyard.client import requests
from taskyard.core.events import Scope
from taskyard.core.states import TaskState
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskyard.client.exchanges import BlockingRunner
    from taskyard.client.requests import View

#: Options with a text as their value, by the field that they set.
_TEXTS: Final = ("campaign", "service", "lane", "match", "reason", "reason-like", "worker")

#: Columns that a list can be sorted by, the largest first. `submitted` is the usual order.
SORTS: Final = ("submitted", "name", "started", "duration", "memory", "cpu", "ended", "priority")

_STATE_NAMES: Final = tuple(state.name.lower() for state in TaskState)


class Filter(Struct, frozen=True):
    """Selects the tasks that match every given field."""

    campaign: str | None = None
    service: str | None = None
    lane: str | None = None
    match: str | None = None
    #: A part of the reason.
    reason: str | None = None
    #: A reason of the same form, as in `reason_forms`.
    reason_like: str | None = None
    worker: str | None = None
    only: tuple[str, ...] = ()
    sort: str = "submitted"
    reverse: bool = False

    @property
    def scope(self) -> Scope | None:
        """Return the scope of an action. None if a reason or a worker is given."""
        if (self.reason, self.reason_like, self.worker) != (None, None, None):
            return None
        return Scope(
            campaign=_encoded(self.campaign),
            service=_encoded(self.service),
            lane=_encoded(self.lane),
            states=tuple(TaskState[name.upper()] for name in self.only) or None,
            match=_encoded(self.match) or b"",
        )

    @property
    def text(self) -> str:
        """Return the text of the box, from which `parse` makes an equal filter."""
        words: list[str] = []
        for name in _TEXTS:
            value = getattr(self, name.replace("-", "_"))
            if value is not None:
                words += [f"--{name}", value] if value else [f"--{name}="]
        for name in self.only:
            words += ["--only", name]
        if self.sort != "submitted":
            words += ["--sort", self.sort]
        return shlex.join([*words, *(["--reverse"] if self.reverse else [])])

    def with_fields(self, **fields: object) -> Filter:
        """Return this filter with other fields."""
        return structs.replace(self, **fields)


def parse(text: str) -> Filter:
    """Parse the text of the box. Raises UserError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"filter: {str(error).lower()}") from error
    found: dict[str, str] = {}
    only: list[str] = []
    sort, reverse = "submitted", False
    rest = iter(words)
    for word in rest:
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            _set(found, "match", word)
        elif name in ("failed", "reverse"):
            only += ["failed"] if name == "failed" else []
            reverse |= name == "reverse"
        elif name in (*_TEXTS, "only", "sort"):
            value = value if has_value else next(rest, "")
            if not value and not has_value:
                raise UserError(f"filter: --{name} needs a value")
            if name == "only":
                only.append(_one_of(value.lower(), _STATE_NAMES, "state"))
            elif name == "sort":
                sort = _one_of(value, SORTS, "order")
            else:
                _set(found, name, value)
        else:
            known = ", ".join(f"--{one}" for one in (*_TEXTS, "only", "failed", "sort", "reverse"))
            raise UserError(f"filter: unknown option --{name} (use {known}, or a part of a name)")
    texts = {name.replace("-", "_"): value for name, value in found.items()}
    return Filter(**texts, only=tuple(dict.fromkeys(only)), sort=sort, reverse=reverse)


def _set(found: dict[str, str], name: str, value: str) -> None:
    if found.get(name, value) != value:
        raise UserError(f"filter: --{name} takes one value, got {found[name]!r} and {value!r}")
    found[name] = value


def _one_of(value: str, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise UserError(f"filter: unknown {what} {value!r} (use {', '.join(known)})")
    return value


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


#: The beginning of a reason decides its form. A worker's reason is rarely longer.
_CHARACTERS_MAX: Final = 300

#: Addresses, paths, quoted names, identifiers in hexadecimal digits, and numbers, in this order.
#: Exit statuses and signals stay, because they tell failures apart.
_VARYING: Final = re.compile(
    r"""
    (?P<kept>\b(?:exit\ status|exit\ code|signal)\ \d+\b)
    | (?P<address>\b[a-z][a-z0-9+.-]{1,15}://[^\s'"`<>]+)
    | (?P<path>(?<![\w./~\#…-])(?:~|\.{1,2})?[/\\][^\s'"`:;,()<>]+)
    | (?<![\w\#…])(?P<quote>['"`])[^\n]{1,200}?(?P=quote)(?![\w\#…])
    | (?P<number>0x[0-9a-fA-F]+
        | \b(?=[0-9a-f-]*\d)[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b
        | \d+(?:[.,]\d+)*)
    """,
    re.VERBOSE,
)


def form_of(reason: str) -> str:
    """Return the form of a reason. The form of a form is itself."""
    return _VARYING.sub(_replaced, reason[:_CHARACTERS_MAX]).strip()


def _replaced(found: re.Match[str]) -> str:
    if found["kept"]:
        return found["kept"]
    if found["number"]:
        return "#"
    if found["quote"]:
        return f"{found['quote']}…{found['quote']}"
    return "…" if found["address"] else "/…"


#: Tasks that are read for an order other than that of submission.
SORTED_TASKS_MAX: Final = 10_000

#: Requests of one search. Enough for ten million tasks of which none matches.
_REQUESTS_MAX: Final = 50

#: Fields that only the measurements of attempts have.
_MEASURED: Final = ("started", "duration", "memory", "cpu")

_FIELDS: Final = {"memory": "memory_max", "cpu": "cpu_seconds"}


class TaskSearch:
    """Finds a page of a filter's tasks: `step` until it returns True, then use `rows`."""

    def __init__(self, wanted: Filter, count: int, offset: int = 0) -> None:
        """Search for `count` tasks from `offset` on: 0, or `next_offset` of the search before."""
        self._wanted, self._count, self._offset = wanted, count, offset
        self._is_sorted = wanted.sort != "submitted" or wanted.reverse
        self._scope = listing_scope(wanted)
        self._form = None if wanted.reason_like is None else form_of(wanted.reason_like)
        self._cursor = 0 if self._is_sorted else offset
        self._requests = 0
        #: The tasks that were found, in the filter's order.
        self.rows: list[View] = []
        #: Where the next page begins. 0: this is the last page.
        self.next_offset = 0
        #: Not all tasks were searched.
        self.is_partial = False

    def step(self, client: BlockingRunner) -> bool:
        """Send one request. Return whether the search is over."""
        if self._scope is None:
            return True
        limit = SORTED_TASKS_MAX if self._is_sorted else self._count
        page = requests.tasks_page(
            self._scope,
            cursor=self._cursor,
            count=min(limit, requests.PAGE_TASKS),
            measured=self._wanted.sort in _MEASURED,
        )
        found, self._cursor = client._run_query(page)  # noqa: SLF001  # see its protocol
        self._requests += 1
        self.rows += filter(self._fits, found)
        is_full = len(self.rows) >= limit
        if self._cursor and not is_full and self._requests < _REQUESTS_MAX:
            return False
        self.is_partial = bool(self._cursor) and (self._is_sorted or not is_full)
        if self._is_sorted:
            self._sort()
        else:
            self.next_offset = self._cursor
        return True

    def _fits(self, view: View) -> bool:
        """Return whether a task matches what the broker does not filter by."""
        wanted, reason = self._wanted, view["reason"] or ""
        return (
            (wanted.reason is None or wanted.reason in reason)
            and (self._form is None or form_of(reason) == self._form)
            and wanted.worker in (None, view["worker"])
        )

    def _sort(self) -> None:
        """Keep the page of the sorted tasks. Tasks without a value come last."""
        name, is_reversed = self._wanted.sort, self._wanted.reverse
        key = _key(name)
        known = [view for view in self.rows if key(view) is not None]
        rest = [view for view in self.rows if key(view) is None]
        if name == "submitted":
            known.reverse()
        else:
            known.sort(key=key, reverse=is_reversed is (name == "name"))
        ordered = [*known, *rest]
        end = self._offset + self._count
        self.rows = ordered[self._offset : end]
        self.next_offset = end if end < len(ordered) else 0


def listing_scope(wanted: Filter) -> Scope | None:
    """Return the scope that the broker lists for a filter, or None if no task can match.

    Only leased tasks have a worker. A reason alone means failed tasks.
    """
    only = wanted.only
    if wanted.worker is not None:
        if only and "leased" not in only:
            return None
        only = ("leased",)
    elif wanted.reason is not None or wanted.reason_like is not None:
        only = only or ("failed",)
    return wanted.with_fields(reason=None, reason_like=None, worker=None, only=only).scope


def _key(name: str) -> Callable[[View], Any]:
    if name == "name":
        return requests.full_name
    field = _FIELDS.get(name, name)
    return lambda view: view.get(field)
