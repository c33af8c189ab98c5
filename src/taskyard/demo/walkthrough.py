"""The demo from start to end: a campaign, a killed broker, and a count of the results.

Reports each step to a `DemoReporter` of the caller, so it knows nothing of terminals. All of it
uses one Spark session, because starting one takes longer than using it.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from taskyard import __version__
from taskyard.campaign.formats import FileOptions
from taskyard.client.internal import InternalClient
from taskyard.core.events import UnknownPolicy
from taskyard.demo import campaign
from taskyard.demo.campaign import BrokerKill, Campaign, DemoCounts, ProofLine
from taskyard.demo.cluster import DemoCluster, prepare_directory
from taskyard.errors import TaskyardError, TimedOut, UserError
from taskyard.pipeline.jobs import history, load, report
from taskyard.pipeline.session import (
    default_master,
    session_scope,
    settings_for_history,
    tune_session,
)
from taskyard.pipeline.sources import campaigns
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.submit import make_target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from taskyard.demo.cluster import DemoDirectory
    from taskyard.pipeline.transforms.guarantees import Guarantees

#: The broker is killed when this share of the campaign has settled.
KILLED_AT: Final = 0.4

#: Interval of the status requests.
_POLL_SECONDS: Final = 0.2

#: Time limit of the campaign, even on a busy machine. A thousand tasks take some seconds.
_SETTLED_SECONDS: Final = 240.0
_SETTLED_SECONDS_A_THOUSAND: Final = 60.0

_SETTLED: Final = ("done", "failed", "cancelled")


class DemoReporter(Protocol):
    """The demo's output."""

    def step(self, text: str) -> None:
        """Report the begin or the result of a step."""

    def running(self) -> AbstractContextManager[object]:
        """Return a context in which counts are shown."""

    def count(self, counts: Mapping[str, int], total: int) -> None:
        """Show the number of tasks in each state."""


class DemoResult(Struct, frozen=True):
    """The result of a demo."""

    directory: Path
    state: Path
    report: Path
    tables: Path
    counts: DemoCounts
    lines: list[ProofLine]
    seconds: float


def run(tasks: int, out: Path, reporter: DemoReporter) -> DemoResult:
    """Run the whole demo. Raises TaskyardError if a part of it fails."""
    began = time.monotonic()
    planned = campaign.make_campaign(tasks)
    with prepare_directory(out) as paths:
        campaign.write(planned, paths.campaign)
        reporter.step(
            f"created a campaign of {planned.tasks:,} tasks: a graph of {planned.graph:,}, "
            f"{planned.mails:,} mails in {planned.lanes} lanes, {planned.foreign:,} for workers of "
            "other dialects"
        )
        reporter.step("starting a broker, a relay and four workers: native, agents, ping-pong, wmp")
        with DemoCluster(paths) as cluster:
            reporter.step("starting Spark")
            conf = settings_for_history(default_master(), 0)
            with session_scope("taskyard demo", conf=conf) as spark:
                _load(spark, paths, planned, reporter)
                kill = _run(cluster, paths, planned, reporter)
                cluster.stop()
                guarantees, page = _build_report(spark, paths, reporter)
        reporter.step("counting the journal")
        counts = campaign.count(paths.state)
        lines = campaign.lines(counts, guarantees, planned, kill)
        seconds = time.monotonic() - began
        return DemoResult(paths.directory, paths.state, page, paths.tables, counts, lines, seconds)


def _load(
    spark: SparkSession, paths: DemoDirectory, planned: Campaign, reporter: DemoReporter
) -> None:
    """Validate the campaign in Spark, and submit it."""
    reporter.step("validating the campaign in Spark")
    files = campaigns.plan([str(paths.campaign)], FileOptions(campaign=campaign.NAME))
    checked = load.read(spark, files)
    try:
        checked.revalidate(existing=())
        if checked.rejects:
            raise TaskyardError(
                f"internal error: the demo's campaign is invalid: {checked.rejects[0]}. Please "
                "report it with the output of `-v`."
            )
        validation = checked.validation
        reporter.step(
            f"submitting it from Spark: {validation.tasks:,} tasks, {validation.edges:,} "
            f"dependencies, {len(validation.sizes)} levels"
        )
        with InternalClient(state=paths.state) as client:
            broker = client.broker
        taken = load.submit_all(
            checked, make_target(broker, None, campaign.NAME, UnknownPolicy.REFUSE)
        )
    finally:
        checked.close()
    if taken.new != planned.tasks:
        raise UserError(
            f"the broker accepted {taken.new:,} of {planned.tasks:,} tasks (see {paths.logs})"
        )


