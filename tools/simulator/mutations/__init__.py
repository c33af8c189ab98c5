"""Planted bugs, one sentence each. The simulator must catch every one of them."""

from simulator.mutations import core, dialects, lanes, pair, programs, recovery, workers
from simulator.mutations.registry import MUTATIONS, Mutation

__all__ = [
    "MUTATIONS",
    "Mutation",
    "core",
    "dialects",
    "lanes",
    "pair",
    "programs",
    "recovery",
    "workers",
]
