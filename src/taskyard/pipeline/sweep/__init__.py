"""Forecasts of a campaign on other workers: the broker's own scheduler in simulated time.

Owns the model (`workload`), four simulations, the grid of points, and the conclusions. `simulation`
pools workers for independent tasks, and chooses. `lane_runs` leases whole lanes. `compact` has a
copy of the scheduler's rules for other lanes and for graphs. `per_worker` handles everything else.
Plain Python without Spark, so that it runs in any executor. `jobs/sweep.py` distributes it.
"""
