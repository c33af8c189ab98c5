"""Ping-pong's clients, and malformed messages at both sides."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard.core.limits import CRASHES_MAX, PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.core.records import Finished, Leased, Returned, WorkerLeft
from taskyard.core.timer_heap import NEVER_NS
from taskyard.journal.state_check import ledger_fingerprint
from taskyard.wire.dialect import PROBE
from taskyard.wire.ping_pong import server as ping_pong_backend
from taskyard.wire.ping_pong import server as ping_pong_server
from taskyard.wire.ping_pong.frames import COUNT_DIGITS_MAX, Settings
from taskyard.wire.ping_pong.server import FORGET_NS, make_server
from tests.wire.ping_pong.kit import BACKEND, FRONTEND, W1, W2, W3, Harness
from tests.wire.ping_pong.test_server import (
    DISCONNECT,
    DONE,
    ERROR,
    EXIT,
    FULL,
    PING,
    PONG,
    READY,
    at_work,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


# Clients.


def test_client_gets_its_replies_in_the_order_of_its_requests() -> None:
    harness = Harness()
    for job in (b"1", b"2", PONG, b"3"):
        assert harness.client(b"c", job) == []
    for identity in (W1, W2, W3):
        harness.worker(identity, READY)
    harness.worker(W3, b"three")
    harness.worker(W2, b"two")
    assert harness.to_client(b"c") == []
    harness.worker(W1, b"one")
    first, second, (error, _), last = harness.to_client(b"c")
    assert [first, second, error, last] == [[b"one"], [b"two"], ERROR, [b"three"]]


def test_clients_do_not_wait_for_each_other() -> None:
    harness = Harness()
    harness.client(b"c", b"1")
    harness.client(b"d", b"2")
    harness.worker(W1, READY)
    harness.worker(W2, READY)
    harness.worker(W2, b"two")
    assert harness.to_client(b"d") == [[b"two"]]


def test_client_with_too_many_open_jobs_is_refused_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ping_pong_server, "WAITING_MAX", 2)
    harness = Harness()
    for number in range(5):
        assert harness.client(b"c", b"%d" % number) == []
    assert len(harness.states()) == 2
    assert harness.client(b"d", b"other") == []
    harness.worker(W1, READY)
    harness.worker(W1, b"zero")
    assert harness.to_client(b"c") == [[b"zero"]]
    harness.worker(W1, b"one")
    assert harness.to_client(b"c") == [[b"one"], [FULL], [FULL], [FULL]]
    assert harness.client(b"c", b"again") == []


def test_queue_of_all_clients_has_a_limit() -> None:
    harness = Harness(Settings(queue_max=2))
    assert harness.client(b"c", b"1") == []
    assert harness.client(b"d", b"2") == []
    assert harness.client(b"e", b"3") == [[FULL]]
    assert harness.client(b"e", b"3") == [[FULL]]
    harness.worker(W1, READY)
    harness.worker(W1, b"one")
    assert harness.client(b"e", b"3") == []


def test_client_gets_full_when_the_broker_accepts_no_more() -> None:
    harness = Harness()
    harness.scheduler.context.accepting = False
    assert harness.client(b"c", b"job") == [[FULL]]


def test_too_long_a_job_is_refused() -> None:
    harness = Harness()
    ((error, _),) = harness.client(b"c", b"x" * (PAYLOAD_BYTES_MAX + 1))
    assert error == ERROR


def test_disconnected_client_is_forgotten_and_its_job_done_nevertheless() -> None:
    harness = at_work()
    harness.client(b"c", b"second")
    harness.dead = [FRONTEND + b"c"]
    assert harness.worker(W1, b"result") == [[b"second"]]
    harness.worker(W1, b"result")
    assert [*harness.states().values()] == [DONE, DONE]
    assert harness.sent == []
    assert harness.frontend.waiting == 0
    assert not harness.scheduler.context.watchers


def test_names_of_jobs_are_unique_to_the_process() -> None:
    names = []
    for random_bits in (1, 2):
        frontend = make_server(1, lambda random_bits=random_bits: random_bits)[1]  # type: ignore[misc]
        for _ in range(2):
            (asked,) = frontend.receive(FRONTEND, [b"", b"job"], 0)
            names += asked.submission.names  # type: ignore[attr-defined]
    assert len({*names}) == 4


# Malformed messages.

#: Messages that are invalid at either side.
NASTY: list[list[bytes]] = [
    [],
    [b""],
    [READY],
    [PING, b"1"],
    [b"x", READY],
    [b"", b"", READY],
    [b"", READY, b""],
    [b"", READY, b"1"],
    [b"", PING, b""],
    [b"", PING, b"-1"],
    [b"", PING, "\u0663".encode()],
    [b"", PING, b"1" * 21],
    [b"", PING, b"1", b"2"],
    [b"", DISCONNECT, b"now"],
    [b"", b"result", b"more"],
    [b"", ERROR, b"a", b"b"],
    [b""] * 10_000,
    [b"", b"[" * 100_000, b"[" * 100_000],
]


def test_probe_of_a_relay_is_dropped_without_a_reply() -> None:
    """After a burst of peers a relay checks whether its connections lead back to it."""
    harness = at_work()
    for route in (BACKEND + W1, FRONTEND + b"x"):
        assert harness.at(route, PROBE, b"token") == []
    assert (harness.backend.malformed, harness.frontend.malformed) == (0, 0)


@pytest.mark.parametrize("frames", NASTY, ids=range(len(NASTY)))
def test_nasty_messages_are_counted_and_change_nothing(frames: list[bytes]) -> None:
    harness = at_work()
    before = ledger_fingerprint(harness.scheduler.ledger)
    assert harness.at(BACKEND + W1, *frames) == []
    assert harness.backend.malformed == 1
    ((error, _),) = harness.at(FRONTEND + b"x", *frames)
    assert (error, harness.frontend.malformed) == (ERROR, 1)
    assert ledger_fingerprint(harness.scheduler.ledger) == before
    harness.worker(W1, b"result")
    assert harness.to_client(b"c") == [[b"result"]]


def noise(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield frames of words, parts of words and bytes, in invalid numbers."""
    random_bits = random.Random(seed)
    words = [READY, PING, PONG, EXIT, DISCONNECT, ERROR, FULL, b"", b"1", b"\0", b"ready"]
    made = 0
    while made < count:
        frames = [
            random_bits.choice(
                [random_bits.choice(words), random_bits.randbytes(random_bits.randrange(8))]
            )
            for _ in range(random_bits.randrange(6))
        ]
        if not ping_pong_backend.is_message(frames) and len(frames) != 2:
            made += 1
            yield frames


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(5))
def test_malformed_messages_change_nothing_at_either_side(seed: int) -> None:
    harness = at_work()
    harness.records()
    before = ledger_fingerprint(harness.scheduler.ledger)
    random_bits = random.Random(seed)
    for frames in noise(1_000, seed):
        identity = random_bits.choice([W1, W2, b"x" * 256, b""])
        assert harness.at(BACKEND + identity, *frames) == []
        assert [one[0] for one in harness.at(FRONTEND + identity, *frames)] == [ERROR]
    assert (harness.backend.malformed, harness.frontend.malformed) == (1_000, 1_000)
    assert harness.records() == []
    assert ledger_fingerprint(harness.scheduler.ledger) == before
    assert harness.worker(W1, b"result") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_any_dialogue_leaves_every_task_done_once_or_waiting(seed: int) -> None:
    random_bits = random.Random(seed)
    harness = Harness()
    words = [READY, PING, DISCONNECT, b"result", b"result", ERROR]
    for number in range(400):
        identity = random_bits.choice([W1, W2, W3, b"named"])
        word = random_bits.choice(words)
        harness.worker(identity, *([word, b"why"] if word is ERROR else [word]))
        if random_bits.random() < 0.2:
            harness.client(b"c", b"%d" % number)
        if random_bits.random() < 0.3:
            harness.later(random_bits.choice([0.01, 1, 3, 61]))
        if random_bits.random() < 0.05:
            harness.handle(harness.board.disconnected(BACKEND + identity))
    finished = [
        name for one in harness.records() if isinstance(one, Finished) for name in one.names
    ]
    assert len(finished) > 20
    assert len({*finished}) == len(finished)


