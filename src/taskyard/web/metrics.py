"""Metrics for Prometheus, made of one status of the broker and its workers.

Owns the names, labels and meanings of all metrics. `docs/metrics.md` lists them, and a test
compares. Nothing is kept between two requests, so the series of a worker end when it leaves, and a
broker that is away has no values but `taskyard_broker_up`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from taskyard import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

#: The text format that every Prometheus reads.
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

#: Services and workers with series of their own. All others are summed up.
SERVICES_MAX: Final = 200
WORKERS_MAX: Final = 1000
OTHER: Final = "(other)"

#: States of tasks that an autoscaler counts. A delayed task counts when it is due, because it is
#: ready then.
_BACKLOG_STATES: Final = ("ready", "leased")


class Definition(Struct, frozen=True):
    """A metric as users see it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def _define(kind: str, name: str, text: str, *labels: str) -> Definition:
    return Definition(f"taskyard_{name}", kind, labels, text)


_GAUGE: Final = "gauge"
_COUNTER: Final = "counter"
_HISTOGRAM: Final = "histogram"

#: All metrics, by the part of the name after `taskyard_`.
DEFINITIONS: Final = {
    one.name.removeprefix("taskyard_"): one
    for one in (
        _define(_GAUGE, "build_info", "Always 1. The version of the page.", "version"),
        _define(_GAUGE, "broker_up", "Whether the broker answers: 1 or 0."),
        _define(_GAUGE, "page_rows_behind", "Journal rows that the page has not read yet."),
        _define(_GAUGE, "broker_start_time_seconds", "When the broker started, since the epoch."),
        _define(_GAUGE, "tasks", "Tasks by state.", "service", "state"),
        _define(
            _GAUGE,
            "backlog_tasks",
            "Tasks that workers could run or are running: ready and leased. "
            "A delayed task counts when it is due.",
            "service",
        ),
        _define(
            _GAUGE,
            "oldest_ready_seconds",
            "How long the oldest ready task has been ready. 0 if none is.",
            "service",
        ),
        _define(_GAUGE, "workers", "Workers.", "dialect"),
        _define(_GAUGE, "slots", "Slots of all workers that have a limit."),
        _define(_GAUGE, "slots_busy", "Slots in use, of all workers."),
        _define(_GAUGE, "resource", "Named resources of all workers.", "resource"),
        _define(_GAUGE, "resource_busy", "Named resources in use.", "resource"),
        _define(_GAUGE, "worker_slots", "Slots of a worker. 0: no limit.", "worker"),
        _define(_GAUGE, "worker_slots_busy", "Slots in use of a worker.", "worker"),
        _define(
            _GAUGE,
            "worker_last_message_seconds",
            "Time since the last message of a worker. Of `(other)` the longest.",
            "worker",
        ),
        _define(
            _HISTOGRAM,
            "run_seconds",
            "How long attempts ran, as their workers measured it, or else from lease to report.",
            "service",
        ),
        _define(
            _HISTOGRAM,
            "wait_seconds",
            "How long tasks were ready until they were leased.",
            "service",
        ),
        _define(_HISTOGRAM, "turn_seconds", "Turns of the broker, from messages to replies."),
        _define(_HISTOGRAM, "sync_seconds", "Commits of the journal."),
        _define(_COUNTER, "submitted_tasks_total", "Tasks that were accepted."),
        _define(_COUNTER, "attempts_total", "Attempts by how they ended.", "service", "outcome"),
        _define(_COUNTER, "retries_total", "Failed attempts after which a task is tried again."),
        _define(_COUNTER, "lease_expiries_total", "Attempts that ended with their lost worker."),
        _define(_COUNTER, "stale_results_total", "Reports of attempts that were over."),
        _define(
            _COUNTER,
            "malformed_inputs_total",
            "Malformed messages that were refused.",
            "dialect",
        ),
        _define(_GAUGE, "journal_bytes", "The journal on the disk."),
        _define(_GAUGE, "history_bytes", "The history files on the disk."),
        _define(_GAUGE, "blob_bytes", "Long output, large arguments and results on the disk."),
        _define(_GAUGE, "disk_free_bytes", "Free space of the disk of the state directory."),
        _define(_GAUGE, "outbox_tasks", "Tasks in the outbox in PostgreSQL.", "state"),
        _define(_GAUGE, "leader_epoch", "The term of a broker whose journal is in PostgreSQL."),
        _define(_GAUGE, "standby_rows_behind", "Rows that a standby had not applied.", "standby"),
        _define(
            _GAUGE,
            "standby_seconds_behind",
            "How old the state of a standby is at most.",
            "standby",
        ),
    )
}

