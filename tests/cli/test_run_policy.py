"""When runs stop early, and the notification at their end: to a real shell and a real server."""

import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from taskyard.cli.options import CliContext
from taskyard.cli.run_report import EarlyStop, RunPolicy, RunSummary, RunTimedOut, StoppedEarly
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UserError

SUMMARY = RunSummary("night", 1, 12.5, {"done": 3, "failed": 2}, "stopped: 2 tasks failed")


def test_failures_stop_a_main_thread_that_waits() -> None:
    released = threading.Event()
    with EarlyStop(RunPolicy(max_failures=2)) as early_stop:
        early_stop.count_failures(1)
        counter = threading.Timer(0.05, early_stop.count_failures, [2])
        counter.start()
        with pytest.raises(StoppedEarly, match=r"^stopped: 2 tasks failed \(--max-failures\)$"):
            released.wait(60)
        counter.join()
    early_stop.count_failures(3)  # too late


def test_timeout_stops_a_main_thread_that_reads() -> None:
    reader, writer = os.pipe()
    try:
        with (
            pytest.raises(RunTimedOut, match=r"^stopped: not settled after 0\.1 s \(--timeout\)$"),
            EarlyStop(RunPolicy(timeout_ns=SECOND_NS // 20)),
        ):
            os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


def test_run_that_ends_in_time_is_not_stopped() -> None:
    before, threads = signal.getsignal(signal.SIGUSR1), threading.enumerate()
    with EarlyStop(RunPolicy(max_failures=1, timeout_ns=60 * SECOND_NS)) as early_stop:
        early_stop.count_failures(0)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert threading.enumerate() == threads


@pytest.mark.parametrize("notify", ["", " ", "http://", "https:///path"])
def test_unusable_notification_is_refused_at_the_start(notify: str) -> None:
    values = {"max_failures": None, "timeout": None, "finish_running": False}
    with pytest.raises(UserError, match="--notify"):
        RunPolicy.of({**values, "notify": notify})


def test_command_gets_the_summary_on_stdin_and_in_its_environment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = f"echo $TASKYARD_CAMPAIGN $TASKYARD_FAILED $TASKYARD_EXIT_CODE; cat > {out}"
    RunPolicy(notify=command).announce(CliContext(), SUMMARY)
    assert capfd.readouterr() == ("", "night 2 1\n")
    assert msgspec.json.decode(out.read_bytes(), type=RunSummary) == SUMMARY


def test_failed_notification_is_reported_and_raises_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    RunPolicy(notify="exit 7").announce(CliContext(), SUMMARY)
    assert capfd.readouterr().err == "taskyard: warning: --notify exit 7: exit status 7\n"
    RunPolicy(notify="http://127.0.0.1:1/").announce(CliContext(), SUMMARY)
    assert "Connection refused" in capfd.readouterr().err


class Receiver(BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if self.path == "/good" else 500)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Receiver.bodies = []
    with HTTPServer(("127.0.0.1", 0), Receiver) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_url_gets_the_summary(server: str, capfd: pytest.CaptureFixture[str]) -> None:
    RunPolicy(notify=f"{server}/good").announce(CliContext(), SUMMARY)
    assert capfd.readouterr().err == ""
    assert msgspec.json.decode(Receiver.bodies[0], type=RunSummary) == SUMMARY
    RunPolicy(notify=f"{server}/bad").announce(CliContext(), SUMMARY)
    assert "HTTP Error 500" in capfd.readouterr().err
