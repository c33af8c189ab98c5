"""The checkers: compare messages with the journal, and both with the promises."""

from simulator.checkers.checker import Checker
from simulator.models import Violation

__all__ = ["Checker", "Violation"]
