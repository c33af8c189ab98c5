"""The command line: what a user types, and the exit code that comes back.

The top layer: it may import everything, and nothing imports it. Verbs are loaded when they are
typed (`commands.py` is their table), so that `taskyard --help` stays fast however many there are.
"""

from taskyard.cli.entry import main

__all__ = ["main"]
