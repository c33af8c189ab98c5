"""The campaigns of the pipeline's benchmark: some to simulate, one to load, and one like the demo's
to run."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.workloads import TASKS_PER_CHAIN
from taskyard.core.limits import SECOND_NS
from taskyard.core.rules import LaneOptions
from taskyard.pipeline.sweep.workload import Setback, SettingsRules, TaskKind, Workload

#: Tasks in the demo's campaign, and the percentages in its graph and in lanes.
DEMO_TASKS: Final = 2800
_GRAPH_PERCENT: Final = 32
_LANES_PERCENT: Final = 33

#: Parts of a sample in the demo's graph, and lanes.
_PARTS: Final = 20
_DEMO_LANES: Final = 20

#: Of the tasks in lanes, one in this many fails for good, and one in this many is waited for.
_FAILS_EVERY: Final = 80
_AWAITED_EVERY: Final = 10

#: The run times of the demo's tasks.
_SECONDS_MIN, _SECONDS_MAX = 0.004, 0.024

_LANES: Final = 1000

#: Lanes that are longer than a worker's turn in a lane.
_LONG_LANES: Final = 20

#: Of the tasks in simulated lanes, one in this many is retried once.
_RETRIED_EVERY: Final = 20

#: Tasks of a submission, and the time between two, where lanes get tasks while they run.
_SUBMITTED: Final = 100
_SUBMITTED_EVERY_NS: Final = SECOND_NS // 10

#: The broker's cost per task in a simulation.
_GAP_NS: Final = SECOND_NS // 1000

#: A task of the random graph waits for up to two of this many tasks before it.
_WAITS_MAX: Final = 2
_REACH: Final = 1000


# To simulate.


def flat(tasks: int) -> Workload:
    rng = _rng()
    run_ns = [int(rng.expovariate(1) * SECOND_NS) + 1 for _ in range(tasks)]
    return Workload([b"task-%08d" % number for number in range(tasks)], run_ns, gap_ns=_GAP_NS)


def chains(tasks: int) -> Workload:
    made = flat(tasks)
    made.after = [[number - 1] if number % TASKS_PER_CHAIN else [] for number in range(tasks)]
    return made


def random_graph(tasks: int) -> Workload:
    made, rng = flat(tasks), _rng()
    made.after = [_some_before(number, rng) for number in range(tasks)]
    return made


def lanes(tasks: int) -> Workload:
    made = flat(tasks)
    made.lanes = [b"lane-%d" % (number % _LANES) for number in range(tasks)]
    return made


def long_lanes(tasks: int) -> Workload:
    made = flat(tasks)
    made.lanes = [b"lane-%d" % (number % _LONG_LANES) for number in range(tasks)]
    return made


def lanes_with_priorities(tasks: int) -> Workload:
    made = lanes(tasks)
    made.kinds = [TaskKind(priority=priority) for priority in range(3)]
    made.kind_at = [number % len(made.kinds) for number in range(tasks)]
    return made


def lanes_over_time(tasks: int) -> Workload:
    made = lanes(tasks)
    made.arrivals_ns = [number // _SUBMITTED * _SUBMITTED_EVERY_NS for number in range(tasks)]
    return made


def lanes_with_retries(tasks: int) -> Workload:
    made = lanes(tasks)
    setback = Setback(SECOND_NS, SECOND_NS)
    made.setbacks = {number: [setback] for number in range(0, tasks, _RETRIED_EVERY)}
    return made


def lanes_and_graph(tasks: int) -> Workload:
    made = lanes(tasks)
    made.after = random_graph(tasks).after
    return made


def lanes_of_two_workers(tasks: int) -> Workload:
    made = lanes(tasks)
    made.rules = SettingsRules(defaults=LaneOptions(lane_workers_max=2))
    return made


def lanes_with_rates(tasks: int) -> Workload:
    made = lanes(tasks)
    made.rules = SettingsRules(defaults=LaneOptions(lane_rate_interval_ns=SECOND_NS // 2))
    return made


SHAPES: Final[dict[str, Callable[[int], Workload]]] = {
    "flat": flat,
    "chains of 10": chains,
    "random graph": random_graph,
    "1,000 lanes": lanes,
    "20 long lanes": long_lanes,
    "lanes with priorities": lanes_with_priorities,
    "lanes over time": lanes_over_time,
    "lanes with retries": lanes_with_retries,
    "lanes and a graph": lanes_and_graph,
    "lanes of two workers": lanes_of_two_workers,
    "lanes with rates": lanes_with_rates,
}


def write_slept(workload: Workload, path: Path) -> None:
    """Write a campaign file whose tasks sleep for their run times."""
    names = [name.decode() for name in workload.names]
    with path.open("w") as file:
        for number, name in enumerate(names):
            after = workload.after[number] if workload.after else []
            seconds = f"{workload.run_ns[number] / SECOND_NS:.9f}"
            task = {"name": name, "argv": ["sleep", seconds], "after": [names[at] for at in after]}
            file.write(json.dumps(task) + "\n")


def _some_before(number: int, rng: random.Random) -> list[int]:
    if not number:
        return []
    first = max(0, number - _REACH)
    waits = rng.randrange(_WAITS_MAX + 1)
    return sorted({rng.randrange(first, number) for _ in range(waits)})


def _rng() -> random.Random:
    return random.Random(1)  # the same numbers in every run


# To load.


def write_graph(path: Path, tasks: int) -> int:
    """Write a Parquet file of commands, each after two of the tasks before it. Return the number of
    dependencies."""
    import numpy as np  # noqa: PLC0415  # of an extra
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    rng = np.random.default_rng(1)  # the same numbers in every run
    numbers = np.arange(tasks)
    reach = np.minimum(numbers, _REACH)
    near = rng.integers(1, np.maximum(reach, 2))
    far = near + rng.integers(1, np.maximum(reach - near + 1, 2))
    before = np.column_stack((numbers - near, numbers - far))
    is_known = (before >= 0) & (numbers >= _WAITS_MAX)[:, None]
    names = pa.array([f"task-{number:08}" for number in range(tasks)])
    argv = [["process", f"--part={number}"] for number in range(tasks)]
    ends = np.concatenate(([0], np.cumsum(is_known.sum(axis=1))))
    after = pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()), names.take(pa.array(before[is_known]))
    )
    pq.write_table(pa.table({"name": names, "argv": argv, "after": after}), path)
    return int(ends[-1])


# To run.


def write_like_the_demo(path: Path, tasks: int) -> None:
    """Write a campaign file of four services: a graph of samples, tasks in lanes of which some
    fail, and independent tasks. The tasks are functions that sleep: `--allow time`."""
    rng = _rng()
    with path.open("w") as file:
        for task in _like_the_demo(tasks):
            seconds = rng.uniform(_SECONDS_MIN, _SECONDS_MAX)
            whole = {"call": "time:sleep", "args": [seconds]} | task
            file.write(json.dumps(whole) + "\n")


def _like_the_demo(tasks: int) -> Iterator[dict[str, Any]]:
    in_lanes = tasks * _LANES_PERCENT // 100
    made = [*_graph(max(1, tasks * _GRAPH_PERCENT // 100 // (_PARTS + 2))), *_in_lanes(in_lanes)]
    yield from made
    for number in range(tasks - len(made)):
        yield {"name": f"text-{number:05}", "service": "text" if number % 2 else "letters"}


def _graph(samples: int) -> Iterator[dict[str, Any]]:
    """Yield the graph: each sample is fetched, counted in parts and merged, then summarised."""
    for sample in range(samples):
        first = f"sample-{sample:03}/fetch"
        parts = [f"sample-{sample:03}/count-{part:02}" for part in range(_PARTS)]
        yield {"name": first}
        for part in parts:
            yield {"name": part, "after": [first]}
        yield {"name": f"sample-{sample:03}/merge", "after": parts}
    yield {"name": "summary", "after": [f"sample-{one:03}/merge" for one in range(samples)]}


def _in_lanes(tasks: int) -> Iterator[dict[str, Any]]:
    receipts = []
    for number in range(tasks):
        name = f"mail-{number:05}"
        # A negative sleep fails.
        fails = {"args": [-1], "retries": 2, "backoff": "500ms"}
        mail = {"name": name, "service": "mail", "lane": f"host-{number % _DEMO_LANES}"}
        yield mail if number % _FAILS_EVERY else mail | fails
        if number % _AWAITED_EVERY == 0:
            receipts.append(f"receipt-{number:05}")
            yield {"name": receipts[-1], "after": [name]}
    yield {"name": "digest", "after": receipts}
