"""Count the calls of each usual message, and print them beside the kept numbers.

Our own calls are compared with `kept.json`, which may only fall. Printed beside them are the calls
of pyzmq, of other Python code and of C functions, blocks of memory, and system calls where strace
is installed. No clock: the figures are the same on any machine with the same Python.
"""

import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median_low
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from bench.calls import cases
from bench.calls.tracer import Segment, Trace, read
from bench.peers import PeerTask
from bench.processes import Peer, Process
from taskyard.net import endpoints

#: Tests add the tools to the path of their own process only.
_ENVIRONMENT: Final = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

#: The kept numbers of our own calls, by message.
KEPT: Final = Path(__file__).with_name("kept.json")

#: The Python whose calls are counted. Other versions inline differently.
PYTHON: Final = (3, 11)

_STEAL, _REPORT, _SUBMIT = "TasksRequested", "TasksReported", "SubmitRequested"
_HEARTBEAT: Final = "WorkerHeartbeat"

#: The messages, by the run and the events of their turn.
MESSAGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "plain Create": ("plain", (_SUBMIT,)),
    "plain Steal": ("plain", (_STEAL,)),
    "plain Complete": ("plain", (_REPORT,)),
    "native Create that wakes a worker": ("native", (_SUBMIT,)),
    "native Complete that parks": ("native", (_REPORT, _STEAL)),
    "native heartbeat": ("native", (_HEARTBEAT,)),
    "native Create": ("steal", (_SUBMIT,)),
    "native Steal": ("steal", (_STEAL,)),
    "native Complete": ("steal", (_REPORT,)),
    "empty turn": ("idle", ()),
    "housekeeping, every 10 s when idle": ("idle", (cases.HOUSEKEEPING,)),
}

#: A task in the client's process, and the turns of its session: for the submission, for its
#: acknowledgement and for the result. On a busy machine two of them may be one.
CLIENT: Final = "submit(…).result(), client"
_CLIENT_TURNS: Final = ("Session",) * 3

#: What is compared with the kept numbers.
KEPT_MESSAGES: Final = (*MESSAGES, CLIENT)

#: The runs in which a task is several messages. Their turns are added up.
TASKS: Final = ("ping-pong", "round-robin", "wmp")

#: Turns that are less frequent than this share of the tasks belong to none of them.
_SHARE_MIN: Final = 0.8


class Figures(msgspec.Struct):
    """The calls of one message, or of one task."""

    what: str
    own: int
    zmq: int
    other: int
    c: int
    sqlite: int
    allocations: int
    files: int
    #: None if it is not counted.
    system: float | None = None


def run(say: Callable[[str], None]) -> tuple[list[Figures], tuple[float, float]]:
    """Count everything. Return the figures, and the calls of Python and C a second when idle."""
    traces = {}
    for name in cases.RUNS:
        say(f"calls: {name}")
        traces[name] = trace(name)
    found = [figures_of(what, traces) for what in MESSAGES]
    found += [_task_figures(name, traces[name]) for name in TASKS]
    say("calls: submit and result")
    found.append(client_figures())
    if shutil.which("strace"):
        say("system calls")
        system = _system_calls("plain") / (3 * cases.REPEATS)
        found.append(Figures("plain message, mean", 0, 0, 0, 0, 0, 0, 0, system))
    return found, idle_calls(traces["idle"])


