"""`taskyard top`: counters, lanes, workers, tasks and output in a terminal.

Needs the extra `tui`. Uses the ordinary client, so it works wherever a command does. `app` has the
keys and the timer, `panes` the screens, `actions` what changes tasks, and `text` all formats.
"""
