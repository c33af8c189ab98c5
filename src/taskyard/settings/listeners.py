"""The tables of listeners, `[listen.NAME]`: their keys, and the keys that each dialect has.

A table named like a dialect takes the place of that dialect's key in `[listen]`. Any other name
needs a `dialect`. The broker applies the values, and `net` checks the endpoints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from taskyard.core.limits import NUMBER_MAX, SECOND_NS
from taskyard.settings import kinds
from taskyard.settings.keys import DIALECTS, LISTEN, Key, variable_of
from taskyard.settings.kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.settings.sections import ListenSection

DWORK, ROUND_ROBIN, PING_PONG, WMP = DIALECTS

#: Services whose tasks are programs and functions, which only native workers run.
NATIVE_SERVICES: Final = ("exec", "call", "pickle")

#: Workers are pinged three times in it, at most ten times a second.
EXPIRE_NS_MIN: Final = 3 * SECOND_NS // 10

#: A table's name is a part of workers' names, where a colon ends it. `native` is the socket in the
#: state directory.
_NAME: Final = re.compile(r"(?!native$)[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
NAME_TEXT: Final = "a listener's name must have 1 to 40 letters, digits, - and _, and not be native"

_NO_CLIENTS: Final = "WMP has no clients, so no task is submitted here"

#: Why a dialect does not have a key.
_REASONS: Final = {
    (DWORK, "identity"): "only round-robin's peers address the broker by a name",
    (PING_PONG, "identity"): "only round-robin's peers address the broker by a name",
    (WMP, "identity"): "only round-robin's peers address the broker by a name",
    (DWORK, "expire"): "a plain dwork worker sends no heartbeats (use timeout)",
    (WMP, "timeout"): "a WMP worker replies to PING while it works (use expire)",
    (WMP, "lane"): _NO_CLIENTS,
    (WMP, "retries"): _NO_CLIENTS,
}


class _Row(NamedTuple):
    """A row of the table of listener keys."""

    name: str
    kind: Kind
    help: str
    #: The meaning if it is not set, by dialect. The others lack the key.
    unset: dict[str, str]


def _for_all(unset: str) -> dict[str, str]:
    return dict.fromkeys(DIALECTS, unset)


_CLIENTS: Final = (DWORK, ROUND_ROBIN, PING_PONG)

_ROWS: Final = (
    _Row(
        "dialect",
        kinds.choice(*DIALECTS),
        "The dialect, for a table with another name.",
        _for_all("the name"),
    ),
    _Row(
        "endpoint",
        kinds.ENDPOINTS,
        "The endpoints, for ping-pong its backend and its frontend. If not set, only "
        "`--listen NAME=ENDPOINT` opens the listener.",
        _for_all("nowhere"),
    ),
    _Row(
        "identity",
        kinds.IDENTITY,
        "The address by which peers send to the broker: the endpoint that they connect to. "
        "Required with the address 0.0.0.0 or [::].",
        {ROUND_ROBIN: "the endpoint"},
    ),
    _Row(
        "service",
        kinds.NAME,
        "The service of tasks that clients submit here, and of workers that connect here.",
        _for_all("default"),
    ),
    _Row(
        "lane",
        kinds.NAME,
        "The lane of tasks that clients submit here.",
        dict.fromkeys(_CLIENTS, "none"),
    ),
    _Row(
        "expire",
        kinds.DURATION,
        "The silence after which a worker loses its tasks. At least 300ms.",
        {ROUND_ROBIN: "60s", PING_PONG: "3s", WMP: "15s"},
    ),
    _Row(
        "timeout",
        kinds.DURATION,
        "The silence after which a worker that holds a task and does not ping loses it. At least "
        "`expire`.",
        {DWORK: "never", ROUND_ROBIN: "expire", PING_PONG: "60s"},
    ),
    _Row(
        "retries",
        kinds.MULTIPLES,
        "Delays before each retry of tasks that clients submit here, in seconds. A number is that "
        "many retries, one second apart.",
        dict.fromkeys(_CLIENTS, "by the service"),
    ),
)

#: Defaults of `expire`, against which `timeout` is checked.
EXPIRE_NS: Final = {ROUND_ROBIN: 60 * SECOND_NS, PING_PONG: 3 * SECOND_NS, WMP: 15 * SECOND_NS}


def section_of(name: str) -> str:
    return f"{LISTEN}.{name}"


def is_name(name: str) -> bool:
    """Return whether a table may have this name."""
    return _NAME.fullmatch(name) is not None


def dialect_key(name: str) -> Key:
    return _key(_ROWS[0], name, DWORK)


def listener_keys(name: str, dialect: str) -> tuple[Key, ...]:
    """Return the keys of a table with this name and dialect."""
    return tuple(_key(row, name, dialect) for row in _ROWS if dialect in row.unset)


def _key(row: _Row, name: str, dialect: str) -> Key:
    kind, path = row.kind, [name, row.name]
    if row.name == "endpoint":
        kind = kinds.PAIR if dialect == PING_PONG else kind
        # A table takes the place of the dialect's key, so it has its variable.
        path = [name] if name == dialect else path
    variable = variable_of(LISTEN, *path)
    return Key(section_of(name), row.name, kind, None, row.help, variable, row.unset[dialect])


def missing_reason(dialect: str, key: str) -> str | None:
    """Return why a dialect does not have a key. None: no dialect has one of that name."""
    return _REASONS.get((dialect, key))


def problems(name: str, section: ListenSection) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a table's values together: a key, and the reason."""
    path, dialect = section_of(name), section.dialect
    if section.identity is not None and len(section.endpoint or ()) > 1:
        yield (
            "identity",
            f"{path}.identity must belong to one endpoint, not {len(section.endpoint or ())}",
        )
    if dialect == WMP and section.service in NATIVE_SERVICES:
        reason = f"only native workers run tasks of {section.service}"
        yield "service", f"{path}.service must be another one ({reason})"
    for key, value_ns in (("expire", section.expire_ns), ("timeout", section.timeout_ns)):
        if value_ns is not None and value_ns < EXPIRE_NS_MIN:
            yield key, f"{path}.{key} must be at least 300ms"
    expire_ns = section.expire_ns or EXPIRE_NS.get(dialect, 0)
    if section.timeout_ns is not None and section.timeout_ns < expire_ns:
        expire = kinds.DURATION.text(expire_ns)
        yield "timeout", f"{path}.timeout must be at least {path}.expire, {expire}"
    if max(section.retries or (0,)) * SECOND_NS > NUMBER_MAX:
        yield "retries", f"{path}.retries must be less than 292 years"


_HEAD = (
    f"| of a listener | is | {' | '.join(DIALECTS)} | |\n|---|---|{'---|' * len(DIALECTS)}---|\n"
)


def listener_table() -> str:
    """Return the table of listener keys as Markdown, with the defaults of each dialect."""
    return _HEAD + "".join(
        f"| `{row.name}` | {row.kind.description} | "
        f"{' | '.join(row.unset.get(dialect, '-') for dialect in DIALECTS)} | {row.help} |\n"
        for row in _ROWS
    )
