"""The processes of a takeover soak: a pair of brokers on PostgreSQL, relays, and their peers.

Taskyard's own peers have both addresses of the pair. Programs that know one address reach it
through relays. Each broker has a proxy of its own before the database. Knows nothing of tasks.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from soak_kit.fleet import (
    Fleet,
    Layout,
    Member,
    free_endpoint,
    own_worker,
    peer_member,
    taskyard_member,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

PAIR: Final = ("a", "b")

#: So that compactions happen before, during and after takeovers.
COMPACT_AFTER_ROWS: Final = "2000"

#: What a broker logs that lost its lease.
_LOST: Final = b": following from now on\n"

#: More than a broker prints between its start and its end.
_LINES_BYTES_MAX: Final = 64 * 1024

#: The timeout of a plain dwork peer: longer than a takeover. A relay keeps a request meanwhile, and
#: the reply to an abandoned request is lost, with the task in it.
REPLY_SECONDS: Final = "30"

#: How long a killed broker stays down.
AWAY_SECONDS_MAX: Final = 0.5

#: Processes that are not workers.
_SPARED: Final = ("broker-", "relay-", "watch")

_LISTENERS: Final = ("dwork", "round-robin", "backend", "frontend", "wmp")


def _endpoints() -> dict[str, str]:
    return {listener: free_endpoint() for listener in _LISTENERS}


@dataclass
class PairLayout(Layout):
    """The directories and endpoints of a pair. The endpoints of `Layout` belong to relays."""

    #: The URL of the store for each broker, and for the audit.
    stores: dict[str, str] = field(default_factory=dict)
    store: str = ""
    lease: str = "1s"
    #: By broker and listener.
    places: dict[str, dict[str, str]] = field(
        default_factory=lambda: {name: _endpoints() for name in PAIR}
    )

    def pair(self, listener: str) -> str:
        """Return both addresses of a listener, as one endpoint."""
        return "+".join(self.places[name][listener] for name in PAIR)

    @property
    def native(self) -> str:
        """Both addresses of the brokers' native protocol."""
        return self.pair("dwork")

    def listen_of(self, name: str) -> list[str]:
        """Return the options for the listeners of a broker."""
        own = self.places[name]
        pairs = [f"{listener}={own[listener]}" for listener in ("dwork", "round-robin", "wmp")]
        pairs.append(f"ping-pong={own['backend']},{own['frontend']}")
        return [word for pair in pairs for word in ("--listen", pair)]


