"""What a campaign would take on other workers: the broker's own scheduler in simulated time.

Owns the model (`workload`), the two ways to simulate it (`crew` for speed, `workers` for whatever
depends on who does a task), the grid of points and what is said of them. Everything here is plain
Python without Spark, so that it runs in any executor; `jobs/sweep.py` spreads it.
"""
