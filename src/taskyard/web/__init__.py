"""The page: a web server beside the broker, with a view of all tasks that it keeps itself.

`event_feed` reads the state directory, `view` holds what the pages show, `app` serves them. The
broker never waits for a page. It is asked only for its counters, details of a task, and actions.
"""
