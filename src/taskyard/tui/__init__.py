"""`taskyard top`: counters, lanes, workers, tasks and output in a terminal.

Needs the extra `tui`. Uses the ordinary client, so it works wherever a command does. `app` has the
keys and the timer, `screens` the tables, `output` an open task, and `text` all formats.
"""
