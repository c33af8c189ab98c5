"""The joblib backend: `parallel_config("taskyard")` runs the calls of `joblib.Parallel` as tasks.

Importing this module registers the backend. With a campaign, tasks are named by the content of
their calls. A program that was killed and is started again gets the results of the tasks that are
done, and repeats none. joblib has no types, so its classes are `Any` here.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from concurrent.futures import Future as AnyFuture
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import joblib
from joblib.parallel import AutoBatchingMixin, ParallelBackendBase, register_parallel_backend

from taskyard.calls import pickled
from taskyard.campaign.batches import encode_text
from taskyard.client import content, discovery
from taskyard.client.calls import CallFuture, ExecutorCore
from taskyard.client.executor import Executor
from taskyard.client.functions import function_name
from taskyard.client.requests import TaskRef
from taskyard.core.model import Refusal, Submission
from taskyard.core.states import TaskState
from taskyard.errors import Refused, TaskFailed, TaskyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from taskyard.client.functions import EncodedCall
    from taskyard.client.internal import InternalClient

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
        self._place: dict[str, Any] = {"broker": broker, "state": state, "service": service}
        self._campaign = campaign
        self._service = service
        self._executor: Executor | None = None
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

        joblib would not notice one that is raised here: it may call this in a callback.
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
        name = self._name(first, calls) if self._campaign else ""
        args = (calls, *self.get_nested_backend())
        future = self._core().submit(run_calls, args, {}, first, name)
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
        """Cancel all calls, running ones too: a call raised, or the program was interrupted."""
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
        """End a `Parallel`. The connection stays for the next one."""
        self.reset_batch_stats()

    # Its own.

    def _is_shared(self) -> bool:
        """Return whether the broker is not its own."""
        return bool(self._campaign or self._place["broker"] or self._place["state"])

    def _core(self, jobs: int = 0) -> ExecutorCore:
        """Connect at the first use. An own cluster has as many slots as there are jobs."""
        if not self._is_shared() and jobs not in (0, self._slots_own):
            self._executor, self._slots_own = Executor(slots=jobs, service=self._service), jobs
        elif self._executor is None and self._campaign:
            self._executor = _CampaignExecutor(self._campaign, **self._place)
        elif self._executor is None:
            self._executor = Executor(**self._place)
        return self._executor._core  # noqa: SLF001  # names of tasks are for this backend alone

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

    def _name(self, first: Callable[..., Any], calls: Sequence[Any]) -> str:
        """Return a name by content. Equal calls of one `Parallel` are numbered: each is made."""
        key = content_key(calls)
        with self._lock:
            self._repeats[key] += 1
            number = self._repeats[key]
        return f"{function_name(first)}-{key}" + (f"-{number}" if number > 1 else "")

    def _forget(self, future: AnyFuture[Any]) -> None:
        with self._lock:
            self._pending.discard(cast("CallFuture[Any]", future))


def run_calls(calls: Sequence[Any], nested_backend: object, nested_jobs: int | None) -> list[Any]:
    """Make calls one after another. Runs in a worker, where nested calls use threads."""
    with joblib.parallel_config(backend=nested_backend, n_jobs=nested_jobs):
        return [function(*args, **kwargs) for function, args, kwargs in calls]


class _CampaignExecutor(Executor):
    """An executor whose tasks stay in a campaign, for a later run of the same program."""

    def __init__(
        self, campaign: str, broker: str | None, state: str | Path | None, service: str
    ) -> None:
        self._campaign = campaign
        super().__init__(discovery.endpoint(broker, state), service=service)

    def _make_core(self, service: str, client: InternalClient) -> ExecutorCore:
        return _CampaignCore(service, client=client, campaign=self._campaign)


class _CampaignCore(ExecutorCore):
    """Uses tasks of earlier runs. One that failed or was cancelled there runs again, once."""

    def __init__(self, service: str, *, client: InternalClient, campaign: str) -> None:
        #: Calls whose tasks an earlier run submitted. Their exceptions have its token.
        self._existing: dict[str, EncodedCall] = {}
        super().__init__(service, client=client, campaign=campaign)

    def _submit_task(self, client: InternalClient, name: str, call: EncodedCall) -> AnyFuture[Any]:
        full_name = f"{self.campaign}/{name}"
        if full_name not in client.existing([full_name]):
            return super()._submit_task(client, name, call)
        self._existing[name] = call
        return client.future(full_name)

    def _watch(self, future: CallFuture[Any]) -> AnyFuture[Any]:
        """Return a future of a call's known task, which also unpickles its exception."""
        known = {future.full_name: TaskRef(future.name, self.campaign, pickled.PICKLE)}
        submitter = self.client._submitter  # noqa: SLF001  # for this backend
        return submitter.watch(known, self.calls.decoder)[future.full_name]

    def _settle_task(self, future: CallFuture[Any], task: AnyFuture[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        call = self._existing.pop(future.name, None)
        # Another program may have submitted it a moment ago.
        is_known = isinstance(error, Refused) and error.code == Refusal.CONFLICT.value
        has_ended_badly = task.cancelled() or isinstance(error, TaskFailed)
        try:
            if call is not None and has_ended_badly:
                self._start_again(future, call)
            elif not is_known:
                super()._settle_task(future, task)
                return
            again = self._watch(future)
        except TaskyardError as refused:
            self._settle(future, partial(future.settle, None, refused))
        else:
            again.add_done_callback(lambda settled: self._arrived.put((future, settled)))

    def _start_again(self, future: CallFuture[Any], call: EncodedCall) -> None:
        """Replace a task that failed or was cancelled."""
        if call.restore is not None:  # the broker keeps bytes that no task names for some time only
            call.restore()
        self.client.cancel([future.full_name], states=(TaskState.FAILED,))
        submission = Submission([encode_text(future.name)], [call.payload], [self._terms])
        self.client.create(submission, restart=True)


# Names by content.

#: Arguments of scikit-learn's fits with places in the search, times and random ids.
_PROGRESS_ARGUMENTS: Final = frozenset(
    ("callback_ctx", "caller", "candidate_progress", "split_progress", "verbose")
)


def content_key(calls: Sequence[Any]) -> str:
    """Return a hash of calls that is the same in every process.

    It has the arguments, and of the user's functions and classes the bytecode and what they use.
    Code of installed packages counts by its name. Raises `NotEncodable`.
    """
    return content.digest_of_calls([_without_progress(*call) for call in calls])


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
