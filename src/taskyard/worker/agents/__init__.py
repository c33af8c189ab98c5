"""Transport agents: programs of the hungry dialect that a worker starts, feeds and restarts."""
