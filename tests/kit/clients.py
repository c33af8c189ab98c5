"""Clients of the broker in memory, with the requests of Taskyard's own programs."""

from taskyard.client.client import Client
from taskyard.client.internal import InternalClient


def internal(client: Client) -> InternalClient:
    """Return a client of `taskyard.testing` as what it is."""
    assert isinstance(client, InternalClient)
    return client
