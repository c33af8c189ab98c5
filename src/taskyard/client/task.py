"""`@taskyard.task`: a function that can also be submitted, and the client that does it by default.

Called plainly, a task is the plain function. Owns the default client of the process, which is made
at the first submission, and `current`, the task around running code. A worker passes the broker,
the key file and the names on by the environment, so that works in functions and in programs.
"""

from __future__ import annotations

import atexit
import difflib
import logging
import os
import sys
import threading
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeVar, cast, overload

from msgspec import Struct

from taskyard.calls import current_task
from taskyard.client.client import Client
from taskyard.client.functions import CALL_OPTIONS, CONTENT
from taskyard.core.identity import spelling
from taskyard.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from taskyard.client.executor import Executor
    from taskyard.client.futures import Future

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: The options of a task: those of `Client.submit`, and the client.
_OPTIONS: Final = CALL_OPTIONS | {"campaign", "client", "key", "version", "wait_for_unknown"}

_KNOWN: Final = ", ".join(sorted(_OPTIONS))

#: How long the interpreter's exit waits until the broker has all tasks.
_EXIT_SECONDS: Final = 5.0


class Task(Generic[_P, _R]):
    """A function with the options of its tasks. Made by `taskyard.task`.

    `f(...)` calls it here. `f.submit(...)` and `f.map(...)` submit calls to the broker.
    """

    __wrapped__: Callable[_P, _R]
    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[_P, _R], options: dict[str, Any] | None = None) -> None:
        """Wrap a function. Raises `UserError` for unknown options."""
        self._options = _checked({} if options is None else options)
        kind = type(function)  # of a partial, which has no name
        self.__name__, self.__qualname__ = kind.__name__, kind.__qualname__
        self.__module__ = kind.__module__
        update_wrapper(self, function)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self.__wrapped__(*args, **kwargs)

    def submit(self, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Submit a call. Return its future."""
        client, options = self._prepared()
        return client.submit(cast("Callable[..., _R]", self), *args, kwargs=kwargs, **options)

    def map(self, *iterables: Iterable[Any], **kwargs: Any) -> list[Future[_R]]:  # noqa: ANN401  # the function's
        """Submit a call per item, or per row of several iterables. Return the futures.

        Named arguments are those of every call.
        """
        client, options = self._prepared()
        return client.map(cast("Callable[..., _R]", self), *iterables, kwargs=kwargs, **options)

    def options(self, **options: Any) -> Task[_P, _R]:  # noqa: ANN401  # checked by their names
        """Return the same function with other options, as in `f.options(retries=5).submit(1)`."""
        return Task(self.__wrapped__, {**self._options, **options})

    def _prepared(self) -> tuple[Client, dict[str, Any]]:
        options = {**self._options}
        client = options.pop("client", None)
        return default_client() if client is None else client, options

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by the path of the function, or else the function without its client."""
        found: object = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is self and self.__module__ != "__main__":
            return self.__qualname__
        return Task, (self.__wrapped__, {**self._options, "client": None})

    def __get__(self, instance: object, _owner: type | None = None) -> Any:  # noqa: ANN401  # a method
        """Bind to an object, so that a task in a class works as a method."""
        if instance is None:
            return self
        bound: Any = self.__wrapped__
        return Task(bound.__get__(instance), self._options)

    def __repr__(self) -> str:
        return f"<Task {self.__qualname__}>"


@overload
def task(function: Callable[_P, _R], /) -> Task[_P, _R]: ...


@overload
def task(**options: Any) -> Callable[[Callable[_P, _R]], Task[_P, _R]]: ...  # noqa: ANN401  # checked by their names


def task(
    function: Callable[..., Any] | None = None,
    /,
    **options: Any,
) -> Any:
    """Let a function be submitted: `f.submit(...)` and `f.map(...)`. `f(...)` stays a plain call.

    Use it as `@taskyard.task`, or with options as `@taskyard.task(retries=3, time_limit="1m")`.
    Options are those of `Client.submit`: campaign, after, service, lane, priority, due, expiry,
    retries, backoff, time_limit, slots, cpus, memory, gpus, resources. `client` is the client to
    use. Without it, it is one that finds the broker as `Client()` does.

    With `key="content"`, a call is named by its function's code and its arguments. If the broker
    has a task of that name, its result is used. If that failed, it is retried. `version` stands for
    the code: give it a new value when results are no longer valid.
    """
    if function is not None:
        given: object = function  # programs without a type checker pass anything
        if not callable(given):
            raise UserError(f"task {given!r}: must be a function (options are given by name)")
        return Task(function, options)
    _checked(options)
    return lambda function: Task(function, options)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options. Raises `UserError` for unknown names."""
    for name in options:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {_KNOWN}"
            raise UserError(f"unknown option {name!r} of a task ({hint})")
    if options.get("key") not in (None, CONTENT):
        raise UserError(f"key {options['key']!r}: expected {CONTENT!r}")
    if options.get("version") is not None and options.get("key") is None:
        raise UserError(f"version: only with key={CONTENT!r}")
    return options


# The default client.


class ProcessClients:
    """The clients that this process shares, by endpoint. A forked process makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By process, too: the thread of a client does not survive a fork.
        self._made: dict[tuple[int, str | None], Client] = {}
        os.register_at_fork(after_in_child=self._on_fork)

    def _on_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it

    def get(self, broker: str | None = None, **options: Any) -> Client:  # noqa: ANN401  # those of a client
        """Return the client of a broker, by default the one that `Client()` finds."""
        key = os.getpid(), broker
        with self._lock:
            if key not in self._made:
                self._made[key] = Client(broker, **options)
            return self._made[key]

    def close(self, timeout: float) -> None:
        """Close the clients of this process."""
        for (process, _), client in self._made.items():
            if process == os.getpid():
                client.close(timeout)


_clients = ProcessClients()


def default_client() -> Client:
    """Return the client of tasks without one of their own. Makes it at the first call."""
    return _clients.get()


atexit.register(lambda: _clients.close(_EXIT_SECONDS))


logger = logging.getLogger("taskyard.client")

#: Timeout for the first answer of the broker, on a busy machine or while it is restarted.
CONNECT_SECONDS: Final = 60.0


class CurrentTask(Struct, frozen=True):
    """The task that runs this code."""

    #: The name in its campaign.
    name: str
    #: The campaign. Empty: none.
    campaign: str
    #: The number of this attempt, from 1.
    attempt: int
    #: The endpoint of its broker. Empty: the worker has a dialect without clients.
    broker: str

    @property
    def full_name(self) -> str:
        """The name that every call of a client accepts: CAMPAIGN/NAME, or NAME."""
        return spelling(self.campaign, self.name)

    @property
    def client(self) -> Client:
        """A client of the task's broker. All tasks of this process share it, so don't close it.

        It uses the key of the worker, which has to be a producer's too: only then may it submit
        tasks. Raises `UserError` if the worker has passed no broker on.
        """
        endpoint = self._endpoint()
        return _clients.get(endpoint, connect_timeout=CONNECT_SECONDS, report=logger.info)

    def executor(self) -> Executor:
        """Return an executor that calls functions as tasks of the same broker.

        A worker of that broker has to allow pickled calls.
        """
        from taskyard.client.executor import Executor  # noqa: PLC0415  # imports multiprocessing

        return Executor(self._endpoint())

    def slot_given_back(self) -> AbstractContextManager[None]:
        """Give the slot back to the worker in a `with` block that waits for other tasks.

        `Future.result`, `wait` and `as_completed` do so by themselves. This is for other ways of
        waiting, such as `asyncio.run`. The end of the block waits for a free slot. Does nothing in
        a program, and in a thread other than that of the call.
        """
        return current_task.slot_given_back()

    def _endpoint(self) -> str:
        if not self.broker:
            raise UserError(
                f"task {self.full_name}: its worker has passed no broker on (use Client(…) with an "
                "endpoint)"
            )
        return self.broker

    def __repr__(self) -> str:
        return f"<CurrentTask {self.full_name!r}, attempt {self.attempt}>"


_clients = ProcessClients()


def current() -> CurrentTask:
    """Return the task that runs this code, in a function or in a program.

    Raises `UserError` outside a task.
    """
    env = os.environ
    name = env.get(current_task.TASK_VARIABLE)
    if name is None:
        raise UserError("current task: there is none (no worker runs this process)")
    return CurrentTask(
        name,
        env.get(current_task.CAMPAIGN_VARIABLE, ""),
        int(env.get(current_task.ATTEMPT_VARIABLE, "1")),
        env.get(current_task.BROKER_VARIABLE, ""),
    )
