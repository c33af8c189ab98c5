"""The command line: commands, options, output and exit codes.

The top layer. It may import every package, and no package imports it. A command is imported when it
runs (`commands.py` is the table), so `taskyard --help` stays fast.
"""

from taskyard.cli.entry import main

__all__ = ["main"]