@contextmanager
def _broker(run_name: str, file: str, *before: str) -> Iterator[tuple[Process, Path]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        state = Path(directory) / "state"
        words = (file, "broker", str(state), *cases.RUNS[run_name][1])
        broker = Process("bench.calls.traced", *words, environment=_ENVIRONMENT, before=before)
        try:
            broker.line()
            yield broker, state
        finally:
            broker.terminate()


def trace(name: str) -> Trace:
    """Run the peers of a case with a broker of their own. Return its trace."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        file = Path(directory) / "trace"
        with _broker(name, str(file)) as (broker, state):
            cases.RUNS[name][0](*cases.places_of(name, broker, state))
        return read(file)


def _by_labels(found: Trace) -> dict[tuple[str, ...], list[Segment]]:
    turns = defaultdict(list)
    for segment in found.segments:
        turns[tuple(segment.labels)].append(segment)
    return turns


def _middle(segments: Sequence[Segment]) -> Segment:
    """Return the segment with the median of our own calls."""
    wanted = median_low([one.own for one in segments])
    return next(one for one in segments if one.own == wanted)


def _figures(what: str, *segments: Segment) -> Figures:
    fields = ("own", "zmq", "other", "c", "sqlite", "allocations")
    sums = {field: sum(getattr(one, field) for one in segments) for field in fields}
    files = {key.partition(" ")[0] for one in segments for key in one.functions}
    return Figures(what, **sums, files=len(files))


def figures_of(what: str, traces: dict[str, Trace]) -> Figures:
    name, labels = MESSAGES[what]
    segments = _by_labels(traces[name])[labels]
    if not segments:
        raise RuntimeError(f"{what}: no turn of the run {name} has the events {labels}")
    if not labels:  # some of the turns without messages check the clock and the disk
        return _figures(what, min(segments, key=lambda one: one.own))
    return _figures(what, _middle(segments))


def _task_figures(name: str, found: Trace) -> Figures:
    """Add up the turns of a task, of each kind as often as a task has it."""
    middles = []
    for labels, segments in _by_labels(found).items():
        times = len(segments) / cases.REPEATS
        if labels and times >= _SHARE_MIN:
            middles += [_middle(segments)] * round(times)
    return _figures(f"{name} task, {len(middles)} turns", *middles)


def client_figures() -> Figures:
    """Count the calls of `submit` and `result` in the client's process."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        _, state = stack.enter_context(_broker("native", ""))
        endpoint = endpoints.native_endpoint(state)
        worker = Peer(PeerTask("work", endpoint, 1, is_parking=True))
        stack.callback(worker.end)
        worker.done()
        worker.send_go()
        file = directory / "trace"
        client = Process(
            "bench.calls.traced", str(file), "client", endpoint, environment=_ENVIRONMENT
        )
        client.output.readall()
        client.end()
        return _figures(CLIENT, _middle(_by_labels(read(file))[_CLIENT_TURNS]))


def idle_calls(found: Trace) -> tuple[float, float]:
    """Return the calls of Python and of C functions a second in an idle broker, all threads."""
    seconds = [*found.seconds.values()][-cases.IDLE_S : -1]
    count = len(seconds)
    return sum(one for one, _ in seconds) / count, sum(one for _, one in seconds) / count


def _system_calls(name: str) -> int:
    """Count the system calls of a broker while the peers of a case are served."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        file = Path(directory) / "strace"
        strace = ("strace", "-D", "-f", "-o", str(file))  # -D: signals reach the broker
        with _broker(name, "", *strace) as (broker, state):
            places = [*cases.places_of(name, broker, state)]
            cases.RUNS[name][0](*places)  # caches and the first pages of the log
            before = len(file.read_bytes().splitlines())
            cases.RUNS[name][0](*places)
            return len(file.read_bytes().splitlines()) - before


# Kept numbers.


def kept() -> dict[str, int]:
    return msgspec.json.decode(KEPT.read_bytes(), type=dict[str, int])


def changed(found: Sequence[Figures]) -> list[str]:
    """Return a line for each message whose own calls are not the kept number."""
    numbers = kept()
    return [
        f"{one.what}: {one.own} calls of our own, {numbers.get(one.what)} are kept"
        for one in found
        if one.what in KEPT_MESSAGES and one.own != numbers.get(one.what)
    ]


def keep(found: Sequence[Figures]) -> None:
    """Write the numbers of this run as the kept numbers."""
    numbers = {one.what: one.own for one in found if one.what in KEPT_MESSAGES}
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(numbers)) + b"\n")


def show(found: Sequence[Figures], idle: tuple[float, float]) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    table = Table(title=f"bench calls: Python {version}", title_justify="left")
    table.add_column("what", no_wrap=True)
    columns = ("all Python", "own", "pyzmq", "other", "C", "SQLite", "blocks", "files", "system")
    for column in columns:
        table.add_column(column, justify="right")
    for one in found:
        numbers = [one.own + one.zmq + one.other, one.own, one.zmq, one.other, one.c, one.sqlite]
        numbers += [one.allocations, one.files]
        cells = [str(number) for number in numbers] if one.own else [""] * len(numbers)
        table.add_row(one.what, *cells, "" if one.system is None else f"{one.system:.1f}")
    table.add_row("idle broker, a second", f"{idle[0]:.0f}", *[""] * 3, f"{idle[1]:.0f}", *[""] * 4)
    console = Console(file=getattr(sys.stdout, "stream", sys.stdout))
    if not console.is_terminal:
        console.width = 120
    console.print(table)
