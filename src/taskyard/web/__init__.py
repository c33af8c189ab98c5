"""The page: a web server beside the broker, with a view of all tasks that it keeps itself.

`follower` reads the state directory, `view` holds what the pages show, `server` serves them. The
broker never waits for a page. It is asked only for its counters, details of a task, and actions.
"""
