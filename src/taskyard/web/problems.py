"""Problems of a broker in sentences. One rule for `taskyard status` and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskyard.core.limits import LAG_REFUSE_PERCENT, LAG_SLOW_PERCENT

if TYPE_CHECKING:
    from collections.abc import Iterator


def problems_of(stats: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each problem of the broker."""
    if not stats["accepting"]:
        yield "the broker accepts no tasks: the disk is nearly full"
    if lag := _lag_line(stats["compaction_lag"]):
        yield lag
    if stats["refused"]:
        yield _refused_line(stats["refused"], stats["refused_last"])
    if outbox := _outbox_line((stats["health"] or {}).get("outbox") or {}):
        yield outbox


def _lag_line(lag: float) -> str:
    """Return a warning if compaction lags behind, else ""."""
    if lag * 100 < LAG_SLOW_PERCENT:
        return ""
    effect = "refused" if lag * 100 >= LAG_REFUSE_PERCENT else "slowed"
    return f"journal: compaction lags behind ({lag:.0%} of its threshold), submissions are {effect}"


def _refused_line(number: int, last: dict[str, Any]) -> str:
    names = ", ".join(last["names"])
    tasks = "1 task" if number == 1 else f"{number:,} tasks"
    return (
        f"{tasks} of plain dwork peers refused since the broker started, "
        f"latest: {names} ({last['text']})"
    )


def _outbox_line(outbox: dict[str, int]) -> str:
    """Return how many tasks of the outbox are new or refused, else ""."""
    parts = [f"{count:,} {state}" for state, count in outbox.items() if count]
    return f"outbox: {', '.join(parts)} (see `taskyard store init --outbox`)" if parts else ""
