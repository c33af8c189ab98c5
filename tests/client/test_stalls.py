"""Stalls of a client: one line for each reason, and the reason in each `TimeoutError`."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future as AnyFuture
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import taskyard
from taskyard.client import waits
from taskyard.client.futures import Future, settled_in_loop
from taskyard.client.internal import InternalClient
from taskyard.client.waits import NAMES_MAX, STALL_NS, STALL_NS_MAX, Stall, Stalls
from taskyard.core.events import Scope
from taskyard.core.limits import SECOND_NS
from taskyard.core.model import Terms
from taskyard.errors import TimedOut
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NO_WORKER = "it is ready, but no worker of its service is connected"


class Watched:
    """The watches and requests of a session, its outage, and the exchanges that it runs."""

    since: datetime | None = None

    def __init__(self) -> None:
        self.names_watched: list[bytes] = []
        self.scope: Scope | None = None
        self.lines: list[str] = []
        self.requests: list[AnyFuture[Any]] = []
        self.stalls = Stalls(self, self, self, self.run_later)  # type: ignore[arg-type]  # all of them

    def oldest(self) -> bytes | None:
        return next(iter(self.names_watched), None)

    def names(self, count_max: int) -> list[bytes]:
        assert count_max == NAMES_MAX
        return self.names_watched

    def count(self) -> int:
        return len(self.names_watched)

    def awaited_scope(self) -> Scope | None:
        return self.scope

    def report(self, line: str) -> None:
        self.lines.append(line)

    def run_later(self, _exchange: object) -> AnyFuture[Any]:
        self.requests.append(AnyFuture())
        return self.requests[-1]

    def look(self, now_ns: int) -> None:
        """Check as the session's thread does after each turn."""
        if now_ns >= self.stalls.next_ns:
            self.stalls.check(now_ns)

    def check_until(self, first_ns: int, end_ns: int) -> list[int]:
        """Check five times a second, and return the times of requests in seconds."""
        times = []
        for now_ns in range(first_ns, end_ns, SECOND_NS // 5):
            count = len(self.requests)
            self.look(now_ns)
            if len(self.requests) > count:
                times.append(now_ns // SECOND_NS)
                self.requests[-1].set_result(None)
        return times


def test_oldest_task_is_looked_up_after_two_seconds_and_then_less_often() -> None:
    watched = Watched()
    watched.names_watched = [b"a", b"b"]
    assert watched.check_until(SECOND_NS, 300 * SECOND_NS) == [3, 5, 9, 17, 33, 65, 125, 185, 245]
    assert (STALL_NS, STALL_NS_MAX) == (2 * SECOND_NS, 60 * SECOND_NS)
    watched.names_watched = [b"b"]
    assert watched.check_until(300 * SECOND_NS, 303 * SECOND_NS) == [302]


def test_tasks_that_settle_quickly_cost_no_request() -> None:
    watched = Watched()
    for number in range(100):
        watched.names_watched = [b"%d" % number]
        assert not watched.check_until(number * SECOND_NS, (number + 1) * SECOND_NS)


def test_awaited_campaign_is_looked_up_though_its_request_is_repeated() -> None:
    watched = Watched()
    found = []
    for number in range(50):
        watched.scope = Scope(campaign=b"c") if number % 3 else None
        found += watched.check_until(number * SECOND_NS // 5, (number + 1) * SECOND_NS // 5)
    assert found == [2, 4, 8]


def test_reason_is_reported_once_and_only_if_a_user_has_to_act() -> None:
    watched = Watched()
    watched.names_watched = [b"a"]
    answers = [
        Stall("a", "workers-busy", "it is ready, but all slots are in use", 0),
        Stall("a", "no-worker", "no worker", 2),
        Stall("a", "no-worker", "no worker", 1),
        Stall("a", "paused", "all is paused", 0),
    ]
    for now_ns, answer in enumerate(answers, start=1):
        watched.look(now_ns * STALL_NS_MAX)
        watched.look(now_ns * STALL_NS_MAX + STALL_NS)
        watched.requests[-1].set_result(answer)
    assert watched.lines == [
        "task a waits: no worker; 2 more tasks wait",
        "task a waits: all is paused (continue with `taskyard resume`)",
    ]


def test_open_request_is_not_repeated() -> None:
    watched = Watched()
    watched.names_watched = [b"a"]
    for now_ns in range(0, 10 * STALL_NS_MAX, SECOND_NS):
        watched.look(now_ns)
    assert len(watched.requests) == 1
    watched.stalls.request_why("b")
    watched.stalls.request_why("b")
    assert len(watched.requests) == 2
    assert not watched.stalls.known_why("b")


def test_silent_broker_is_not_asked_and_named() -> None:
    watched = Watched()
    watched.since = datetime(2026, 11, 18, tzinfo=UTC)
    watched.stalls.request_why("a")
    assert not watched.requests
    known = watched.stalls.known_why("a")
    assert known == ": the broker has not answered since 2026-11-18 00:00:00"


# With a broker.


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[str]:
    """Return the lines that clients report, without the two seconds."""
    monkeypatch.setattr(waits, "STALL_NS", 0)
    monkeypatch.setattr(waits, "STALL_NS_MAX", SECOND_NS // 10)
    return SimpleQueue()


def test_client_reports_each_reason_once(broker: Broker, lines: SimpleQueue[str]) -> None:
    with InternalClient(broker.endpoint, report=lines.put) as client:
        terms = Terms(campaign=b"once", service=b"s")
        for name in "abc":
            client.submit_encoded(name, b"", terms, watch=False).result()
        futures = client.futures(["once/a", "once/b", "once/c"])  # all at once
        line = lines.get(timeout=PATIENCE_SECONDS)
        assert line == f"task once/a waits: {NO_WORKER} (service s); 2 more tasks wait"
        client.pause("s")
        line = lines.get(timeout=PATIENCE_SECONDS)
        assert line.startswith("task once/a waits: it is ready, but its service is paused")
        client.cancel(campaign="once")
        assert all(future.cancelled() for future in taskyard.as_completed(futures))
    assert lines.empty()


@pytest.mark.parametrize("campaign", ["waited", "named"])
def test_wait_without_futures_reports_the_reason(
    campaign: str, broker: Broker, lines: SimpleQueue[str]
) -> None:
    with InternalClient(broker.endpoint, report=lines.put) as client, ThreadPoolExecutor(1) as pool:
        terms = Terms(campaign=campaign.encode(), service=b"s2")
        for name in "ab":
            client.submit_encoded(name, b"", terms, watch=False).result()
        if campaign == "waited":
            waiting: AnyFuture[Any] = pool.submit(client.wait_campaign, campaign)
        else:
            waiting = pool.submit(client.wait_names, ["named/a", "named/b"])
        line = lines.get(timeout=PATIENCE_SECONDS)
        assert line == f"task {campaign}/a waits: {NO_WORKER} (service s2); 1 more task waits"
        client.cancel(campaign=campaign)
        waiting.result(PATIENCE_SECONDS)


def test_polls_for_all_tasks_report_the_reason(broker: Broker, lines: SimpleQueue[str]) -> None:
    with InternalClient(broker.endpoint, report=lines.put) as client:
        client.submit_encoded("polled", b"", Terms(service=b"s5"), watch=False).result()
        until(lambda: client.status(awaited=Scope()) and not lines.empty(), "a line")
    assert f" waits: {NO_WORKER}" in lines.get()


#: Waits for ever, and writes its warning soon.
PROGRAM = """
import sys
from taskyard import Client
from taskyard.client import waits
waits.STALL_NS = 0
Client(sys.argv[1]).submit(lambda x: x + 1, 1, name="f").result()
"""


def test_script_gets_the_line_on_stderr(broker: Broker, tmp_path: Path) -> None:
    with Running(tmp_path, broker.endpoint, program=(sys.executable, "-c", PROGRAM)) as script:
        assert script.error_line() == (
            f"task f waits: {NO_WORKER} (service pickle); start one with --allow-pickle if you "
            "trust all who submit"
        )


def text_of(wait: Callable[[], object]) -> str:
    """Return the text of the `TimeoutError`, once the broker has answered before it."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while True:
        with pytest.raises(TimeoutError) as caught:
            wait()
        assert type(caught.value) is TimeoutError
        if NO_WORKER in str(caught.value) or time.monotonic() > ends:
            return str(caught.value)


def test_timeout_error_says_why(broker: Broker) -> None:
    with InternalClient(broker.endpoint) as client:
        future = client.submit(b"", name="late", service="s3")
        with pytest.raises(TimeoutError, match=r"^task late: not settled within 0 s$"):
            future.result(timeout=0)
        why = f"task late: not settled within 0.3 s: {NO_WORKER} (service s3)"
        for wait in (future.result, future.exception, future.bytes, future.traceback):
            assert text_of(partial(wait, timeout=0.3)) == why
        with pytest.raises(TimeoutError, match=r"within 0\.01 s: it is ready"):  # known by now
            future.result(timeout=0.01)
        both = [future, client.submit(b"", service="s3")]
        text = text_of(lambda: list(taskyard.as_completed(both, timeout=0.3)))
        assert text == f"{why}; 1 more task waits"


def test_timeout_of_waits_without_futures_says_why(broker: Broker) -> None:
    with InternalClient(broker.endpoint) as client:
        terms = Terms(campaign=b"slow", service=b"s6")
        client.submit_encoded("a", b"", terms, watch=False).result()
        why = f"not settled after 1 s: task slow/a: {NO_WORKER} (service s6)"
        with pytest.raises(TimedOut) as caught:
            client.wait_campaign("slow", 1)
        assert str(caught.value) == f"campaign slow: {why}"
        with pytest.raises(TimedOut) as caught:
            client.wait_names(["slow/a"], 1)
        assert str(caught.value) == f"1 tasks: 1 {why}"


def test_timeout_error_of_an_executor_says_why(broker: Broker) -> None:
    executor = taskyard.Executor(broker.endpoint)
    try:
        future = executor.submit(pow, 2, 3)
        assert f"not settled within 0.3 s: {NO_WORKER}" in text_of(lambda: future.result(0.3))
        assert NO_WORKER in text_of(lambda: list(executor.map(pow, [2], [3], timeout=0.3)))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def test_timeout_error_of_an_async_client_says_why(broker: Broker, lines: SimpleQueue[str]) -> None:
    async def main() -> None:
        async with taskyard.AsyncClient(broker.endpoint, report=lines.put) as client:
            future = client.submit(b"", name="later", service="s4")
            text = ""
            while NO_WORKER not in text:  # the answer was in time
                with pytest.raises(TimeoutError, match=r"^task later: not settled") as caught:
                    async for _ in taskyard.as_completed([future], timeout=0.3):
                        pass
                text = str(caught.value)
            waiting = asyncio.ensure_future(settled_in_loop(future))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await waiting
            assert cancelled.value.__notes__ == [f"task later: {NO_WORKER} (service s4)"]

    asyncio.run(main())
    assert lines.get(timeout=PATIENCE_SECONDS).startswith("task later waits: it is ready")


def test_timeout_error_of_the_task_is_raised_as_it_is() -> None:
    owner: Any = SimpleNamespace(_bridge=None)
    future: Future[None] = Future(owner, b"a", b"")
    future.set_exception(TimeoutError("mine"))
    with pytest.raises(TimeoutError, match=r"^mine$"):
        future.result(timeout=5)
    assert list(taskyard.as_completed([future], timeout=5)) == [future]


def test_executor_with_its_own_workers_reports_no_lack_of_them() -> None:
    with taskyard.Executor(slots=1) as executor:
        assert executor.submit(pow, 2, 3).result() == 8
        session = executor._core.client._session  # noqa: SLF001
        assert session.stalls.known_reasons == {"no-worker"}
