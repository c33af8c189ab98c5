"""Says how a run went, from what the broker and the agents wrote: python report.py [DIRECTORY].

It reads `mails.jsonl` (what was to be sent), `tasks.json` and `events.jsonl` (what the broker says
became of it), `deliveries.log` (what the agents did) and `taskyard.toml` (what was allowed). Every
line of the last table is computed from these; it exits 1 if one does not hold.
"""
# ruff: noqa: INP001, T201  # it stands alone; it prints

import json
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

#: What the broker tells is rounded to milliseconds.
ROUNDED_S = 0.002

#: What an agent writes of a try that has to be made again and counts as a failure.
CHARGED = ("deferred", "deferall", "crash")

#: How destinations behave, in the order of the table.
KINDS = ("host", "big", "slow", "down", "grey", "busy", "strict", "crash")

#: What the largest destination may have got, of all for it, when the small ones have theirs.
SHARE_MAX = 0.5


class Try(NamedTuple):
    """One message in the hands of one agent; seconds since the epoch."""

    begin: float
    end: float
    agent: str
    host: str
    name: str
    attempt: int
    word: str


class PutOff(NamedTuple):
    """The broker put a message off."""

    at: float
    due: float
    name: str
    is_charged: bool


class Check(NamedTuple):
    what: str
    figures: str
    holds: bool


class Run:
    """All that is known of a run."""

    def __init__(self, directory: Path) -> None:
        lines = (directory / "mails.jsonl").read_text().splitlines()
        #: The destination of each message that was to be sent, in the order of submission.
        self.sent = dict(pair for line in lines for pair in recipients(json.loads(line)))
        tasks = json.loads((directory / "tasks.json").read_text())["tasks"]
        self.tasks: dict[str, dict[str, Any]] = {task["name"]: task for task in tasks}
        log = (directory / "deliveries.log").read_text().splitlines()
        self.tries = sorted(a_try(line) for line in log)
        events = (directory / "events.jsonl").read_text().splitlines()
        self.put_off = [one for line in events for one in put_off(json.loads(line))]
        self.settings = tomllib.loads((directory / "taskyard.toml").read_text())

    def setting(self, host: str, key: str, default: Any) -> Any:  # noqa: ANN401  # any setting
        """Return a setting of a destination, from the first section that matches."""
        for name, section in self.settings["service"].items():
            if fnmatchcase(f"smtp/{host}", section.get("match", f"{name}/*")):
                return section.get(key, self.settings["defaults"].get(key, default))
        return self.settings["defaults"].get(key, default)

    @property
    def start(self) -> float:
        return min(task["submitted"] for task in self.tasks.values())

    @cached_property
    def hosts(self) -> Counter[str]:
        """How many messages were to go to each destination."""
        return Counter(self.sent.values())

    @cached_property
    def tries_of(self) -> dict[str, list[Try]]:
        """By message, in order of time; messages in the order of their first tries."""
        found: dict[str, list[Try]] = {}
        for one in self.tries:
            found.setdefault(one.name, []).append(one)
        return found

    @cached_property
    def taken(self) -> list[Try]:
        """Tries that went well, in the order of their ends."""
        return sorted((one for one in self.tries if one.word == "ok"), key=lambda one: one.end)


