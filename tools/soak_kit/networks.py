"""Networks of this machine alone: namespaces of the kernel, and links between them that can be cut.

Three networks in a row: `client` and `compute` reach each other through `relay`, which forwards. A
link that is cut loses all packets, as if its cable were pulled: no side gets an error. Needs root
and `ip`. Everything is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

CLIENT: Final = "client"
RELAY: Final = "relay"
COMPUTE: Final = "compute"

#: Each link: its two ends with their addresses.
LINKS: Final = {
    "client-relay": ((CLIENT, "10.77.1.2"), (RELAY, "10.77.1.1")),
    "relay-compute": ((RELAY, "10.77.2.1"), (COMPUTE, "10.77.2.2")),
}

#: The addresses that peers connect to.
ADDRESSES: Final = {CLIENT: "10.77.1.2", RELAY: "10.77.1.1", COMPUTE: "10.77.2.2"}

#: The address of `relay` on the side of `compute`.
RELAY_BELOW: Final = "10.77.2.1"


def why_unavailable() -> str:
    """Return why namespaces can't be made here. Empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no `ip` program (apt-get install iproute2)"
    name = f"taskyard-probe-{os.getpid()}"
    words = ["ip", "netns", "add", name]
    made = subprocess.run(words, capture_output=True, check=False)
    _ip("netns", "del", name, check=False)
    return "" if made.returncode == 0 else made.stderr.decode().strip()


def _ip(*words: str, check: bool = True) -> None:
    command = ["ip", *words]
    subprocess.run(command, check=check, capture_output=True)


class Networks:
    """The three networks, in a `with` block."""

    def __init__(self) -> None:
        self._prefix = f"ty{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            for place in ADDRESSES:
                _ip("netns", "add", self.namespace(place))
                _ip("-n", self.namespace(place), "link", "set", "lo", "up")
            for number, ends in enumerate(LINKS.values()):
                self._connect(number, *ends)
            for place in (CLIENT, COMPUTE):
                self._add_route(place)
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            subprocess.run([*self.command(RELAY), "sh", "-c", forward], check=True)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def namespace(self, place: str) -> str:
        """Return the name of a network's namespace."""
        return f"{self._prefix}-{place}"

    def command(self, place: str) -> list[str]:
        """Return the words before a command that runs in a network."""
        return ["ip", "netns", "exec", self.namespace(place)]

    def cut(self, link: str) -> None:
        """Lose all packets of a link."""
        for place, device in self._devices(link):
            _ip("-n", self.namespace(place), "link", "set", device, "down")

    def mend(self, link: str) -> None:
        """Pass packets of a link again. A device that was down has lost its routes."""
        for place, device in self._devices(link):
            _ip("-n", self.namespace(place), "link", "set", device, "up")
        for place, _ in LINKS[link]:
            if place != RELAY:
                self._add_route(place)

    def _devices(self, link: str) -> Iterator[tuple[str, str]]:
        number = [*LINKS].index(link)
        for side, (place, _) in enumerate(LINKS[link]):
            yield place, f"{self._prefix}l{number}{side}"

    def _connect(self, number: int, *ends: tuple[str, str]) -> None:
        devices = [f"{self._prefix}l{number}{side}" for side in range(2)]
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for device, (place, address) in zip(devices, ends, strict=True):
            _ip("link", "set", device, "netns", self.namespace(place))
            _ip("-n", self.namespace(place), "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", self.namespace(place), "link", "set", device, "up")

    def _add_route(self, place: str) -> None:
        gateway = ADDRESSES[RELAY] if place == CLIENT else RELAY_BELOW
        _ip("-n", self.namespace(place), "route", "replace", "default", "via", gateway)

    def _remove(self) -> None:
        for place in ADDRESSES:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.namespace(place))
