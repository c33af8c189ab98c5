"""Every verb of the pipeline, run once on tiny inputs in the active session.

    python -m tests.pipeline.verbs MASTER DIRECTORY ENDPOINT…

runs them in a session of its own, because a process has only one driver, and prints their results
as JSON. Results are the same on every deployment. Paths are relative, as a user would type them.
"""

from __future__ import annotations

import json
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from taskyard.client.internal import InternalClient
from taskyard.pipeline.jobs import fleet as fleet_job
from taskyard.pipeline.session import session_scope
from taskyard.spark import map_rows
from tests.kit.processes import campaign, run_here
from tests.pipeline.scenarios import SMALL, EventLog, write_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

#: Settings of a driver that runs them. Commands that start a session set the others, too.
CONF: Final = {"spark.sql.shuffle.partitions": "2", **SMALL}

#: The loaded tasks, and the rows that are mapped.
TASKS: Final = [{"name": "a", "argv": ["true"]}, {"name": "b", "argv": ["true"], "after": ["a"]}]
ROWS: Final = [(1, "x"), (2, "y")]


#: A fleet runs its tasks within this time, even on a busy machine.
TIMEOUT_SECONDS: Final = 60


class Place(Struct):
    """The inputs: files in a directory, and a broker that only one deployment uses."""

    directory: Path
    spark: SparkSession
    master: str
    #: The name of the deployment, in the names of all outputs.
    name: str
    #: The native endpoint, and one that workers on other machines could reach.
    endpoints: list[str]
    fleet: Future[int] | None = None

    def run(self, *words: str) -> dict[str, Any]:
        """Run a verb here. Return its document."""
        if words[0] == "load":
            words = (*words, "--spark", self.master, "--json")
        else:
            group = () if words[0] == "report" else ("pipeline",)
            words = (*group, *words, "--master", self.master, "--json")
        code, out, err = run_here(self.directory, *words)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found


def write_inputs(directory: Path) -> None:
    """Write a campaign and a history."""
    campaign(directory, TASKS)
    log = EventLog()
    log.join(0, "w")
    log.submit(0, "c/a")
    log.submit(0, "c/b", "c/a")
    log.run("c/a", 1, 2)
    log.ready(2, "c/b")
    log.run("c/b", 3, 5)
    write_part(directory / "state", 1, 99, log)


def load(place: Place) -> object:
    words = ("load", "campaign.jsonl", "--campaign", "loaded", "--broker", place.endpoints[0])
    found = place.run(*words)
    return [found[name] for name in ("new", "existing", "rejected")]


def start_fleet(place: Place) -> object:
    """Start a worker in an executor. It runs the tasks of the others until the broker drains."""
    fleet_job.check(1, place.master, place.endpoints[1])
    fleet_job.check_server(place.spark)
    options = ["--broker", place.endpoints[1]]
    pool = ThreadPoolExecutor(1)
    place.fleet = pool.submit(fleet_job.run, place.spark, 1, options)
    pool.shutdown(wait=False)
    return "started"


def map_each(place: Place) -> object:
    frame = place.spark.createDataFrame(ROWS, "id int, text string")
    to: dict[str, Any] = {"key": "id", "campaign": "mapped", "broker": place.endpoints[0]}
    done = map_rows(frame, argv=["echo", "{text}"], timeout=TIMEOUT_SECONDS, **to)
    return [(row["key"], row["state"], row["result"]) for row in sorted(done.collect())]


def end_fleet(place: Place) -> object:
    assert place.fleet is not None
    with InternalClient(place.endpoints[0]) as client:
        client.drain()
    return place.fleet.result(TIMEOUT_SECONDS)


def data_source(place: Place) -> object:
    reader = place.spark.read.format("taskyard")
    events = reader.option("state", str(place.directory / "state")).load()
    tasks = place.spark.read.format("taskyard").option("table", "tasks")
    names = tasks.option("broker", place.endpoints[0]).option("campaign", "mapped").load()
    return [events.count(), sorted(row["name"] for row in names.select("name").collect())]


def history(place: Place) -> object:
    found = place.run("history", "--state", "state", "--out", f"tables-{place.name}")
    (made,) = found["states"]
    return [made[name] for name in ("row_last", "parts", "campaigns")]


def report(place: Place) -> object:
    found = place.run("report", "--state", "state", "--out", f"report-{place.name}")
    assert (place.directory / f"report-{place.name}" / "report.html").exists()
    return [found["sound"], found["makespan_ns"], found["guarantees"]["done"]]


def sweep(place: Place) -> object:
    found = place.run("sweep", "--state", "state", "--workers", "1,2")
    return [(one["workers"], one["done"]) for one in found["points"]]


#: In the order of their runs.
VERBS: Final[dict[str, Callable[[Place], object]]] = {
    "first worker": start_fleet,
    "load": load,
    "map_rows": map_each,
    "data source": data_source,
    "fleet": end_fleet,
    "history": history,
    "report": report,
    "sweep": sweep,
}


def run_all(place: Place) -> dict[str, Any]:
    """Run all verbs. Returns their results, or the text of an error in place of a result."""
    results: dict[str, Any] = {}
    for name, run in VERBS.items():
        try:
            results[name] = run(place)
        except BaseException:  # noqa: BLE001  # a verb exits by SystemExit, and others can run
            results[name] = traceback.format_exc()
    return json.loads(json.dumps(results))  # type: ignore[no-any-return]  # tuples as lists


def main(master: str, directory: str, *endpoints: str) -> None:
    with session_scope("tests", master, conf=CONF) as spark:
        results = run_all(Place(Path(directory), spark, master, "cluster", list(endpoints)))
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
