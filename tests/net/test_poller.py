"""Polling: sockets, descriptors, other threads, signals, and time."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.net.host import WAIT_MS_MAX, Poller, Signals, Waker
from taskyard.net.protocols import SystemClock
from taskyard.net.sockets import listen
from taskyard.net.zmq_socket import ZmqSocket
from tests.net.kit import PATIENCE_NS, arrived, peers


@pytest.fixture
def listener() -> Iterator[ZmqSocket]:
    with closing(listen("tcp://127.0.0.1:0")) as wire:
        yield wire


@pytest.fixture
def waker() -> Iterator[Waker]:
    with closing(Waker()) as opened:
        yield opened


def test_poller_returns_sockets_and_descriptors_that_are_ready(
    listener: ZmqSocket, waker: Waker
) -> None:
    poller = Poller()
    poller.add(waker.fileno())
    with peers(listener) as (peer, route):
        poller.add(listener)
        poller.add(peer)
        assert poller.wait(0) == []
        listener.send([route, b"x"])
        assert poller.wait(PATIENCE_NS) == [peer]
        assert poller.wait(None) == [peer]
        waker.wake()
        assert poller.wait(PATIENCE_NS) == [waker.fileno(), peer]
        assert arrived(peer) == [b"x"]
        assert poller.wait(0) == [waker.fileno()]


def test_removed_sources_are_not_polled(listener: ZmqSocket, waker: Waker) -> None:
    poller = Poller()
    poller.add(waker.fileno())
    poller.add(waker.fileno())
    poller.add(listener)
    waker.wake()
    poller.remove(waker.fileno())
    assert poller.wait(0) == []
    with pytest.raises(KeyError):
        poller.remove(waker.fileno())
    poller.remove(listener)
    with pytest.raises(KeyError):
        poller.remove(listener)


def test_poller_returns_a_pipe_whose_other_end_is_closed() -> None:
    reader, writer = os.pipe()
    poller = Poller()
    poller.add(reader)
    os.close(writer)
    assert poller.wait(PATIENCE_NS) == [reader]
    os.close(reader)


@pytest.mark.parametrize("wait_ns", [1, 900_000, 1_900_000, 20_000_000])
def test_poller_never_returns_too_early(listener: ZmqSocket, wait_ns: int) -> None:
    poller = Poller()
    poller.add(listener)
    started_ns = time.monotonic_ns()
    assert poller.wait(wait_ns) == []
    assert time.monotonic_ns() - started_ns >= wait_ns


def test_negative_wait_returns_at_once(waker: Waker) -> None:
    poller = Poller()
    poller.add(waker.fileno())
    assert poller.wait(-SECOND_NS) == []


def test_endless_wait_is_accepted(waker: Waker) -> None:
    poller = Poller()
    poller.add(waker.fileno())
    waker.wake()
    assert poller.wait(WAIT_MS_MAX * SECOND_NS**2) == [waker.fileno()]


def test_waker_wakes_from_another_thread(waker: Waker) -> None:
    poller = Poller()
    poller.add(waker.fileno())
    thread = threading.Thread(target=waker.wake)
    thread.start()
    assert poller.wait(PATIENCE_NS) == [waker.fileno()]
    thread.join()


def test_one_clear_is_enough_after_many_wakes(waker: Waker) -> None:
    poller = Poller()
    poller.add(waker.fileno())
    for _ in range(100_000):  # more than a pipe holds
        waker.wake()
    waker.clear()
    assert poller.wait(0) == []
    waker.clear()
    waker.wake()
    assert poller.wait(0) == [waker.fileno()]


def test_signals_are_read_where_the_loop_polls() -> None:
    with Signals() as signals:
        poller = Poller()
        poller.add(signals.fileno())
        assert poller.wait(0) == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert poller.wait(PATIENCE_NS) == [signals.fileno()]
        assert signals.received() == [signal.SIGTERM, signal.SIGINT]
        assert signals.received() == []
        assert poller.wait(0) == []


def test_signal_interrupts_a_wait() -> None:
    with Signals([signal.SIGUSR1]) as signals:
        poller = Poller()
        poller.add(signals.fileno())
        thread = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        thread.start()
        assert poller.wait(PATIENCE_NS) == [signals.fileno()]
        thread.join()
        assert signals.received() == [signal.SIGUSR1]


def test_signal_with_another_handler_is_not_returned() -> None:
    received_numbers: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: received_numbers.append(number))
    try:
        with Signals([signal.SIGUSR1]) as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.received() == []
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert received_numbers == [signal.SIGUSR2]


def test_old_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Signals() as signals:
        descriptor = signals.fileno()
        with Signals([signal.SIGTERM]) as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.received() == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received() == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_signals_work_in_the_main_thread_only() -> None:
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            with Signals():
                pass
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_system_clock_has_both_times() -> None:
    clock = SystemClock()
    assert clock.monotonic_ns() <= time.monotonic_ns() <= clock.monotonic_ns()
    assert abs(clock.wall_ns() - time.time_ns()) < PATIENCE_NS
