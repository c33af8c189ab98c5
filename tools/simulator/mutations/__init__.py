"""Planted bugs, one sentence each. The simulator must catch every bug."""

from simulator.mutations import blobs, core, dialects, lanes, pair, programs, recovery, workers
from simulator.mutations.registry import MUTATIONS, Mutation

__all__ = [
    "MUTATIONS",
    "Mutation",
    "blobs",
    "core",
    "dialects",
    "lanes",
    "pair",
    "programs",
    "recovery",
    "workers",
]
