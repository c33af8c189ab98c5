"""The part that both clients of several brokers share: a member for each broker, and the routes.

Waits for nothing, so it is the same for threads and for `asyncio`. The operations are in `fan_out`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from taskyard.client import discovery, fan_out
from taskyard.client.client import TIMEOUT_SECONDS
from taskyard.client.routes import Routes
from taskyard.errors import NoBroker

if TYPE_CHECKING:
    from pathlib import Path

    from taskyard.client.environment import Variables
    from taskyard.client.routes import Fan
    from taskyard.client.session import Session

logger = logging.getLogger("taskyard.client")


class AnyMember(Protocol):
    """The client of one of several brokers, blocking or not."""

    _session: Session

    @property
    def place(self) -> str:
        """Where the broker is."""

    @property
    def unanswered_since(self) -> datetime | None: ...

    def _repr_html_(self) -> str: ...


#: In a request for all brokers, one without an answer for this long is left out as soon as another
#: has answered. A busy broker answers sooner.
SILENT_SECONDS: Final = 2.0


def silence_of(session: Session) -> NoBroker | None:
    """Return the error for a broker that has not answered for long. None: it may answer soon."""
    since = session.outage.since
    seconds = 0.0 if since is None else (datetime.now(UTC) - since).total_seconds()
    if since is None or seconds < SILENT_SECONDS:
        return None
    return NoBroker(f"broker at {session.endpoint}: no answer for {seconds:.0f} s")


_M = TypeVar("_M", bound=AnyMember)
_Class = TypeVar("_Class", bound="type[MemberSet[Any]]")

#: Makes the member with a number, an endpoint and a key. Options are those of `Client`.
MakeMember = Callable[..., _M]


class MemberSet(Generic[_M]):
    """The members of a set of brokers, by number."""

    routes: Routes
    _members: list[_M]
    _location: discovery.BrokerLocation | None

    def _open_members(  # noqa: PLR0913  # those of `Client`
        self,
        make: MakeMember[_M],
        broker: discovery.Brokers = None,
        *,
        state: str | Path | None = None,
        key: discovery.KeyFiles = None,
        timeout: float | None = None,
        connect_timeout: float = TIMEOUT_SECONDS,
        report: Callable[[str], object] | None = None,
        env: Variables = None,
    ) -> None:
        """Find the brokers, and make a member for each. Raise UserError."""
        location = self._location or discovery.find(broker, state)
        endpoints = location.endpoints()
        keys = discovery.keys_for(endpoints, discovery.key_files(key))
        self.timeout = connect_timeout if timeout is None else timeout
        self.routes = Routes(endpoints, report or logger.warning)
        options = {"timeout": timeout, "connect_timeout": connect_timeout}
        self._members = [
            make(number, endpoint, found, **options, report=report, env=env)
            for number, (endpoint, found) in enumerate(zip(endpoints, keys, strict=True))
        ]

    @property
    def broker(self) -> str:
        """The endpoints of the brokers, separated by commas."""
        return ",".join(self.routes.endpoints)

    @property
    def place(self) -> str:
        """The places of the brokers, separated by commas. Those not connected are left out."""
        return ",".join(member.place for member in self._members if member.place)

    @property
    def unanswered_since(self) -> datetime | None:
        """Time of the oldest last answer, if it is over a second ago. None while all answer."""
        times = [member.unanswered_since for member in self._members]
        return min((one for one in times if one is not None), default=None)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook, a box for each broker. Never raises."""
        return "".join(member._repr_html_() for member in self._members)  # its parts

    def _unanswered(self, fan: Fan) -> list[int]:
        """Return the brokers of a fan that have not answered yet. They are probed first."""
        return [one for one in fan if not self._members[one]._session.has_answered]  # noqa: SLF001  # its parts


def routed_methods(
    routed: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[_Class], _Class]:
    """Return a class decorator that replaces methods of a client by those over several brokers.

    The class derives from a client, which declares the signatures and the docstrings.
    """

    def decorate(cls: _Class) -> _Class:
        for name, operation in fan_out.OPERATIONS.items():
            setattr(cls, name, routed(operation))
        return cls

    return decorate
