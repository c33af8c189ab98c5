"""The soak's audit: tasks that are stuck after the faults, and the proofs of the journal.

Reads the output of commands (`status`, `workers`, `list`, `why`, `watch`, `journal export`) and the
workers' own ledger. Imports nothing of Taskyard, so that both can't be wrong in the same way.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from soak_kit.fleet import environment
from taskyard.process.child import taskyard_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from soak_kit.fleet import Layout
    from soak_kit.load import Promises

#: A verb that takes longer has failed.
VERB_SECONDS_MAX: Final = 30.0

#: A task that is READY for this long, beside a live worker of its service with a free slot, is
#: stuck.
STUCK_SECONDS: Final = 8.0

#: A worker that sent a message within this is alive: peers that only answer get a request every 5
#: s.
ALIVE_SECONDS: Final = 6.0

#: Prefixes of names that the broker made. The texts of these tasks are not in the journal.
MADE_UP: Final = ("round-robin-", "ping-pong-")

#: The prefix of plain dwork workers, which get only names of tasks.
PLAIN_WORKER: Final = "dwork-"

#: In the address of Taskyard's own round-robin worker, which keeps no ledger.
SILENT_WORKER: Final = ":worker-"

#: More than two lines of `watch` take.
LINE_BYTES_MAX: Final = 1 << 20

#: The beginning of a line of `watch`.
_DOCUMENT: Final = b'{"document"'

#: Problems of one kind that are shown.
SHOWN_MAX: Final = 5


def ask(place: Layout, *words: str) -> Any:  # noqa: ANN401  # a JSON document
    """Return the reply of a running broker to a verb with --json, or None if it fails.

    By the broker's endpoint: by its state directory, verbs also answer for a broker that is down.
    """
    return _run(place, *words, "--broker", place.native)


def maintain(place: Layout, *words: str) -> Any:  # noqa: ANN401  # a JSON document
    """Return the output of a verb with --json about a stopped broker, or None if it fails."""
    return _run(place, *words, "--state", str(place.state))


def succeeds(place: Layout, *words: str) -> bool:
    """Run a command, and return whether it exits with 0."""
    done = _run_command(place, *words)
    return done is not None and done.returncode == 0


def _run(place: Layout, *words: str) -> Any:  # noqa: ANN401  # a JSON document
    done = _run_command(place, *words, "--json")
    if done is None or done.returncode:
        return None
    return json.loads(done.stdout) if done.stdout else None


def _run_command(place: Layout, *words: str) -> subprocess.CompletedProcess[bytes] | None:
    """Run a command. Return None if it takes too long."""
    try:
        return subprocess.run(
            taskyard_command(words),
            capture_output=True,
            env=environment(),
            cwd=place.root,
            timeout=VERB_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


@dataclass
class Sampler:
    """Samples of an undisturbed broker: finds tasks that stay READY beside a free slot."""

    place: Layout
    #: Since when a task has been READY while a worker was free for it.
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Stuck tasks, with the broker's own reason.
    stuck: dict[str, str] = field(default_factory=dict)

    def sample(self) -> dict[str, int] | None:
        """Take a sample. Return the counts by state, or None if the broker did not answer."""
        status = ask(self.place, "status")
        if status is None:
            self._since.clear()
            return None
        counts: dict[str, int] = status["counts"]
        if not counts["ready"]:
            self._since.clear()
            return counts
        workers = ask(self.place, "workers")
        tasks = ask(self.place, "list", "--only", "ready", "--only", "leased", "--all")
        if workers is None or tasks is None:
            return None
        now = time.monotonic()
        pairs = {*free_pairs(tasks["tasks"], workers["workers"])}
        self._since = {pair: self._since.get(pair, now) for pair in pairs}
        for (name, worker), since in self._since.items():
            if now - since > STUCK_SECONDS and name not in self.stuck:
                why = self.why(name) if len(self.stuck) < SHOWN_MAX else "…"
                self.stuck[name] = f"{name} is READY beside {worker}: {why}"
        return counts

    def why(self, name: str) -> str:
        """Return the broker's own sentence about a task."""
        reply = ask(self.place, "why", name)
        return "no answer" if reply is None else str(reply["tasks"][0]["sentence"])


