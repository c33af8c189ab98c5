"""`taskyard top`: counters, lanes, workers, tasks and output in a terminal.

Needs the extra `tui`. Uses the ordinary client, so it works wherever a command does. `app` has the
keys, the timer and an open task, `screens` the tables and all formats.
"""
