"""The demo from beginning to end: a campaign, a broker that is killed, and a count of what is left.

Tells each step as it begins, and what came of it. Knows nothing of terminals: who calls gives a
`DemoReporter`. One Spark session serves all of its Spark: starting it takes longer than using it.
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
from taskyard.client.client import Client
from taskyard.core.events import UnknownPolicy
from taskyard.demo import audit, campaign
from taskyard.demo import directory as demo_directory
from taskyard.demo.audit import BrokerKill, DemoCounts, ProofLine
from taskyard.demo.campaign import Campaign
from taskyard.demo.yard import DemoCluster
from taskyard.errors import TimedOut, UserError
from taskyard.pipeline.jobs import history, load, report
from taskyard.pipeline.session import session_scope, tune_session
from taskyard.pipeline.sources import history as source
from taskyard.pipeline.submit import make_target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from taskyard.demo.directory import DemoDirectory
    from taskyard.pipeline.transforms.guarantees import Guarantees

#: The broker is killed when so much of the campaign is settled.
KILLED_AT: Final = 0.4

#: How often the counts are looked at.
_POLL_SECONDS: Final = 0.2

#: A campaign that is not settled by then never will be, however busy the machine; a thousand tasks
#: take some seconds.
_SETTLED_SECONDS: Final = 240.0
_SETTLED_SECONDS_A_THOUSAND: Final = 60.0

_SETTLED: Final = ("done", "failed", "cancelled")


class DemoReporter(Protocol):
    """How the demo talks to its user."""

    def step(self, text: str) -> None:
        """A step begins, or has come to something."""

    def running(self) -> AbstractContextManager[object]:
        """While it lasts, counts are told."""

    def count(self, counts: Mapping[str, int], total: int) -> None:
        """So many tasks are in each state."""


class DemoResult(Struct, frozen=True):
    """What came of it."""

    directory: Path
    state: Path
    report: Path
    tables: Path
    counts: DemoCounts
    lines: list[ProofLine]
    seconds: float


def run(tasks: int, out: Path, reporter: DemoReporter) -> DemoResult:
    """All of it. Raises an error of the tree if a part of it can't be done at all."""
    began = time.monotonic()
    planned = campaign.make_campaign(tasks)
    with demo_directory.prepare_directory(out) as paths:
        campaign.write(planned, paths.campaign)
        reporter.step(
            f"a campaign of {planned.tasks:,} tasks: a graph of {planned.graph:,}, "
            f"{planned.mails:,} mails in {planned.lanes} lanes, {planned.foreign:,} for workers of "
            "other dialects"
        )
        reporter.step("starting a broker, a relay and four workers: native, agents, ping-pong, wmp")
        with DemoCluster(paths) as cluster:
            reporter.step("starting Spark")
            with session_scope("taskyard demo") as spark:
                _load(spark, paths, planned, reporter)
                kill = _run(cluster, paths, planned, reporter)
                cluster.stop()
                guarantees, page = _build_report(spark, paths, reporter)
        reporter.step("counting the journal")
        counts = audit.count(paths.state)
        lines = audit.lines(counts, guarantees, planned, kill)
        seconds = time.monotonic() - began
        return DemoResult(paths.directory, paths.state, page, paths.tables, counts, lines, seconds)


def _load(
    spark: SparkSession, paths: DemoDirectory, planned: Campaign, reporter: DemoReporter
) -> None:
    """Have Spark check the file, and submit it."""
    reporter.step("Spark checks the campaign")
    checked = load.read(spark, [str(paths.campaign)], FileOptions(campaign=campaign.NAME))
    try:
        checked.revalidate(existing=())
        if checked.rejects:
            raise UserError(
                f"Spark rejects a task of the demo's own campaign: {checked.rejects[0]}; give -v "
                "and tell Taskyard's makers what it shows"
            )
        validation = checked.validation
        reporter.step(
            f"it is sound: {validation.tasks:,} tasks, {validation.edges:,} dependencies, "
            f"{len(validation.sizes)} levels deep; Spark submits it"
        )
        with Client(state=paths.state) as client:
            broker = client.broker
        taken = load.submit_all(
            checked, make_target(broker, None, campaign.NAME, UnknownPolicy.REFUSE)
        )
    finally:
        checked.close()
    if taken.new != planned.tasks:
        raise UserError(
            f"the broker took {taken.new:,} tasks of {planned.tasks:,}; see {paths.logs}"
        )


# While it runs.


def _run(
    cluster: DemoCluster, paths: DemoDirectory, planned: Campaign, reporter: DemoReporter
) -> BrokerKill:
    """Wait until all is settled; kill the broker on the way."""
    reporter.step("the workers are at it")
    seconds = _SETTLED_SECONDS + _SETTLED_SECONDS_A_THOUSAND * planned.tasks / 1000
    ends = time.monotonic() + seconds
    kill = None
    with Client(state=paths.state, report=reporter.step) as client, reporter.running():
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
                    f"{planned.tasks - settled:,} tasks are not settled after {seconds:.0f} s; "
                    f"the logs in {paths.logs} may say why"
                )
    if kill is None:
        raise TimedOut("all was settled before the broker could be killed; give more --tasks")
    reporter.step("all is settled; the workers and the broker go home")
    return kill


def _is_settled(client: Client) -> bool:
    try:
        client.wait_campaign(campaign.NAME, _POLL_SECONDS)
    except TimedOut:
        return False
    return True


def _kill(
    cluster: DemoCluster, settled: int, planned: Campaign, reporter: DemoReporter
) -> BrokerKill:
    """The broker ends as in a power cut, and comes back."""
    reporter.step(f"SIGKILL to the broker, with {settled:,} of {planned.tasks:,} tasks settled")
    began = time.monotonic()
    status = cluster.kill_broker()
    cluster.restart_broker()
    away = time.monotonic() - began
    reporter.step(f"the broker is back after {away:.1f} s, on the same state and ports")
    return BrokerKill(status, settled, planned.tasks, away)


# When it is over.


def _build_report(
    spark: SparkSession, paths: DemoDirectory, reporter: DemoReporter
) -> tuple[Guarantees, Path]:
    """The history as tables, and the report, at once: each alone leaves a core idle. What the
    report counts, and where it is."""
    reporter.step("Spark turns the journal into tables, and draws the report")
    history.export(paths.state)
    quick = tune_session(spark, source.size_bytes(paths.state))
    with ThreadPoolExecutor(1, "tables") as helper:
        tables = helper.submit(_make_tables, quick, paths)
        try:
            found = _draw(quick, paths)
            reporter.step("the report is there; the tables follow")
            tables.result()
        except BaseException:
            spark.stop()  # or the other would be waited for
            raise
    return found


def _draw(spark: SparkSession, paths: DemoDirectory) -> tuple[Guarantees, Path]:
    with tempfile.TemporaryDirectory(prefix="taskyard-demo-") as scratch:
        frames = source.read(spark, paths.state, Path(scratch))
        found = report.datasets(frames.events, frames.edges, campaign.NAME)
        try:
            page, facts = report.write(found, paths.report, f"Made by Taskyard {__version__}.")
        finally:
            found.release()
    return facts.guarantees, page


def _make_tables(spark: SparkSession, paths: DemoDirectory) -> None:
    job = history.HistoryJob(paths.state, paths.tables)
    try:
        job.run(spark)
    finally:
        job.close()