def free_pairs(
    tasks: list[dict[str, Any]], workers: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield each READY task with each live worker that has a free slot for it."""
    served = {(one["service"], one["lane"]) for one in tasks if one["state"] == "leased"}
    for one in tasks:
        place = (one["service"], one["lane"])
        if one["state"] != "ready" or (one["lane"] and place in served):
            continue  # a serial lane has one leased task at a time
        for worker in workers:
            if one["service"] in worker["services"] and is_free(worker):
                yield one["name"], worker["name"]


def is_free(worker: dict[str, Any]) -> bool:
    """Return whether a worker is alive and has a free slot. 0 slots is no limit."""
    has_slot = not worker["slots"] or worker["slots_used"] < worker["slots"]
    is_alive = worker["last_seen_ago"] < ALIVE_SECONDS
    return bool(has_slot and is_alive and worker["state"] != "draining")


@dataclass
class History:
    """The output of `watch`: every decision of the broker, in order."""

    submitted: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    #: The worker that finished a task, and the time.
    done_by: dict[str, str] = field(default_factory=dict)
    served_at: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    #: Records at which a task was first leased, and at which it was finished.
    leased_in: dict[str, int] = field(default_factory=dict)
    finished_in: dict[str, int] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    last: int = 0
    missing: int = 0

    def add(self, record: dict[str, Any]) -> None:
        """Add one record. Records that were printed before are skipped."""
        number = record["record"]
        if number <= self.last:
            return
        self.missing += number - self.last - 1
        self.last = number
        kind, names = record["kind"], record.get("names", [])
        self.kinds[kind] += len(names)
        if kind == "submitted":
            self.submitted.update(names)
        elif kind == "leased":
            for name in names:
                self.leased_in.setdefault(name, number)
        elif kind == "finished":
            self.finished.update(names)
            self.finished_in |= dict.fromkeys(names, number)
            self.done_by |= dict.fromkeys(names, record["worker"])
            self.served_at[record["worker"]] = record["at"]
        elif kind == "failed":
            self.failed |= dict(zip(names, record["reasons"], strict=True))


def read_history(path: Path) -> History:
    """Read the output of `watch` so far. A line of its errors may be in front of a document."""
    history = History()
    for line in path.read_bytes().split(b"\n")[:-1]:
        start = line.find(_DOCUMENT)
        if start >= 0:
            record = json.loads(line[start:])
            if "record" in record:
                history.add(record)
    return history


def last_record(path: Path) -> int:
    """Return the number of the last record that `watch` has printed."""
    lines = path.read_bytes()[-LINE_BYTES_MAX:].split(b"\n")
    whole = [line for line in lines[1:-1] if line.startswith(b"{")]
    return int(json.loads(whole[-1])["record"]) if whole else 0


def read_ledger(path: Path) -> tuple[Counter[bytes], dict[str, float]]:
    """Return how often each text ran, and when each worker last ran a task."""
    texts: Counter[bytes] = Counter()
    served_at: dict[str, float] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        at, worker, text = line.split(b"\t", 2)
        texts[text] += 1
        served_at[worker.decode()] = float(at)
    return texts, served_at


@dataclass
class AuditLine:
    """A line of the closing table: the requirement, the figure and the problems."""

    what: str
    figures: str
    wrong: list[str] = field(default_factory=list)


def journal_lines(place: Layout, history: History) -> list[AuditLine]:
    """Compare the exported history of a stopped broker with the output of `watch`."""
    checked = maintain(place, "journal", "check")
    out = place.state / "export"
    exported = maintain(place, "journal", "export", "--out", str(out))
    sound = [] if checked and checked["sound"] else ["`journal check` finds damage"]
    lines = [AuditLine("journal is sound", "`journal check`", sound)]
    if exported is None:
        return [*lines, AuditLine("history", "`journal export`", ["it fails"])]
    finished: Counter[str] = Counter()
    for path in sorted((out / "events").glob("*.parquet")):
        table = pq.read_table(path, columns=["kind", "task"])
        rows = zip(table["kind"].to_pylist(), table["task"].to_pylist(), strict=True)
        finished.update(task for kind, task in rows if kind.lower() == "finished")
    differ = [
        name for name in {*finished, *history.finished} if finished[name] != history.finished[name]
    ]
    wrong = [f"{name}: {finished[name]} in the history" for name in differ]
    return [
        *lines,
        AuditLine("history agrees with `watch`", f"{finished.total():,} completions", wrong),
    ]


def history_lines(history: History, promises: Promises, ledger: Counter[bytes]) -> list[AuditLine]:
    """Compare the broker's decisions with the promises to clients and the workers' ledger."""
    done = {*history.finished}
    lost = sorted({*history.submitted} - done - {*history.failed})
    unkept = sorted(promises.names - done)
    twice = [f"{name}: {count} times" for name, count in history.finished.items() if count > 1]
    doubled = [f"{name}: {count} times" for name, count in history.submitted.items() if count > 1]
    early = [
        f"{name} began before {first} was done"
        for name, first in promises.after.items()
        if history.leased_in.get(name, 0) < history.finished_in.get(first, 0)
    ]
    failed = [f"{name}: {reason}" for name, reason in history.failed.items()]
    gaps = [f"{history.missing} records are missing"] if history.missing else []
    runs = ledger.total() - len(ledger)
    return [
        AuditLine("`watch` missed nothing", f"{history.last:,} records", gaps),
        AuditLine(
            "nothing lost", f"{history.submitted.total():,} submitted, {len(done):,} done", lost
        ),
        AuditLine("promises kept", f"{len(promises.names):,} acknowledged by name", unkept),
        AuditLine(
            "nothing completed twice", f"{history.kinds['stale']:,} stale reports refused", twice
        ),
        AuditLine("nothing submitted twice", f"{len(history.submitted):,} names", doubled),
        AuditLine(
            "no innocent task failed", f"{history.kinds['expired']:,} leases expired", failed
        ),
        AuditLine("answers match their tasks", f"{promises.sent:,} sent", promises.wrong),
        AuditLine("dependencies kept", f"{len(promises.after):,} pairs", early),
        AuditLine(
            "every done task has run", f"{runs:,} ran again", unrun(history, promises, ledger)
        ),
    ]


def unrun(history: History, promises: Promises, ledger: Counter[bytes]) -> list[str]:
    """Return tasks that were completed and are not in the ledger of their workers.

    The text of a task whose name the broker made is not in the journal. Such tasks count if a plain
    worker ran them, which gets only names, or a worker without a ledger.
    """
    wrong: list[str] = []
    hidden = silent = 0
    for name, worker in history.done_by.items():
        is_silent = SILENT_WORKER in worker
        is_plain = worker.startswith(PLAIN_WORKER)
        is_named = name in promises.names and not name.startswith(MADE_UP)
        if name.startswith(MADE_UP):
            silent += is_silent
            hidden += is_silent or is_plain
        if (is_named or is_plain) and not is_silent and not ledger[name.encode()]:
            wrong.append(f"{name}: done by {worker}, and never ran")
    missing = [text for text in promises.texts if not ledger[text]]
    if len(missing) > hidden:
        wrong.append(f"{len(missing)} EXEC never ran, {hidden} may be hidden: {missing[:3]}")
    missing = [
        text
        for text in promises.answered
        if not ledger[text] and text.decode() not in history.done_by
    ]
    if len(missing) > silent:
        wrong.append(
            f"{len(missing)} answered and never ran, {silent} may be hidden: {missing[:3]}"
        )
    return wrong
