"""Run `taskyard` as `python -m taskyard.cli`. Commands start child processes this way."""

from taskyard.cli import main

main()