#: Metrics that do not need a broker.
PAGE_METRICS: Final = ("build_info", "broker_up", "page_rows_behind")

_FAMILIES: Final[dict[str, Callable[..., Metric]]] = {
    _GAUGE: GaugeMetricFamily,
    _COUNTER: CounterMetricFamily,
    _HISTOGRAM: HistogramMetricFamily,
}


def exposition(
    status: Mapping[str, Any] | None,
    workers: Iterable[Mapping[str, Any]],
    rows_behind: int,
    now: float | None = None,
) -> bytes:
    """Return all metrics as text. `status` is None if the broker does not answer."""
    families = _Families()
    families.add("build_info", 1, __version__)
    families.add("broker_up", int(status is not None))
    families.add("page_rows_behind", rows_behind)
    if status is not None:
        _add_services(families, status, time.time() if now is None else now)
        _add_workers(families, workers)
        if status["health"] is not None:
            _add_health(families, status["health"], _named(status))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return generate_latest(registry)


class _Families(Collector):
    """The metric families of one exposition, in the order of their definitions."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        return (self._made[name] for name in DEFINITIONS if name in self._made)

    def add(self, name: str, value: float, *labels: str) -> None:
        self._family(name).add_metric(labels, value)

    def add_histogram(
        self, name: str, bounds: list[float], histogram: Mapping[str, Any], *labels: str
    ) -> None:
        """Add a histogram, with cumulative buckets."""
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*bounds, None), histogram["counts"], strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else repr(bound), total))
        self._family(name).add_metric(labels, buckets, histogram["sum"])

    def _family(self, name: str) -> Any:  # noqa: ANN401  # each has its own add_metric
        if name not in self._made:
            one = DEFINITIONS[name]
            self._made[name] = _FAMILIES[one.kind](one.name, one.text, labels=one.labels)
        return self._made[name]


def _add_services(families: _Families, status: Mapping[str, Any], now: float) -> None:
    tasks: dict[tuple[str, str], int] = {}
    oldest: dict[str, float] = {}
    named = _named(status)
    for one in status["services"]:
        service = one["name"] if one["name"] in named else OTHER
        for state, count in one["counts"].items():
            tasks[service, state] = tasks.get((service, state), 0) + count
        since = one["oldest_ready"]
        age = 0.0 if since is None else max(now - since, 0.0)
        oldest[service] = max(oldest.get(service, 0.0), age)
    for (service, state), count in tasks.items():
        families.add("tasks", count, service, state)
    for service, age in oldest.items():
        backlog = sum(tasks[service, state] for state in _BACKLOG_STATES)
        families.add("backlog_tasks", backlog, service)
        families.add("oldest_ready_seconds", age, service)


def _named(status: Mapping[str, Any]) -> dict[str, None]:
    """Return the services with series of their own: first those that the broker counts by name."""
    counted = (status["health"] or {}).get("services", ())
    names = dict.fromkeys(one["name"] for one in (*counted, *status["services"]))
    names.pop(OTHER, None)
    return dict.fromkeys([*names][:SERVICES_MAX])


def _add_workers(families: _Families, workers: Iterable[Mapping[str, Any]]) -> None:
    dialects: dict[str, int] = {}
    totals, frees = dict[str, float](), dict[str, float]()
    #: By worker: slots, slots in use, and seconds since its last message.
    rows: dict[str, tuple[int, int, float]] = {}
    for index, one in enumerate(workers):
        dialects[one["dialect"]] = dialects.get(one["dialect"], 0) + 1
        for name, amount in one["resources"].items():
            totals[name] = totals.get(name, 0) + amount
            frees[name] = frees.get(name, 0) + one["resources_free"].get(name, 0)
        name = one["name"] if index < WORKERS_MAX else OTHER
        slots, busy, age = rows.get(name, (0, 0, 0.0))
        age = max(age, one["last_seen_ago"])
        rows[name] = (slots + one["slots"], busy + one["slots_used"], age)
    for dialect, count in dialects.items():
        families.add("workers", count, dialect)
    families.add("slots", sum(slots for slots, _, _ in rows.values()))
    families.add("slots_busy", sum(busy for _, busy, _ in rows.values()))
    for name, total in totals.items():
        families.add("resource", total, name)
        families.add("resource_busy", max(total - frees[name], 0), name)
    for name, (slots, busy, age) in rows.items():
        families.add("worker_slots", slots, name)
        families.add("worker_slots_busy", busy, name)
        families.add("worker_last_message_seconds", age, name)


def _summed(services: Iterable[Mapping[str, Any]], named: Container[str]) -> Iterator[Any]:
    """Yield the counters of services, and those of all others together at the end."""
    other: dict[str, Any] | None = None
    for one in services:
        if one["name"] in named:
            yield one
        elif other is None:
            other = {**one, "name": OTHER}
        else:
            for key, count in one["attempts"].items():
                other["attempts"] = other["attempts"] | {key: other["attempts"][key] + count}
            for key in ("run", "wait"):
                counts = zip(other[key]["counts"], one[key]["counts"], strict=True)
                total = other[key]["sum"] + one[key]["sum"]
                other[key] = {"counts": [*map(sum, counts)], "sum": total}
    if other is not None:
        yield other


def _add_health(families: _Families, health: Mapping[str, Any], named: Container[str]) -> None:
    families.add("broker_start_time_seconds", health["started"])
    for one in _summed(health["services"], named):
        for outcome, count in one["attempts"].items():
            families.add("attempts_total", count, one["name"], outcome)
        families.add_histogram("run_seconds", health["task_bounds"], one["run"], one["name"])
        families.add_histogram("wait_seconds", health["task_bounds"], one["wait"], one["name"])
    families.add_histogram("turn_seconds", health["turn_bounds"], health["turns"])
    families.add_histogram("sync_seconds", health["turn_bounds"], health["syncs"])
    families.add("submitted_tasks_total", health["submitted"])
    for name in ("retries", "lease_expiries", "stale_results"):
        families.add(f"{name}_total", health[name])
    for dialect, count in health["malformed"].items():
        families.add("malformed_inputs_total", count, dialect)
    for name in ("journal_bytes", "history_bytes", "blob_bytes", "disk_free_bytes"):
        if health[name] is not None:
            families.add(name, health[name])
    for state, count in (health["outbox"] or {}).items():
        families.add("outbox_tasks", count, state)
    if health["leader"] is not None:
        _add_leader(families, health["leader"])


def _add_leader(families: _Families, leader: Mapping[str, Any]) -> None:
    """Add the term of a broker, and its standbys. Of several on one host, the latest one counts."""
    families.add("leader_epoch", leader["epoch"])
    standbys = sorted(leader["standbys"], key=lambda one: -one["seconds_behind"])
    for host, one in {one["host"]: one for one in standbys}.items():
        families.add("standby_rows_behind", one["rows_behind"], host)
        families.add("standby_seconds_behind", one["seconds_behind"], host)
