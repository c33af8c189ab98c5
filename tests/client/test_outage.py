"""A broker that does not answer is reported, waited for, and given up when the time is over."""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import Future as AnyFuture
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from taskyard import AsyncClient, NoBroker
from taskyard.client.internal import InternalClient
from taskyard.client.session import Session
from taskyard.client.waits import REPEAT_NS, REPORT_NS, Outage
from taskyard.core.limits import SECOND_NS
from taskyard.net.channel import Channel
from tests.kit.processes import PATIENCE_SECONDS, Broker, until

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A second after an outage has to be reported, a client without a report is mute.
MUTE_SECONDS = REPORT_NS / SECOND_NS + 1


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for tests that stop it and let it go on."""
    with Broker(tmp_path_factory.mktemp("outage")) as shared:
        yield shared


@contextmanager
def stopped(broker: Broker) -> Iterator[None]:
    """Stop a broker, as a machine that swaps or a disk that hangs does, until the `with` ends."""
    broker.send(signal.SIGSTOP)
    try:
        until(lambda: _process_state(broker.pid) == "T", "the broker is stopped")
        yield
    finally:
        broker.send(signal.SIGCONT)


def _process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


# Reports.


def test_outage_is_reported_after_a_second_and_every_minute_and_when_it_ends() -> None:
    lines: list[str] = []
    outage = Outage("tcp://there:1", None, lines.append)
    began_ns = int(datetime(2026, 11, 15, 22, 30, 7).astimezone().timestamp()) * SECOND_NS
    for silent_ns in (0, REPORT_NS - 1, REPORT_NS, 2 * REPORT_NS, REPORT_NS + REPEAT_NS, 0, 0):
        outage.update(silent_ns, began_ns + (silent_ns or 62 * SECOND_NS))
    assert lines == [
        "broker at tcp://there:1: no answer since 2026-11-15 22:30:07; waiting",
        "broker at tcp://there:1: no answer since 2026-11-15 22:30:07 (61 s); waiting",
        "broker at tcp://there:1: answers again, after 62.0 s",
    ]
    assert outage.since is None


def test_report_names_the_limit() -> None:
    lines: list[str] = []
    Outage("tcp://there:1", 30 * SECOND_NS, lines.append).update(REPORT_NS, SECOND_NS)
    assert lines[0].endswith("; waiting, giving up after 30 s")


def test_report_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("tcp://there:1", None, int)  # the line is no number
    outage.update(REPORT_NS, SECOND_NS)
    assert outage.since is not None
    assert "could not be delivered" in caplog.text


def check_outage_is_reported(broker: Broker, seconds: float) -> None:
    """Stop a broker under a client that waits for an answer. Fails if the client is mute."""
    lines: SimpleQueue[str] = SimpleQueue()
    with (
        InternalClient(broker.endpoint, report=lines.put) as client,
        ThreadPoolExecutor(1) as pool,
        stopped(broker),
    ):
        asked = datetime.now().astimezone()
        answer = pool.submit(client.status)
        try:
            first = lines.get(timeout=seconds)
        except Empty:
            raise AssertionError("the client is mute") from None
        assert f"broker at {broker.endpoint}: no answer since " in first
        assert client.unanswered_since is not None
        assert abs(client.unanswered_since - asked) < timedelta(seconds=1)
        broker.send(signal.SIGCONT)
        assert "answers again" in lines.get(timeout=PATIENCE_SECONDS)
        assert answer.result(PATIENCE_SECONDS)["counts"]
        assert client._session.outage.since is None  # noqa: SLF001


def test_stopped_broker_is_reported_and_waited_for(broker: Broker) -> None:
    check_outage_is_reported(broker, PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        pytest.param(Outage, "update", lambda *_: None, id="no_report"),
        pytest.param(Channel, "unanswered_ns", lambda _: 0, id="silence_not_measured"),
        pytest.param(Session, "_check_timeout", lambda _: None, id="answers_not_checked"),
    ],
)
def test_planted_mute_client_is_caught(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="the client is mute"):
        check_outage_is_reported(broker, MUTE_SECONDS)


def test_outage_is_logged_as_a_warning_by_default(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    with InternalClient(broker.endpoint) as client, ThreadPoolExecutor(1) as pool:
        with stopped(broker):
            answer = pool.submit(client.status)
            until(lambda: client.unanswered_since, "the outage is noticed")
        answer.result(PATIENCE_SECONDS)
        until(lambda: "answers again" in caplog.text)
    logged = [(one.name, one.levelno) for one in caplog.records]
    assert logged == [("taskyard.client", logging.WARNING)] * 2


# The end of waiting.


def test_futures_and_questions_raise_when_the_time_is_over_and_the_client_goes_on(
    broker: Broker,
) -> None:
    with InternalClient(broker.endpoint, timeout=1.2) as client:
        future = client.submit(["true"], service="unserved")
        client.status()
        with stopped(broker):
            with pytest.raises(NoBroker, match=r"no answer for 1.2 s \(since "):
                client.status()
            assert isinstance(future.exception(PATIENCE_SECONDS), NoBroker)
            with pytest.raises(NoBroker):  # it waits again, and not for less
                client.status()
        assert client.show(future.name)["state"] == "ready"


def test_asynchronous_client_raises_when_the_time_is_over(broker: Broker) -> None:
    async def ask() -> None:
        lines: list[str] = []
        async with AsyncClient(broker.endpoint, timeout=1.2, report=lines.append) as client:
            with stopped(broker), pytest.raises(NoBroker):
                await client.status()
            assert [line.partition(": ")[2][:9] for line in lines] == ["no answer"]
            assert client._session.outage.since is None  # noqa: SLF001
            assert await client.status()

    asyncio.run(ask())


def test_killed_broker_is_waited_for_without_a_limit_and_futures_are_settled(
    tmp_path: Path,
) -> None:
    lines: SimpleQueue[str] = SimpleQueue()
    with Broker(tmp_path) as first, InternalClient(first.endpoint, report=lines.put) as client:
        future = client.submit(["true"], service="unserved")
        client.status()
        first.kill()
        assert "no answer since" in lines.get(timeout=PATIENCE_SECONDS)
        assert not future.done()
        with Broker(tmp_path):
            assert "answers again" in lines.get(timeout=PATIENCE_SECONDS)
            client.cancel([future.name])
            with pytest.raises(CancelledError):
                future.result(PATIENCE_SECONDS)


# Callbacks.


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_callback_that_raises_an_exit_does_not_end_the_client(
    broker: Broker, caplog: pytest.LogCaptureFixture, raised: type[BaseException]
) -> None:
    def leave(_future: AnyFuture[Any]) -> None:
        raise raised

    with InternalClient(broker.endpoint) as client:
        one, another = (client.submit(["true"], service="unserved") for _ in range(2))
        one.add_done_callback(leave)
        assert client.cancel([one.name, another.name]) == 2
        until(lambda: one.done() and another.done())
        assert client.status()
    assert "a callback of a future raised" in caplog.text
