"""Forecasts of a campaign on other workers: the broker's own scheduler in simulated time.

Owns the model (`workload`), three simulations (`simulation` pools workers and is fast, `lane_runs`
is as fast for lanes, `per_worker` handles everything that depends on single workers), the grid of
points, and the conclusions. Plain Python without Spark, so that it runs in any executor.
`jobs/sweep.py` distributes it.
"""
