"""A line to the broker, for modules that a shell imports to complete what is typed.

The client takes a while to import: it is, when a verb runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from taskyard.cli.connection import ReadOnlyClient
    from taskyard.cli.options import CliContext
    from taskyard.client.client import Client


def connect_client(cli_context: CliContext) -> Client:
    """A client of the broker that is meant. Raises `NoBroker`."""
    from taskyard.cli import connection  # noqa: PLC0415  # see above

    return connection.connect_client(cli_context)


def connect_read_only(cli_context: CliContext) -> AbstractContextManager[ReadOnlyClient]:
    """The same, for verbs that only look: they need no broker where one has left its state."""
    from taskyard.cli import connection  # noqa: PLC0415

    return connection.connect_read_only(cli_context)
