"""The simulation of one point of the grid, pooled if possible, otherwise worker by worker."""

from __future__ import annotations

from time import process_time_ns
from typing import TYPE_CHECKING

import numpy as np

from taskyard.pipeline.sweep.grid import Forecast, Point
from taskyard.pipeline.sweep.per_worker import WorkerSimulation, uniform_workers
from taskyard.pipeline.sweep.pooled import WINDOW_SHARE, PooledSimulation, can_pool, prefetch_of

if TYPE_CHECKING:
    from taskyard.pipeline.sweep.workload import CampaignBounds, Workload


def simulate(workload: Workload, time_bounds: CampaignBounds, point: Point) -> Forecast:
    """Simulate the campaign on the workers of a point."""
    begin_ns = process_time_ns()
    run: PooledSimulation | WorkerSimulation
    if can_pool(workload, time_bounds, point):
        window_ns = time_bounds.work_ns // max(1, time_bounds.tasks) // WINDOW_SHARE
        run = PooledSimulation(workload, point, prefetch_of(time_bounds, point), window_ns)
    else:
        run = WorkerSimulation(workload, point, uniform_workers(workload, point))
    run.run()
    return _forecast(run, workload, point.slots_total, begin_ns)


def replay(workload: Workload) -> Forecast:
    """Simulate the campaign on the workers of the measured run."""
    begin_ns = process_time_ns()
    slots_total = sum(stay.slots for stay in workload.stays)
    run = WorkerSimulation(workload, Point(max(1, len(workload.stays)), 1), workload.stays)
    run.run()
    return _forecast(run, workload, max(1, slots_total), begin_ns)


def _forecast(
    run: PooledSimulation | WorkerSimulation, workload: Workload, slots_total: int, begin_ns: int
) -> Forecast:
    ready_ns = np.array(run.ready_ns, dtype=np.int64)
    waits_ns = np.array(run.begun_ns, dtype=np.int64) - ready_ns
    for number, wait_ns in run.lane_wait_ns.items():
        waits_ns[number] += wait_ns
    waits_ns = np.maximum(waits_ns[np.array(run.begun_ns, dtype=np.int64) >= 0], 0)
    p50, p95 = np.percentile(waits_ns, [50, 95]) if waits_ns.size else (0, 0)
    room_ns = slots_total * run.makespan_ns
    return Forecast(
        makespan_ns=run.makespan_ns,
        busy_ns=run.busy_ns,
        utilisation=min(1.0, run.busy_ns / room_ns) if room_ns else 0.0,
        wait_ns_mean=int(waits_ns.mean()) if waits_ns.size else 0,
        wait_ns_p50=int(p50),
        wait_ns_p95=int(p95),
        wait_ns_max=int(waits_ns.max()) if waits_ns.size else 0,
        done=run.done,
        failed=run.failed,
        unfinished=len(workload.names) - run.done - run.failed,
        cpu_ns=process_time_ns() - begin_ns,
    )
