"""A line to the broker for one verb: found by its flags, within the time that a user waits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskyard.client.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.cli.options import Talk
    from taskyard.core.events import Scope

#: The first answer has to be there within 5 s of the start of the command, which takes a while too.
FIRST_ANSWER_SECONDS: Final = 4.5


class Look(Protocol):
    """What can be asked without changing anything: a client does it, and more."""

    def status(self) -> dict[str, Any]: ...

    def workers(self) -> list[dict[str, Any]]: ...

    def show(self, name: str) -> dict[str, Any]: ...

    def explain(self, name: str) -> dict[str, Any]: ...

    def tasks(self, scope: Scope | None = None, match: str = "") -> Iterator[dict[str, Any]]: ...

    def result_bytes(self, name: str) -> bytes: ...

    def output(self, name: str) -> bytes: ...


def connected(talk: Talk) -> Client:
    """A client of the broker that is meant. Raises `NoBroker`."""
    return Client(talk.broker, state=talk.state, timeout=FIRST_ANSWER_SECONDS)


@contextmanager
def looking(talk: Talk) -> Iterator[Look]:
    """The same, for verbs that only look."""
    with connected(talk) as client:
        yield client