class PairFleet(Fleet):
    """All processes of the soak. `inject` disturbs the leader."""

    def __init__(self, place: PairLayout, dice: random.Random, log: Callable[[str], None]) -> None:
        super().__init__(place, dice, log, pair_members(place))
        self._losses_expected = 0
        (place.root / "taskyard.toml").write_text(
            f'[lease]\nstore = "{place.lease}"\n[blobs]\ndirectory = "files"\n'
        )

    def worker_names(self) -> list[str]:
        return [name for name in self.members if not name.startswith(_SPARED)]

    def leader(self) -> Member | None:
        """Return the broker that serves, by its own lines."""
        found = [self.members[f"broker-{name}"] for name in PAIR]
        return next((one for one in found if self._is_leading(one)), None)

    def other(self, member: Member) -> Member:
        """Return the other broker."""
        (found,) = (name for name in PAIR if member.name != f"broker-{name}")
        return self.members[f"broker-{found}"]

    def is_warm(self, member: Member) -> bool:
        """Return whether a broker follows the other broker."""
        return member.process is not None and self._lines(member)[1] > self._lines(member)[0]

    def _find_broker(self) -> int | None:
        found = self.leader()
        return None if found is None else found.pid

    def _is_leading(self, member: Member) -> bool:
        listening, following = self._lines(member)
        return member.process is not None and listening > following

    def _lines(self, member: Member) -> tuple[int, int]:
        """Return where it last printed that it listens, and that it follows, since its start."""
        with (self._place.root / "log" / f"{member.name}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINES_BYTES_MAX))
            log = file.read()
        log = log[log.rfind(b"--- start") :]
        return log.rfind(b"\nlistening "), log.rfind(b"\nstandby: following")

    def terms_lost(self) -> int:
        """Return the terms lost without a fault: a busy machine may not keep a short lease."""
        logs = [self._place.root / "log" / f"broker-{name}.log" for name in PAIR]
        return sum(log.read_bytes().count(_LOST) for log in logs) - self._losses_expected

    # Faults.

    def kill(self, member: Member) -> None:
        """Kill a broker, which comes back soon."""
        self._kill(member)
        member.start_at = time.monotonic() + self._dice.uniform(0.0, AWAY_SECONDS_MAX)

    def stop(self, member: Member) -> None:
        """Suspend a broker. It follows when it is resumed past its lease."""
        self.expect_loss()
        os.kill(_pid(member), signal.SIGSTOP)

    def resume(self, member: Member) -> None:
        """Resume a broker."""
        os.kill(_pid(member), signal.SIGCONT)

    def expect_loss(self) -> None:
        """Expect that a broker loses its lease."""
        self._losses_expected += 1


def _pid(member: Member) -> int:
    if member.pid is None:
        raise RuntimeError(f"{member.name} does not run")
    return member.pid


def pair_members(place: PairLayout) -> list[Member]:
    """Return the processes of a takeover soak."""
    native = ("--broker", place.native)
    both = f"{place.pair('backend')},{place.pair('frontend')}"
    wmp = ("--dialect", "wmp", "--broker", place.pair("wmp"))
    pong = ("--dialect", "ping-pong", "--broker", place.pair("backend"))
    return [
        *(_broker(place, name) for name in PAIR),
        _relay("dwork", place.dwork, place.pair("dwork")),
        _relay("round-robin", place.round_robin, place.pair("round-robin")),
        _relay("ping-pong", f"{place.backend},{place.frontend}", both),
        _relay("wmp", place.wmp, place.pair("wmp")),
        taskyard_member("watch", "watch", "--json", "--since", "0", *native),
        *(
            taskyard_member(name, "worker", "--name", name, "--slots", "3", *native)
            for name in ("native-1", "native-2")
        ),
        own_worker(place, *_named("native-3", "--service", "default", *native)),
        own_worker(place, *_named("hungry-1", "--service", "mail", *native), by="agent"),
        own_worker(place, "pong-1", *pong),
        own_worker(place, *_named("wmp-1", *wmp)),
        taskyard_member(
            *("rr-1", "rr", "worker", "--endpoint", place.pair("round-robin")), stdin="register\n"
        ),
        peer_member(place, "pong-2", "ping_pong_worker", place.backend),
        peer_member(place, "rr-2", "lmq_worker", place.round_robin, "beating"),
        peer_member(place, "rr-3", "lmq_worker", place.round_robin, "careful"),
        peer_member(place, "dwork-1", "dwork_worker", place.dwork, "careful", REPLY_SECONDS),
        peer_member(place, "dwork-2", "dwork_worker", place.dwork, "careless", REPLY_SECONDS),
        peer_member(place, "wmp-2", "wmp_worker", place.wmp),
    ]


def _broker(place: PairLayout, name: str) -> Member:
    store = ("--store", place.stores[name])
    state = ("--state", str(place.root / name), "--compact-after-rows", COMPACT_AFTER_ROWS)
    words = ("broker", "--standby", *store, *state, *place.listen_of(name))
    return taskyard_member(f"broker-{name}", *words)


def _relay(dialect: str, listen: str, to: str) -> Member:
    words = ("relay", "--listen", f"{dialect}={listen}", "--to", f"{dialect}={to}")
    return taskyard_member(f"relay-{dialect}", *words)


def _named(name: str, *words: str) -> tuple[str, ...]:
    return (name, "--name", name, "--slots", "2", *words)
