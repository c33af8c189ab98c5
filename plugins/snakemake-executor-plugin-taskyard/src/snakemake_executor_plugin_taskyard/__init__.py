"""Runs the jobs of a Snakemake workflow as tasks of a Taskyard broker.

A job is a task with the command that Snakemake makes for it. Its name has the rule and a hash of
the job's targets. So a Snakemake that was killed and is started again finds tasks that still run.
Snakemake finds this module by its name, and `Executor`, `ExecutorSettings` and `common_settings` in
it. It reads annotations of the settings at run time.
"""

import hashlib
import json
import os
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from taskyard import Client, Future, Refused, TaskyardError

#: A check reads no more than the states of futures in this process.
CHECK_SECONDS: Final = 0.2

#: How long the end of a workflow waits for the broker.
_REPLY_SECONDS: Final = 5.0

#: Outputs of failed jobs are written here, in the working directory.
LOG_DIRECTORY: Final = Path(".snakemake", "taskyard_logs")

#: States of tasks that have ended.
ENDED: Final = ("done", "failed", "cancelled")


@dataclass
class ExecutorSettings(ExecutorSettingsBase):  # type: ignore[misc]  # Any, as below
    """Options of Snakemake's command line, with the prefix `--taskyard-`."""

    broker: Optional[str] = field(  # noqa: UP045  # Snakemake knows this form
        default=None, metadata={"help": "Endpoint of the broker. Default: as the command taskyard."}
    )
    state: Optional[str] = field(  # noqa: UP045  # Snakemake knows this form
        default=None, metadata={"help": "State directory of the broker, instead of its endpoint."}
    )
    campaign: Optional[str] = field(  # noqa: UP045  # Snakemake knows this form
        default=None,
        metadata={"help": "Campaign of the jobs. Default: named after the working directory."},
    )


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=True,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=0,
)


class Executor(RemoteExecutor):  # type: ignore[misc]  # Any where Snakemake is not installed
    """Submits jobs to a broker, and reports how they end."""

    def __post_init__(self) -> None:
        settings = self.workflow.executor_settings
        #: By full name. Snakemake's own list of jobs is empty while it checks them.
        self._futures: dict[str, Future] = {}
        self.next_seconds_between_status_checks = CHECK_SECONDS
        self._directory = str(self.workflow.workdir_init)
        self._campaign = settings.campaign or default_campaign(self._directory)
        try:
            self._client = Client(settings.broker, state=settings.state)
        except TaskyardError as error:
            raise WorkflowError(f"taskyard: {error}") from error
        self._log(f"jobs are tasks of campaign {self._campaign} at {self._client.broker}")

    def run_job(self, job: JobExecutorInterface) -> None:
        """Submit a job. One that runs since an earlier start of Snakemake is followed."""
        try:
            earlier = self._earlier_tasks(job)
            future = self._adopt(job, earlier) or self._submit(job, len(earlier) + 1)
        except TaskyardError as error:
            self.report_job_error(SubmittedJobInfo(job), msg=f"taskyard: {error}. ")
            return
        name = future.full_name
        self._futures[name] = future
        self.report_job_submission(SubmittedJobInfo(job, name))

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Report the jobs that have ended, and yield the others."""
        for job_info in active_jobs:
            future = self._futures[str(job_info.external_jobid)]
            if not future.done():
                yield job_info
                continue
            del self._futures[future.full_name]
            try:
                future.result()
            except (CancelledError, TaskyardError) as error:
                self._report_failure(job_info, error)
            else:
                self.report_job_success(job_info)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:  # noqa: ARG002  # see above
        """Cancel all jobs, running ones too."""
        names = [*self._futures]
        try:
            cancelled = self._client.cancel(names, timeout=_REPLY_SECONDS) if names else 0
            self._log(f"cancelled tasks: {cancelled}")
        except TaskyardError as error:
            self._log(f"could not cancel tasks ({len(names)}): {error}")

    def shutdown(self) -> None:
        super().shutdown()
        self._client.close(_REPLY_SECONDS)

    def _log(self, text: str) -> None:
        self.logger.info(f"taskyard: {text}")  # noqa: G004  # Snakemake's logger formats nothing

    def _earlier_tasks(self, job: JobExecutorInterface) -> dict[str, str]:
        """Return the states of this job's tasks by their full names, the latest last."""
        prefix = job_name(job) + "-"
        views = self._client.campaign(self._campaign).tasks(match=prefix)
        return {
            f"{self._campaign}/{view['name']}": view["state"]
            for view in views
            if view["name"].startswith(prefix)
        }

    def _adopt(self, job: JobExecutorInterface, earlier: dict[str, str]) -> Future | None:
        """Return the future of an earlier task that runs, or that ended unseen."""
        # A mark of Snakemake: it was killed before it saw the end of this task.
        marked = self.dag.incomplete_external_jobid(job)
        for name, state in earlier.items():
            if state not in ENDED or (state == "done" and name == marked):
                self._log(f"job {job.jobid} is task {name} of an earlier start")
                return self._client.future(name)
        return None

    def _submit(self, job: JobExecutorInterface, number: int) -> Future:
        argv = ["/bin/sh", "-c", self.format_job_exec(job)]
        options = {"cwd": self._directory, **resource_options(job.threads, job.resources)}
        name = f"{job_name(job)}-{number}"
        return self._client.submit(argv, name=name, campaign=self._campaign, **options)

    def _report_failure(self, job_info: SubmittedJobInfo, error: BaseException) -> None:
        """Report why a job has failed, with its output in a file."""
        name = str(job_info.external_jobid)
        reason = "cancelled" if isinstance(error, CancelledError) else str(error)
        logs = []
        if not isinstance(error, CancelledError | Refused):
            path = Path(self._directory) / LOG_DIRECTORY / f"{name.rpartition('/')[2]}.log"
            try:
                output = self._client.output(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(output)
                logs.append(str(path))
            except (OSError, TaskyardError) as problem:
                reason += f" (no log: {problem})"
        self.report_job_error(job_info, msg=f"Task {name}: {reason}. ", aux_logs=logs)


def default_campaign(directory: str) -> str:
    """Return a campaign for the workflows of a directory."""
    path = os.path.realpath(directory)
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    return f"snakemake-{os.path.basename(path) or 'root'}-{digest[:8]}"  # noqa: PTH119  # as above


def job_name(job: JobExecutorInterface) -> str:
    """Return a name that is the same for each start of a job: its rule and targets."""
    specs: Any = job.get_target_spec()
    targets = sorted(json.dumps([str(one.rulename), one.wildcards_dict]) for one in specs)
    return f"{job.name}-{hashlib.sha256(repr(targets).encode()).hexdigest()[:12]}"


def resource_options(threads: int, resources: Any) -> dict[str, Any]:  # noqa: ANN401  # Snakemake's
    """Return the options of a task for the threads and resources of a job.

    Snakemake gives `mem_mb` in megabytes and `runtime` in minutes.
    """
    options: dict[str, Any] = {"cpus": threads}
    if isinstance(megabytes := resources.get("mem_mb"), int):
        options["memory"] = megabytes * 1_000_000
    if isinstance(minutes := resources.get("runtime"), int):
        options["time_limit"] = minutes * 60
    if isinstance(gpus := resources.get("gpu"), int):
        options["gpus"] = gpus
    return options