# While it runs.


def _run(
    cluster: DemoCluster, paths: DemoDirectory, planned: Campaign, reporter: DemoReporter
) -> BrokerKill:
    """Wait until all tasks have settled, and kill the broker on the way."""
    reporter.step("running the tasks")
    seconds = _SETTLED_SECONDS + _SETTLED_SECONDS_A_THOUSAND * planned.tasks / 1000
    ends = time.monotonic() + seconds
    kill = None
    with InternalClient(state=paths.state, report=reporter.step) as client, reporter.running():
        while True:
            counts = client.counts(campaign.NAME)
            reporter.count(counts, planned.tasks)
            settled = sum(counts[state] for state in _SETTLED)
            if kill is None and settled >= KILLED_AT * planned.tasks:
                kill = _kill(cluster, settled, planned, reporter)
            cluster.check()
            if _is_settled(client):
                break
            if time.monotonic() > ends:
                raise TimedOut(
                    f"{planned.tasks - settled:,} tasks have not settled after {seconds:.0f} s "
                    f"(see the logs in {paths.logs})"
                )
    if kill is None:
        raise TimedOut("all tasks settled before the broker could be killed (use more --tasks)")
    reporter.step("all tasks have settled, stopping the workers and the broker")
    return kill


def _is_settled(client: InternalClient) -> bool:
    try:
        client.wait_campaign(campaign.NAME, _POLL_SECONDS)
    except TimedOut:
        return False
    return True


def _kill(
    cluster: DemoCluster, settled: int, planned: Campaign, reporter: DemoReporter
) -> BrokerKill:
    """Kill the broker as a power cut would, and restart it."""
    reporter.step(
        f"killing the broker by SIGKILL, with {settled:,} of {planned.tasks:,} tasks settled"
    )
    began = time.monotonic()
    status = cluster.kill_broker()
    cluster.restart_broker()
    seconds_down = time.monotonic() - began
    reporter.step(f"restarted the broker in {seconds_down:.1f} s, on the same state and ports")
    return BrokerKill(status, settled, planned.tasks, seconds_down)


# When it is over.


def _build_report(
    spark: SparkSession, paths: DemoDirectory, reporter: DemoReporter
) -> tuple[Guarantees, Path]:
    """Build the tables and the report at the same time: each alone leaves a core idle.

    Returns the report's counts and its path.
    """
    reporter.step("building tables and the report from the journal in Spark")
    history.export(paths.state)
    quick = tune_session(spark, source.size_bytes(paths.state))
    with ThreadPoolExecutor(1, "tables") as executor:
        tables = executor.submit(_make_tables, quick, paths)
        try:
            found = _draw(quick, paths)
            reporter.step("the report is complete, finishing the tables")
            tables.result()
        except BaseException:
            spark.stop()  # otherwise the executor would wait for the other thread
            raise
    return found


def _draw(spark: SparkSession, paths: DemoDirectory) -> tuple[Guarantees, Path]:
    with tempfile.TemporaryDirectory(prefix="taskyard-demo-") as name:
        scratch = Path(name)
        chosen = report.find_campaign([source.find(paths.state, scratch)], campaign.NAME)
        found = report.datasets(spark, chosen, scratch)
        page, summary = report.write(found, paths.report, f"Made by Taskyard {__version__}.")
    return summary.guarantees, page


def _make_tables(spark: SparkSession, paths: DemoDirectory) -> None:
    job = history.HistoryJob(paths.state, paths.tables)
    try:
        job.run(spark)
    finally:
        job.close()
