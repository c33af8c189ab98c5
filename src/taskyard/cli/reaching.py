"""A line to the broker, for modules that a shell imports to complete what is typed.

The client takes a while to import: it is, when a verb runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from taskyard.cli.connecting import Look
    from taskyard.cli.options import Talk
    from taskyard.client.client import Client


def connected(talk: Talk) -> Client:
    """A client of the broker that is meant. Raises `NoBroker`."""
    from taskyard.cli import connecting  # noqa: PLC0415  # see above

    return connecting.connected(talk)


def looking(talk: Talk) -> AbstractContextManager[Look]:
    """The same, for verbs that only look: they need no broker where one has left its state."""
    from taskyard.cli import connecting  # noqa: PLC0415

    return connecting.looking(talk)
