"""`python -m taskyard.cli` is `taskyard`: how one command starts another of the same install."""

from taskyard.cli import main

main()