def recipients(task: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Messages and their destinations, of one line of the campaign."""
    if "recipients" not in task:
        yield task["name"], task["payload"]["host"]
    for place, person in enumerate(task.get("recipients", ())):
        yield f"{task['name']}/{place}", person["host"]


def a_try(line: str) -> Try:
    begin, end, agent, host, name, attempt, word = line.split("\t")
    return Try(int(begin) / 1e9, int(end) / 1e9, agent, host, own(name), int(attempt), word)


def put_off(event: dict[str, Any]) -> Iterator[PutOff]:
    if event["kind"] == "postponed":
        for name, due in zip(event["names"], event["due"], strict=True):
            yield PutOff(event["at"], due, own(name), event["own_fault"])


def own(full_name: str) -> str:
    """Return the name of a task in the campaign `mail`."""
    return full_name.removeprefix("mail/")


def most_at_once(tries: Iterable[Try]) -> int:
    moments = [(one.begin, 1) for one in tries] + [(one.end, -1) for one in tries]
    running = most = 0
    for _, change in sorted(moments):  # at the same moment, one ends before another begins
        running += change
        most = max(most, running)
    return most


def kind_of(host: str) -> str:
    return host.partition(".")[0].partition("-")[0]


# The checks.


def all_ended(run: Run) -> Check:
    states = Counter(task["state"] for task in run.tasks.values())
    done, failed = states["done"], states["failed"]
    figures = f"{len(run.sent):,} sent = {done:,} done + {failed:,} failed"
    holds = list(run.tasks) == list(run.sent) and done + failed == len(run.sent)
    return Check("every message ends done or failed", figures, holds)


def reasons_hold(run: Run) -> Check:
    """Refused for good at the first try, or given up after the last one of the schedule."""
    failed = [task for task in run.tasks.values() if task["state"] == "failed"]
    retries = len(run.settings["defaults"]["retries"])
    fits = [
        (len(run.tries_of.get(task["name"], ())), task["reason"], kind_of(run.sent[task["name"]]))
        in (
            (1, "550 no such user here", "strict"),
            (1 + retries, "the agent died: killed by SIGKILL", "crash"),
        )
        for task in failed
    ]
    refused = sum(kind_of(host) == "strict" for host in run.sent.values())
    said = sum(bool(task["reason"]) for task in failed)
    holds = all(fits) and bool(failed) and sum(one.word == "error" for one in run.tries) == refused
    return Check("failed messages have a reason", f"{said} of {len(failed)} reasons", holds)


def taken_once(run: Run) -> Check:
    times = Counter(one.name for one in run.taken)
    done = [name for name, task in run.tasks.items() if task["state"] == "done"]
    figures = f"{len(times):,} taken, {sum(times.values()) - len(times)} twice"
    return Check("no message is delivered twice", figures, dict(times) == dict.fromkeys(done, 1))


def in_their_lanes(run: Run) -> Check:
    lanes = {name: task["lane"] for name, task in run.tasks.items()}
    holds = lanes == run.sent and all(one.host == run.sent[one.name] for one in run.tries)
    return Check("a message's lane is its destination", f"{len(run.hosts)} lanes", holds)


def lane_limit(run: Run) -> Check:
    """Never more connections to a destination than its section allows."""
    by_host: dict[str, list[Try]] = defaultdict(list)
    for one in run.tries:
        by_host[one.host].append(one)
    most = {host: most_at_once(tries) for host, tries in by_host.items()}
    limits = {host: run.setting(host, "lane_workers_max", 1) for host in most}
    large = max(limits, key=limits.__getitem__)
    others = max(count for host, count in most.items() if host != large)
    figures = f"at most {others}; to {large} {most[large]} of {limits[large]}"
    holds = all(most[host] <= limits[host] for host in most)
    return Check("connections to a destination", figures, holds)


def section_limit(run: Run) -> Check:
    limit = run.settings["service"]["slow"]["workers_max"]
    most = most_at_once([one for one in run.tries if kind_of(one.host) == "slow"])
    return Check("slow destinations served at once", f"{most}, at most {limit}", 0 < most <= limit)


def agents_limit(run: Run) -> Check:
    slots = run.settings["worker"]["slots"]
    most = most_at_once(run.tries)
    figures = f"{most} at once, at most {slots}; {len({one.agent for one in run.tries})} in all"
    return Check("agents", figures, most <= slots)


def small_ones_first(run: Run) -> Check:
    """Check that the large destination does not delay the small ones, though it came first."""
    size = median(run.hosts.values())
    small = {host for host, count in run.hosts.items() if count <= size and kind_of(host) == "host"}
    last = max(one.end for one in run.taken if one.host in small)
    large, total = run.hosts.most_common(1)[0]
    share = sum(one.host == large and one.end <= last for one in run.taken) / total
    figures = f"{len(small)} small ones have all, {large} {share:.0%}"
    return Check("a large one delays no other", figures, share <= SHARE_MAX)


def others_go_on(run: Run) -> Check:
    """While a destination is down, or an agent has just died, the others get their messages."""
    meanwhile: list[int] = []
    for host in run.hosts:
        refused = [one.end for one in run.tries if one.host == host and one.word in CHARGED]
        if kind_of(host) in ("down", "crash") and refused:
            window = (min(refused), max(refused) + 1)
            ends = [one.end for one in run.taken if one.host != host]
            meanwhile.append(sum(window[0] < end < window[1] for end in ends))
    figures = f"{len(meanwhile)} were; others got {min(meanwhile, default=0):,} and more meanwhile"
    return Check("one that is down delays no other", figures, min(meanwhile, default=0) > 0)


def schedule_followed(run: Run) -> Check:
    """Each failure is put off by the next step of the schedule, and by its jitter at most more."""
    defaults = run.settings["defaults"]
    interval, jitter = float(defaults["interval"][:-1]), int(defaults["jitter"][:-1]) / 100
    failures: Counter[str] = Counter()
    wrong = 0
    for one in run.put_off:
        if one.is_charged:
            step = interval * [*defaults["retries"], 0][failures[one.name]]
            failures[one.name] += 1
            more = one.due - one.at - step
            wrong += not (step and -ROUNDED_S <= more <= jitter * step + ROUNDED_S)
    charged = Counter(one.name for one in run.tries if one.word in CHARGED)
    counted = {name: task["failures"] for name, task in run.tasks.items() if task["failures"]}
    refused = [one.name for one in run.tries if one.word == "error"]
    holds = not wrong and counted == charged + Counter(refused) and bool(charged)
    figures = f"{sum(failures.values()):,} by it, {wrong} not"
    return Check("retries follow the schedule", figures, holds)


def never_early(run: Run) -> Check:
    """Check that no postponed message is tried before its time."""
    early, late = 0, [0.0]
    for one in run.put_off:
        begins = [found.begin for found in run.tries_of.get(one.name, ()) if found.begin > one.at]
        early += any(begin < one.due - ROUNDED_S for begin in begins)
        late += [min(begins) - one.due] if begins else []
    figures = f"{len(run.put_off):,} times; {median(late):.1f} s after it in the median"
    return Check("no message is tried before it is due", figures, bool(run.put_off) and not early)


def in_order(run: Run) -> Check:
    """Of one lane, what was never put off is first tried in the order of submission. A lane with
    several connections has none."""
    places = {name: place for place, name in enumerate(run.sent)}
    excepted = {one.name for one in run.put_off}
    by_host: dict[str, list[int]] = defaultdict(list)
    for name in run.tries_of:
        host = run.sent[name]
        if name not in excepted and run.setting(host, "lane_workers_max", 1) == 1:
            by_host[host].append(places[name])
    wrong = [host for host, found in by_host.items() if found != sorted(found)]
    figures = f"{sum(map(len, by_host.values())):,} messages in {len(by_host)} lanes"
    return Check("the order in a lane holds", figures, not wrong and bool(by_host))


CHECKS = (
    all_ended,
    reasons_hold,
    taken_once,
    in_their_lanes,
    lane_limit,
    section_limit,
    agents_limit,
    small_ones_first,
    others_go_on,
    schedule_followed,
    never_early,
    in_order,
)


# What is printed.


def by_kind(run: Run) -> Iterator[Sequence[object]]:
    """Yield a row for each kind of destination."""
    for kind in KINDS:
        names = [name for name, host in run.sent.items() if kind_of(host) == kind]
        tries = {name: run.tries_of[name] for name in names if name in run.tries_of}
        states = Counter(run.tasks[name]["state"] for name in names)
        waits = [found[0].begin - run.tasks[name]["submitted"] for name, found in tries.items()]
        yield (
            *(kind, sum(kind_of(host) == kind for host in run.hosts), f"{len(names):,}"),
            *(f"{states['done']:,}", states["failed"], f"{sum(map(len, tries.values())):,}"),
            max(map(len, tries.values())),
            f"{median(waits):.1f} s",
            f"{max(found[-1].end for found in tries.values()) - run.start:.1f} s",
        )


def by_reason(run: Run) -> Iterator[Sequence[object]]:
    found = Counter(task["reason"] for task in run.tasks.values() if task["state"] == "failed")
    for reason, count in found.most_common():
        yield count, reason


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())
    print()


def main(directory: Path) -> int:
    run = Run(directory)
    checks = [check(run) for check in CHECKS]
    columns = ("KIND", "DESTINATIONS", "MESSAGES", "DONE", "FAILED", "TRIES", "MOST", "WAIT", "END")
    print_table(columns, by_kind(run))
    print_table(("FAILED", "REASON"), by_reason(run))
    rows = [(one.what, one.figures, "yes" if one.holds else "NO") for one in checks]
    print_table(("WHAT WAS PROMISED", "WHAT WAS SEEN", "HOLDS"), rows)
    return 0 if all(one.holds for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:])))
