"""Commands that lose their broker: they warn, resume when it is back, and respect timeouts."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click
import pytest

from taskyard.cli import entry, wait
from taskyard.cli.commands import COMMANDS
from taskyard.cli.entry import taskyard
from taskyard.client.internal import InternalClient
from taskyard.client.waits import ReplyTimeouts
from taskyard.core.limits import SECOND_NS
from taskyard.errors import ExitCode
from tests.kit.processes import PATIENCE_SECONDS, Broker, Running, run_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

#: Commands that wait for tasks that no worker runs here.
WAITING: tuple[Sequence[str], ...] = (
    ("wait", "x"),
    ("wait", "--campaign", "c"),
    ("wait",),
    ("submit", "--wait", "--", "true"),
    ("map", "--lines", "LINES", "--", "echo", "{}"),
    ("watch",),
    ("watch", "--until-settled", "--campaign", "c"),
)

#: Commands that send a request and exit with its reply.
ASKING: tuple[Sequence[str], ...] = (
    *(("status",), ("list",), ("workers",), ("lanes",), ("services",)),
    *(("show", "x"), ("results", "x"), ("why", "x"), ("log", "x")),
    *(("cancel", "x"), ("retry", "x"), ("pause", "--all"), ("submit", "--", "true")),
)


#: Long enough for a busy machine to warn, after 1 s, before the timeout.
LIMIT = "4s"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """Run a broker with a task that no worker runs."""
    (tmp_path / "lines").write_text("1\n")
    with Broker(tmp_path) as running:
        words = ("--campaign", "c", "--name", "x", "--", "true")
        assert run_here(tmp_path, "submit", *words)[0] == ExitCode.OK
        yield running


class Verbs:
    """Runs commands in threads of this process."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor) -> None:
        self._directory = directory
        self._pool = pool

    def start(self, *words: str) -> Any:
        """Start a command. Return the future of its exit code."""
        given = [str(self._directory / "lines") if word == "LINES" else word for word in words]
        state = ("--state", str(self._directory / ".taskyard"))
        return self._pool.submit(entry.run, taskyard, [given[0], *state, *given[1:]])


@pytest.fixture
def verbs(tmp_path: Path) -> Iterator[Verbs]:
    with ThreadPoolExecutor(len(ASKING)) as pool:
        yield Verbs(tmp_path, pool)


def test_every_verb_that_waits_reports_a_killed_broker_and_exits_3(
    broker: Broker,
    verbs: Verbs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answered = threading.Semaphore(0)

    class AnsweredClient(InternalClient):
        """Counts first replies."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            answered.release()

    def limits_of(timeout: float, _first_answer: float, **_named: bool) -> ReplyTimeouts:
        """Return limits with a first timeout that suits a busy machine."""
        return ReplyTimeouts(PATIENCE_SECONDS * SECOND_NS, int(timeout * SECOND_NS))

    monkeypatch.setattr("taskyard.client.internal.InternalClient", AnsweredClient)
    monkeypatch.setattr(ReplyTimeouts, "of", limits_of)
    limit = ("--broker-timeout", LIMIT)
    codes = [verbs.start(words[0], *limit, *words[1:]) for words in WAITING]
    for _ in WAITING:
        assert answered.acquire(timeout=PATIENCE_SECONDS)
    broker.kill()
    assert [code.result(PATIENCE_SECONDS) for code in codes] == [ExitCode.NO_BROKER] * len(WAITING)
    out, err = capsys.readouterr()
    # `watch` may print tasks that `submit` and `map` submitted before the kill.
    assert all("  submitted  " in line for line in out.splitlines()), out
    assert err.count(": no answer for 4 s (since ") == len(WAITING)
    # On a busy machine the running broker may have been silent for a moment too.
    earlier = err.count(" answers again")
    assert err.count(": no answer since ") == len(WAITING) + earlier
    assert err.count("; waiting, giving up after 4 s\n") == len(WAITING) + earlier


@pytest.mark.parametrize("words", [(), ("--campaign", "c"), ("x",)])
def test_wait_with_a_timeout_ends_though_the_broker_is_gone(
    broker: Broker, verbs: Verbs, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    begun, sound = threading.Event(), wait.wait_for

    def wait_for(*given: Any) -> bool:
        begun.set()
        return sound(*given)

    monkeypatch.setattr(wait, "wait_for", wait_for)
    code = verbs.start("wait", "--timeout", "2s", *words)
    assert begun.wait(PATIENCE_SECONDS)
    broker.kill()
    assert code.result(PATIENCE_SECONDS) == ExitCode.TIMED_OUT


def test_connected_command_reports_a_killed_broker_and_resumes_when_it_is_back(
    tmp_path: Path, broker: Broker
) -> None:
    with Running(tmp_path, "watch", "--since", "0") as watch:
        assert watch.line().endswith(" c/x")
        broker.kill()
        assert "no answer since" in watch.error_line()
        with Broker(tmp_path):
            assert "answers again" in watch.error_line()
            assert run_here(tmp_path, "cancel", "x")[0] == ExitCode.OK
            assert "cancelled" in watch.line()


def test_every_verb_that_asks_reports_a_stopped_broker_and_exits_3(
    broker: Broker, verbs: Verbs, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ("--quiet", "--broker-timeout", LIMIT)
    broker.send(signal.SIGSTOP)
    try:
        codes = [verbs.start(words[0], *limit, *words[1:]) for words in ASKING]
        ended = [code.result(PATIENCE_SECONDS) for code in codes]
    finally:
        broker.send(signal.SIGCONT)
    assert ended == [ExitCode.NO_BROKER] * len(ASKING)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count(": no answer since ") == len(ASKING)


def test_every_verb_accepts_the_option() -> None:
    context = click.Context(taskyard)
    for name, one_command in COMMANDS.items():
        params = [] if name == "rr" else one_command.load().get_params(context)
        options = {option for one in params for option in one.opts}
        assert name == "rr" or options >= {"--broker-timeout", "--json", "--state"}, name
