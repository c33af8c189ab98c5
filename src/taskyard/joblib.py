"""The joblib backend: `parallel_config("taskyard")` runs the calls of `joblib.Parallel` as tasks.

Importing this module registers the backend. With a campaign, tasks are named by the content of
their calls. A program that was killed and is started again gets the results of the tasks that are
done, and repeats none. joblib has no types, so its classes are `Any` here.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from concurrent.futures import Future as AnyFuture
from typing import TYPE_CHECKING, Any, Final, cast

import joblib
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, register_parallel_backend

from taskyard.calls import pickled
from taskyard.client import discovery, functions
from taskyard.client.executor import CallFuture, Executor, ExecutorCore
from taskyard.client.functions import CallKey
from taskyard.client.internal import InternalClient
from taskyard.errors import TaskyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger("taskyard.joblib")

#: joblib runs calls in the program itself if there is one job. Two in flight keep one slot busy.
_JOBS_MIN: Final = 2


class TaskyardBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # Any
    """Runs batches of calls as tasks of a broker, or of a local cluster that ends with it."""

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(
        self,
        broker: str | None = None,
        *,
        state: str | Path | None = None,
        campaign: str = "",
        service: str = pickled.PICKLE.decode(),
        nesting_level: int | None = None,
    ) -> None:
        """Use the broker at an endpoint or of a state directory. Connects at the first use.

        Without either, a campaign uses the broker that `Client()` finds. Other calls run in
        processes of their own, as many as jobs.
        """
        super().__init__(nesting_level=nesting_level)
        self._broker, self._state = broker, state
        self._campaign = campaign
        self._service = service
        #: The cluster that ends with the backend, if there is one.
        self._executor: Executor | None = None
        self._made: ExecutorCore | None = None
        self._slots_own = 0
        #: Guards the attributes below. Calls are submitted by several threads.
        self._lock = threading.Lock()
        self._pending: set[CallFuture[Any]] = set()
        self._repeats: Counter[str] = Counter()

    # Called by joblib.

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many calls can run at once. -1 is all slots of the workers."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs == 1:
            return 1
        wanted = -1 if n_jobs is None else n_jobs
        if wanted > 0:
            return wanted
        slots = self._slots_total() or joblib.cpu_count()
        return max(slots + 1 + wanted, _JOBS_MIN)

    def configure(self, n_jobs: int = 1, parallel: object = None, **_options: object) -> int:
        """Connect, and return the number of jobs."""
        self.parallel = parallel
        jobs = self.effective_n_jobs(n_jobs)
        if jobs > 1:
            self._core(jobs)
        return jobs

    def start_call(self) -> None:
        with self._lock:
            self._repeats.clear()

    def submit(
        self,
        func: Any,  # noqa: ANN401  # a BatchedCalls of joblib's
        callback: Callable[[AnyFuture[Any]], None] | None = None,
    ) -> AnyFuture[Any]:
        """Submit a batch of calls as one task. The future raises all errors.

        joblib would not notice an error that is raised here: it may call this in a callback.
        """
        future: AnyFuture[Any]
        try:
            future = self._submit(func.items)
        except Exception as error:  # noqa: BLE001  # see above
            future = AnyFuture()
            future.set_exception(error)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def _submit(self, calls: Sequence[Any]) -> CallFuture[Any]:
        first = calls[0][0]
        key = self._key(first, calls) if self._campaign else None
        args = (calls, *self.get_nested_backend())
        future = self._core().submit(run_calls, args, {}, first, key)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def retrieve_result_callback(self, out: AnyFuture[Any]) -> Any:  # noqa: ANN401  # a user's
        return out.result()

    def compute_batch_size(self) -> int:
        """Return the size of the next batch. A campaign has one call in a task.

        A batch that depends on measured times would have another name in the next run.
        """
        return 1 if self._campaign else int(super().compute_batch_size())

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002  # joblib's
        """Cancel all calls, also if they run: a call raised, or the program was interrupted."""
        with self._lock:
            pending, self._pending = self._pending, set()
        if not pending:
            return
        client = self._core().client
        try:
            names = [future.full_name for future in pending]
            client.cancel(names, timeout=client.timeout)
        except TaskyardError as error:
            logger.warning("could not cancel calls (%d): %s", len(pending), error)

    def terminate(self) -> None:
        """End a `Parallel`. The connection stays for the next `Parallel`."""
        self.reset_batch_stats()

    # The connection.

    def _is_shared(self) -> bool:
        """Return whether the broker is not its own."""
        return bool(self._campaign or self._broker or self._state)

    def _core(self, jobs: int = 0) -> ExecutorCore:
        """Connect at the first use. An own cluster has as many slots as there are jobs."""
        if not self._is_shared():
            if self._executor is None or jobs not in (0, self._slots_own):
                self._executor = Executor(slots=jobs or None, service=self._service)
                self._slots_own = jobs
                self._made = self._executor._core  # noqa: SLF001  # for names of tasks
        elif self._made is None:
            client = InternalClient(discovery.endpoint(self._broker, self._state))
            self._made = ExecutorCore(self._service, client=client, campaign=self._campaign)
            weakref.finalize(self, self._made.stop).atexit = False
        assert self._made is not None  # noqa: S101  # made above
        return self._made

    def _slots_total(self) -> int:
        """Return the slots of the broker's workers for these calls. 0: none, or an own cluster."""
        if not self._is_shared():
            return 0
        client = self._core().client
        workers = client.workers(client.timeout)
        slots = sum(int(one["slots"]) for one in workers if self._service in one["services"])
        if not slots:
            logger.warning(
                "no worker runs the calls of service %s (start `taskyard worker --allow-pickle`)",
                self._service,
            )
        return slots

    def _key(self, first: Callable[..., Any], calls: Sequence[Any]) -> CallKey:
        """Return a key by content. Equal calls of one `Parallel` are numbered: each is made."""
        name, token = content_key(calls)
        with self._lock:
            self._repeats[name] += 1
            number = self._repeats[name]
        name = f"{functions.function_name(first)}-{name}"
        return CallKey(f"{name}-{number}" if number > 1 else name, token)

    def _forget(self, future: AnyFuture[Any]) -> None:
        with self._lock:
            self._pending.discard(cast("CallFuture[Any]", future))


def run_calls(calls: Sequence[Any], nested_backend: object, nested_jobs: int | None) -> list[Any]:
    """Make calls one after another. Runs in a worker, where nested calls use threads."""
    with joblib.parallel_config(backend=nested_backend, n_jobs=nested_jobs):
        return [function(*args, **kwargs) for function, args, kwargs in calls]


# Names by content.

#: Arguments of scikit-learn's fits with places in the search, times and random ids.
_PROGRESS_ARGUMENTS: Final = frozenset(
    ("callback_ctx", "caller", "candidate_progress", "split_progress", "verbose")
)


def content_key(calls: Sequence[Any]) -> CallKey:
    """Return a hash of calls that is the same in every process.

    It has the arguments, and of the user's functions and classes the bytecode and what they use.
    Code of installed packages counts by its name. Raises `NotEncodable`.
    """
    return functions.key_of_calls([_without_progress(*call) for call in calls])


def _without_progress(
    function: Any,  # noqa: ANN401  # any callable
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """Return a call without the parts of scikit-learn's searches that do not change a result.

    So a search with more candidates, or in another shell, repeats no fit.
    """
    if type(function).__module__ != "sklearn.utils.parallel":
        return function, args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in _PROGRESS_ARGUMENTS}
    return function.function, function.config, args, rest  # and no filters of warnings


register_parallel_backend("taskyard", TaskyardBackend)
