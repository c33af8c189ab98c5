"""The demo from beginning to end: a campaign, a broker that is killed, and a count of what is left.

Tells each step as it begins, and what came of it. Knows nothing of terminals: who calls gives a
`Teller`. One Spark session serves all of its Spark: starting it takes longer than using it.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from taskyard import __version__
from taskyard.client.campaign.formats import Options
from taskyard.client.client import Client
from taskyard.core.events import UnknownPolicy
from taskyard.demo import campaign, place, proof
from taskyard.demo.campaign import Campaign
from taskyard.demo.proof import Counts, Kill, Line
from taskyard.demo.yard import Yard
from taskyard.errors import TimedOut, UserError
from taskyard.pipeline import small
from taskyard.pipeline.jobs import history, load, report
from taskyard.pipeline.session import borrowed
from taskyard.pipeline.sources import places
from taskyard.pipeline.submitting import target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from taskyard.demo.place import Place
    from taskyard.pipeline.transforms.guarantees import Guarantees

#: The broker is killed when so much of the campaign is settled.
KILLED_AT: Final = 0.4

#: How often the counts are looked at.
_LOOK_SECONDS: Final = 0.2

#: A campaign that is not settled by then never will be, however busy the machine; a thousand tasks
#: take some seconds.
_SETTLED_SECONDS: Final = 240.0
_SETTLED_SECONDS_A_THOUSAND: Final = 60.0

_SETTLED: Final = ("done", "failed", "cancelled")


class Teller(Protocol):
    """How the demo talks to its user."""

    def say(self, text: str) -> None:
        """A step begins, or has come to something."""

    def running(self) -> AbstractContextManager[object]:
        """While it lasts, counts are told."""

    def count(self, counts: Mapping[str, int], total: int) -> None:
        """So many tasks are in each state."""


class Outcome(Struct, frozen=True):
    """What came of it."""

    directory: Path
    state: Path
    report: Path
    tables: Path
    counts: Counts
    lines: list[Line]
    seconds: float


def run(tasks: int, out: Path, teller: Teller) -> Outcome:
    """All of it. Raises an error of the tree if a part of it can't be done at all."""
    began = time.monotonic()
    planned = campaign.plan(tasks)
    with place.prepare(out) as here:
        campaign.write(planned, here.campaign)
        teller.say(
            f"a campaign of {planned.tasks:,} tasks: a graph of {planned.graph:,}, "
            f"{planned.mails:,} mails in {planned.lanes} lanes, {planned.foreign:,} for workers of "
            "other dialects"
        )
        teller.say("starting a broker, a relay and four workers: native, agents, ping-pong, wmp")
        with Yard(here) as yard:
            teller.say("starting Spark")
            with borrowed("taskyard demo") as spark:
                _load(spark, here, planned, teller)
                kill = _run(yard, here, planned, teller)
                yard.stop()
                guarantees, page = _look_back(spark, here, teller)
        teller.say("counting the journal")
        counts = proof.count(here.state)
        lines = proof.lines(counts, guarantees, planned, kill)
        seconds = time.monotonic() - began
        return Outcome(here.directory, here.state, page, here.tables, counts, lines, seconds)


def _load(spark: SparkSession, here: Place, planned: Campaign, teller: Teller) -> None:
    """Have Spark check the file, and submit it."""
    teller.say("Spark checks the campaign")
    checked = load.read(spark, [str(here.campaign)], Options(campaign=campaign.NAME))
    try:
        checked.judge_again(known=())
        if checked.rejects:
            raise UserError(
                f"Spark rejects a task of the demo's own campaign: {checked.rejects[0]}; give -v "
                "and tell Taskyard's makers what it shows"
            )
        judged = checked.judged
        teller.say(
            f"it is sound: {judged.tasks:,} tasks, {judged.edges:,} dependencies, "
            f"{len(judged.sizes)} levels deep; Spark submits it"
        )
        with Client(state=here.state) as client:
            broker = client.broker
        taken = load.submit_all(checked, target(broker, None, campaign.NAME, UnknownPolicy.REFUSE))
    finally:
        checked.close()
    if taken.new != planned.tasks:
        raise UserError(
            f"the broker took {taken.new:,} tasks of {planned.tasks:,}; see {here.logs}"
        )


# While it runs.


def _run(yard: Yard, here: Place, planned: Campaign, teller: Teller) -> Kill:
    """Wait until all is settled; kill the broker on the way."""
    teller.say("the workers are at it")
    seconds = _SETTLED_SECONDS + _SETTLED_SECONDS_A_THOUSAND * planned.tasks / 1000
    ends = time.monotonic() + seconds
    kill = None
    with Client(state=here.state, report=teller.say) as client, teller.running():
        while True:
            counts = client.counts(campaign.NAME)
            teller.count(counts, planned.tasks)
            settled = sum(counts[state] for state in _SETTLED)
            if kill is None and settled >= KILLED_AT * planned.tasks:
                kill = _kill(yard, settled, planned, teller)
            yard.check()
            if _is_settled(client):
                break
            if time.monotonic() > ends:
                raise TimedOut(
                    f"{planned.tasks - settled:,} tasks are not settled after {seconds:.0f} s; "
                    f"the logs in {here.logs} may say why"
                )
    if kill is None:
        raise TimedOut("all was settled before the broker could be killed; give more --tasks")
    teller.say("all is settled; the workers and the broker go home")
    return kill


def _is_settled(client: Client) -> bool:
    try:
        client.wait_campaign(campaign.NAME, _LOOK_SECONDS)
    except TimedOut:
        return False
    return True


def _kill(yard: Yard, settled: int, planned: Campaign, teller: Teller) -> Kill:
    """The broker ends as in a power cut, and comes back."""
    teller.say(f"SIGKILL to the broker, with {settled:,} of {planned.tasks:,} tasks settled")
    began = time.monotonic()
    status = yard.kill_broker()
    yard.bring_back_broker()
    away = time.monotonic() - began
    teller.say(f"the broker is back after {away:.1f} s, on the same state and ports")
    return Kill(status, settled, planned.tasks, away)


# When it is over.


def _look_back(spark: SparkSession, here: Place, teller: Teller) -> tuple[Guarantees, Path]:
    """The history as tables, and the report, at once: each alone leaves a core idle. What the
    report counts, and where it is."""
    teller.say("Spark turns the journal into tables, and draws the report")
    history.export(here.state)
    quick = small.fitting(spark, places.size_bytes(here.state))
    with ThreadPoolExecutor(1, "tables") as helper:
        tables = helper.submit(_make_tables, quick, here)
        try:
            found = _draw(quick, here)
            teller.say("the report is there; the tables follow")
            tables.result()
        except BaseException:
            spark.stop()  # or the other would be waited for
            raise
    return found


def _draw(spark: SparkSession, here: Place) -> tuple[Guarantees, Path]:
    with tempfile.TemporaryDirectory(prefix="taskyard-demo-") as scratch:
        told = places.of_state(spark, here.state, Path(scratch))
        found = report.datasets(told.events, told.edges, campaign.NAME)
        try:
            page, facts = report.write(found, here.report, f"Made by Taskyard {__version__}.")
        finally:
            found.let_go()
    return facts.guarantees, page


def _make_tables(spark: SparkSession, here: Place) -> None:
    job = history.Job(here.state, here.tables)
    try:
        job.run(spark)
    finally:
        job.close()
