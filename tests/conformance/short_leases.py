"""`taskyard` with short leases, so that tests of their expiry are quick."""

import sys
from collections.abc import Callable
from typing import Any

from taskyard.cli.entry import main
from taskyard.core.limits import SECOND_NS
from taskyard.wire.ping_pong import server as ping_pong
from taskyard.wire.round_robin import server as round_robin
from taskyard.wire.wmp import server as wmp

#: The lease of workers without a setting.
SILENCE_NS = 3 * SECOND_NS // 2

PING_PONG = ping_pong.Settings(expire_ns=SILENCE_NS, lease_ns=2 * SILENCE_NS)
ROUND_ROBIN = round_robin.Settings(heartbeat_ns=SILENCE_NS // 5, expire_ns=SILENCE_NS)


def shorten() -> None:
    """Pass shorter leases to the constructors of the dialects. No setting does it."""
    for module, more in (
        (ping_pong, {"settings": PING_PONG}),
        (wmp, {"lease_timeout_ns": SILENCE_NS}),
        (round_robin, {"settings": ROUND_ROBIN}),
    ):
        module.make_server = _with(module.make_server, more)  # type: ignore[attr-defined]


def _with(build: Callable[..., Any], more: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args, **named: build(*args, **{**named, **more})


if __name__ == "__main__":
    shorten()
    main(sys.argv[1:])