def test_kept_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ping_pong_backend, "PEERS_MAX", 2)
    harness = Harness()
    assert harness.worker(W1, READY) == [[PONG]]
    assert harness.worker(W2, PING) == [[PONG]]
    assert harness.worker(W3, READY) == []
    harness.later(3)  # a silent one on probation makes room
    assert harness.worker(W3, READY) == [[PONG]]


def test_connection_that_is_silent_for_long_is_forgotten() -> None:
    harness = at_work()
    harness.worker(W2, READY)
    harness.worker(W3, PING)
    harness.later(60)
    harness.later(FORGET_NS / SECOND_NS)
    assert len(harness.backend.peers) == 0
    assert harness.backend.timers.heap[0][0] == NEVER_NS


def test_record_of_a_lost_route_is_a_return_without_a_charge() -> None:
    harness = Harness()
    harness.worker(W1, READY)
    harness.dead = [BACKEND + W1]
    harness.records()
    harness.client(b"c", b"job")
    kinds = [type(one) for one in harness.records()]
    assert kinds[1:] == [Leased, Returned, WorkerLeft]


def test_docs_have_the_figures_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "dialects" / "ping-pong.md").read_text()
    settings = Settings()
    for figure in (
        f"| WORKER_EXPIRE_SECONDS | {settings.expire_ns // SECOND_NS} s |",
        f"| lease time | {settings.lease_ns // SECOND_NS} s |",
        f"At most {ping_pong_server.WAITING_MAX:,} jobs of one client and {settings.queue_max:,}",
        f"within {ping_pong_backend.CROSSING_NS / SECOND_NS} s of the job",
        f"any bytes, at most {PAYLOAD_BYTES_MAX >> 20} MiB",
        f"decimal number of at most {COUNT_DIGITS_MAX} digits",
    ):
        assert figure in " ".join(page.split())
    assert CRASHES_MAX == 5  # "five workers"


def test_name_of_a_worker_does_not_reveal_its_id_with_a_secret() -> None:
    route = BACKEND + b"\0\1\2\3\4"
    assert ping_pong_backend.name_of(route).endswith(b"-0001020304")
    hidden = ping_pong_backend.name_of(route, b"secret")
    assert b"01020304" not in hidden
    assert hidden != ping_pong_backend.name_of(route, b"other")
