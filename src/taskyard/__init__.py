"""Taskyard: a durable broker for campaigns of tasks.

Owns the version, which `pyproject.toml` reads, and the names that programs import. They are loaded
at first use, because every command imports this package and few of them need a client.
"""

TYPE_CHECKING = False  # as in typing, which is not imported

if TYPE_CHECKING:
    from taskyard.calls.inputs import result
    from taskyard.calls.payloads import BundlePart, bundle_part
    from taskyard.client.client import AsyncClient, Campaign, Client
    from taskyard.client.executor import Executor, ExecutorBroken
    from taskyard.client.futures import Future, as_completed, progress, wait
    from taskyard.client.outbox import AsyncOutbox, Outbox
    from taskyard.client.task import CurrentTask, Task, current, task
    from taskyard.errors import (
        BytesDamaged,
        BytesMissing,
        BytesNotStored,
        BytesTruncated,
        ClientClosed,
        Final,
        NoBroker,
        Refused,
        TaskBlocked,
        TaskFailed,
        TaskyardError,
        TimedOut,
        UnknownName,
        UserError,
    )
    from taskyard.spark import register

__version__ = "0.1.0.dev0"

__all__ = [
    "AsyncClient",
    "AsyncOutbox",
    "BundlePart",
    "BytesDamaged",
    "BytesMissing",
    "BytesNotStored",
    "BytesTruncated",
    "Campaign",
    "Client",
    "ClientClosed",
    "CurrentTask",
    "Executor",
    "ExecutorBroken",
    "Final",
    "Future",
    "NoBroker",
    "Outbox",
    "Refused",
    "Task",
    "TaskBlocked",
    "TaskFailed",
    "TaskyardError",
    "TimedOut",
    "UnknownName",
    "UserError",
    "as_completed",
    "bundle_part",
    "current",
    "progress",
    "register",
    "result",
    "task",
    "wait",
]

_HOMES = {
    "AsyncClient": "taskyard.client.client",
    "AsyncOutbox": "taskyard.client.outbox",
    "BundlePart": "taskyard.calls.payloads",
    "Campaign": "taskyard.client.client",
    "Client": "taskyard.client.client",
    "CurrentTask": "taskyard.client.task",
    "Executor": "taskyard.client.executor",
    "ExecutorBroken": "taskyard.client.executor",
    "Future": "taskyard.client.futures",
    "Outbox": "taskyard.client.outbox",
    "Task": "taskyard.client.task",
    "as_completed": "taskyard.client.futures",
    "bundle_part": "taskyard.calls.payloads",
    "current": "taskyard.client.task",
    "progress": "taskyard.client.futures",
    "register": "taskyard.spark",
    "result": "taskyard.calls.inputs",
    "task": "taskyard.client.task",
    "wait": "taskyard.client.futures",
}

if not TYPE_CHECKING:  # else a checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415  # at first use

        found: object = getattr(import_module(_HOMES.get(name, "taskyard.errors")), name)
        globals()[name] = found
        return found
