"""A worker's settings: its name, its services and how much it does at once.

Checks names here, so that a user sees the error before a broker refuses the worker.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.limits import NAME_BYTES_MAX, SECOND_NS
from taskyard.core.model import WorkerFacts
from taskyard.errors import UnusableKey, UserError
from taskyard.wire.roles import AuthenticatedPeer, Role, may_act_as, with_article

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.core.resources import Resources
    from taskyard.net.keys import PeerKey

#: An interval of heartbeats that the broker sets.
AUTO: Final = 0

#: Characters of a rejected name in an error.
_SHOWN: Final = 40


class WorkerSettings(Struct, frozen=True):
    """Name, services and limits of one worker."""

    name: bytes
    services: tuple[bytes, ...]
    slots: int
    #: Distinguishes this process from an earlier process with the same name.
    incarnation: int
    #: The interval of its heartbeats. AUTO: the broker sets it.
    heartbeat_ns: int = AUTO
    #: After this time without a heartbeat the broker reassigns its tasks.
    lease_timeout_ns: int = 15 * SECOND_NS
    #: Host and process id, shown to users.
    host: bytes = b""
    pid: int = 0
    #: The supervisor saw all processes of this name end, from this incarnation on. 0: none.
    replaces: int = 0
    #: Named resources beside the slots, in total.
    resources: Resources = ()
    #: It submits its tasks to another broker.
    forwards: bool = False
    #: That broker, shown to users.
    forwards_to: bytes = b""

    def facts(self) -> WorkerFacts:
        """Return the facts that the broker gets."""
        return WorkerFacts(
            services=self.services,
            slots_total=self.slots,
            lease_timeout_ns=self.lease_timeout_ns,
            incarnation=self.incarnation,
            host=self.host,
            pid=self.pid,
            heartbeat_ns=self.heartbeat_ns,
            resources=self.resources,
            forwards=self.forwards,
            forwards_to=self.forwards_to,
        )


def default_name() -> bytes:
    """Return the name of a worker without `--name`: host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}".encode()


def name_for_key(key: PeerKey | None, name: str | None) -> str | None:
    """Return the name under which a key lets this worker run; None: the default name.

    Raises `UserError` if the key is for another role or another name.
    """
    check_workers_key(key)
    if key is None or not AuthenticatedPeer(key.name, key.roles).is_bound:
        return name
    if name is None:
        return f"{key.name}/{default_name().decode()}"
    if not may_act_as(key.name, name.encode(errors="surrogateescape")):
        raise UnusableKey(
            f"key {key.name}: only for workers named {key.name} or {key.name}/…, not "
            f"{name[:_SHOWN]!r} (change or omit --name)"
        )
    return name


def check_workers_key(key: PeerKey | None) -> None:
    """Raise `UserError` if a key is not for workers."""
    if key is not None and not {Role.WORKER, Role.ADMIN}.intersection(key.roles):
        raise UnusableKey(
            f"key {key.name}: is {with_article(key.roles[0])}'s key, not a worker's (make one with "
            "`taskyard keys new NAME --role worker`)"
        )


def worker_settings(
    slots: int,
    services: Sequence[str],
    name: str | None = None,
    resources: Resources = (),
    **more: int,
) -> WorkerSettings:
    """Return the settings of this process. Raises `UserError` for a name of a wrong length."""
    return WorkerSettings(
        name=_encode_name("name", name) if name is not None else default_name(),
        services=tuple(_encode_name("service", service) for service in services),
        slots=slots,
        host=socket.gethostname().encode(errors="replace")[:NAME_BYTES_MAX],
        pid=os.getpid(),
        incarnation=more.pop("incarnation", 0) or 1 + secrets.randbits(61),
        resources=resources,
        forwards=bool(more.pop("forwards", 0)),
        forwards_to=b"",  # the caller sets it
        **more,
    )


def _encode_name(kind: str, given: str) -> bytes:
    encoded = given.encode(errors="surrogateescape")
    if not 0 < len(encoded) <= NAME_BYTES_MAX:
        raise UserError(
            f"worker {kind} {given[:_SHOWN]!r}: must have 1 to {NAME_BYTES_MAX} bytes, has "
            f"{len(encoded)}"
        )
    return encoded
