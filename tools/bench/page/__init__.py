"""The page at a million tasks: a state of that size, the time of every view, and its cost."""
