"""Pools of processes without a server: `python pools.py POOL COUNT BATCH [call]`.

Uses the standard library and Dask only: it also runs in an environment without Taskyard. Prints a
line when the pool is ready and one when it is done, and waits for a byte after each.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any

WORKERS = 2


def work(payload: bytes) -> None:
    """Do nothing."""
    del payload


def _report(waits_ns: list[int]) -> None:
    os.write(1, b'{"waits_ns": %b}\n' % str(waits_ns).encode())
    os.read(0, 1)


def _calls(pool: Any, count: int) -> list[int]:  # noqa: ANN401  # Dask's has no types here
    """Return the latency of tasks, one at a time."""
    waits_ns = []
    for number in range(count):
        start_ns = time.monotonic_ns()
        pool.submit(work, b"payload-of-%09d" % number).result()
        waits_ns.append(time.monotonic_ns() - start_ns)
    return waits_ns


def executor(count: int, batch: int, *, call: bool) -> None:
    """Run tasks in a ProcessPoolExecutor: `submit` for batches of 1, else `map` in chunks."""
    payloads = [b"payload-of-%09d" % number for number in range(count)]
    with ProcessPoolExecutor(WORKERS) as pool:
        for ready in [pool.submit(time.sleep, 0.1) for _ in range(WORKERS)]:
            ready.result()
        _report([])
        if call:
            _report(_calls(pool, count))
            return
        if batch == 1:
            for future in [pool.submit(work, payload) for payload in payloads]:
                future.result()
        else:
            list(pool.map(work, payloads, chunksize=batch))
        _report([])


def dask(count: int, batch: int, *, call: bool) -> None:
    """Run tasks in a local Dask cluster. `map` sends them to the scheduler in batches."""
    distributed = import_module("distributed")  # only where it is installed

    payloads = [b"payload-of-%09d" % number for number in range(count)]
    options = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(processes=True, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.submit(work, b"first", pure=False).result()
        _report([])
        if call:
            _report(_calls(client, count))
            return
        client.gather(client.map(work, payloads, batch_size=batch, pure=False))
        _report([])


if __name__ == "__main__":
    {"executor": executor, "dask": dask}[sys.argv[1]](
        int(sys.argv[2]), int(sys.argv[3]), call=sys.argv[4:] == ["call"]
    )
