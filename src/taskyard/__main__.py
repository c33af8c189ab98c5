"""Run the command line as `python -m taskyard`."""

from taskyard.cli import main

main()
