"""Taskyard: a durable broker for campaigns of tasks.

Holds the version and imports nothing, so that `import taskyard` costs nothing.
"""

__version__ = "0.1.0.dev0"
