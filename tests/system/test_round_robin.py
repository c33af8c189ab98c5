"""The round-robin programs as processes: the published example session, from top to bottom."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from tests.kit.processes import PATIENCE_SECONDS, TASKYARD, environment, run, until
from tests.system.kit import Broker
from tests.wire.round_robin.kit import LMQ, lmq
from tests.wire.round_robin.test_sockets import bare, registered

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).parents[2]


class Program:
    """One of the three, at the other end of a pipe or a terminal."""

    def __init__(self, directory: Path, who: str, *options: str, in_terminal: bool = False) -> None:
        self._prompt = f"{who}> "
        self._said = ""
        #: Where what is said is taken to be read.
        self._read = 0
        if in_terminal:
            self._output, inside = pty.openpty()
            self._input = self._output
        else:
            self._output, inside = os.pipe()
        command = [*TASKYARD, "rr", who, *options]
        stdin = inside if in_terminal else subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=inside, stderr=inside, env=environment(), cwd=directory
        )
        os.close(inside)
        if self.process.stdin is not None:
            self._input = self.process.stdin.fileno()

    def types(self, line: str) -> None:
        os.write(self._input, line.encode() + b"\n")

    def until(self, pattern: str) -> str:
        """What it says up to this."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while (found := re.compile(pattern).search(self._said, self._read)) is None:
            assert time.monotonic() < ends, self._said
            if not self._take():
                raise AssertionError(f"it ended and never said {pattern}: {self._said}")
        said = self._said[self._read : found.end()]
        self._read = found.end()
        return said

    def does(self, line: str) -> str:
        """What it says to a command, up to the next prompt."""
        self.types(line)
        self.until(f"{re.escape(line)}(?=\n)")
        return self.until(f"(?m)^{self._prompt}")

    def _take(self) -> bool:
        if not select.select([self._output], [], [], 1)[0]:
            return True
        try:
            part = os.read(self._output, 65_536)
        except OSError:  # a terminal that nobody has open any more
            return False
        self._said += part.decode().replace("\r\n", "\n")
        return bool(part)

    def quits(self) -> str:
        """What it says to the last command; it has ended well."""
        self.types("quit")
        return self.ends()

    def ends(self) -> str:
        while self._take():
            pass
        assert self.process.wait(PATIENCE_SECONDS) == 0, self._said
        return self._said[self._read :]

    @property
    def said(self) -> str:
        return self._said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self._output)


class Session:
    """A server, a worker and a client that know each other."""

    def __init__(self, directory: Path, stack: ExitStack, *, in_terminal: bool) -> None:
        def start(who: str, *options: str) -> Program:
            program = Program(directory, who, *options, in_terminal=in_terminal)
            return stack.enter_context(program)

        self.server = start("server", "-d", "1", "--endpoint", "tcp://127.0.0.1:0")
        listening = self.server.until("listening round-robin .+\n")
        self.endpoint = listening.split()[-1]
        self.server.until("server> ")
        self.worker = start("worker", "-d", "5", "--endpoint", self.endpoint)
        self.worker.until("worker> ")
        self.client = start("client", "-d", "1", "--endpoint", self.endpoint)
        self.client.until("client> ")


@pytest.fixture
def session(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with ExitStack() as stack:
        how = getattr(request, "param", "pipe")
        yield Session(tmp_path, stack, in_terminal=how == "terminal")


@pytest.mark.parametrize("session", ["pipe", "terminal"], indirect=True)
def test_example_session_runs_from_top_to_bottom(session: Session) -> None:
    server, worker, client = session.server, session.worker, session.client
    assert "worker is registered with 10 slots" in worker.does("register")
    assert "10 of 10 slots free\n1 worker\n" in server.does("workers")
    assert f"pingt is answered by {session.endpoint}:worker-" in client.does("pingt")
    worker.until(f"worker got PING from {session.endpoint}:client-")
    assert worker.does("bulk").count(" is registered with 10 slots") == 9
    listed = server.does("workers")
    assert listed.count("10 of 10 slots free") == 10
    assert "\n10 workers\n" in listed
    pinged = client.does("bulkping 100")
    assert [f"bulkping: {ten}0 of 100" in pinged for ten in range(1, 11)] == [True] * 10
    assert "bulkping: 100 sent, 100 succeeded" in pinged
    assert "bulkdata: 100 sent, 100 succeeded" in client.does("bulkdata 100")
    ended = worker.does("endbulk")
    # Ten workers took turns at 200 messages.
    assert re.findall(r"child-\d passed (\d+) messages", ended) == ["20"] * 9
    assert "9 child workers have ended" in ended
    assert "\n1 worker\n" in server.does("workers")
    assert "worker is deregistered" in worker.does("deregister")
    assert "\n0 workers\n" in server.does("workers")
    worker.quits()
    server.quits()
    client.quits()


def as_on_the_page(text: str, endpoint: str) -> list[tuple[str, list[str]]]:
    """Commands with what is said to them, in any order, without what differs from run to run."""
    text = text.replace(endpoint, "tcp://127.0.0.1:6714")
    text = re.sub(r"-\d+-[0-9a-f]{4,8}(?=\s)", "-N", text)
    parts = re.split(r"(?m)^(\w+> .+)$", text)[1:]
    said = [sorted(one.strip("\n").splitlines()) for one in parts[1::2]]
    return list(zip(parts[::2], said, strict=True))


def test_transcript_of_the_page_is_what_is_said(session: Session) -> None:
    programs = {"server": session.server, "worker": session.worker, "client": session.client}
    page = (ROOT / "docs" / "dialects" / "round-robin.md").read_text()
    (transcript,) = re.findall(r"```text\n(.+?)```", page, re.DOTALL)
    happened = ""
    for command, _ in as_on_the_page(transcript, session.endpoint):
        who, line = command.split("> ")
        said = "" if line == "quit" else programs[who].does(line).removesuffix(f"{who}> ")
        happened += f"{command}\n{said.strip()}\n"
        if line == "quit":
            programs[who].quits()
        if line == "pingt":
            session.worker.until("worker got PING .+\n")
    assert as_on_the_page(happened, session.endpoint) == as_on_the_page(transcript, "tcp://-")


def test_ping_that_wants_no_answer_and_one_stream(session: Session) -> None:
    session.worker.does("register")
    assert "PING is sent, and no answer wanted" in session.client.does("ping")
    session.worker.until("worker got PING")
    assert "data is answered by" in session.client.does("data")
    session.worker.until("worker got STREAM")


@pytest.mark.parametrize("session", ["pipe", "terminal"], indirect=True)
def test_words_that_are_no_commands_are_answered(session: Session) -> None:
    assert "unknown command 'dance'" in session.worker.does("dance")
    assert "the worker is not registered" in session.worker.does("deregister")
    assert "there are no child workers" in session.worker.does("endbulk")
    assert "bulkping takes a number" in session.client.does("bulkping")
    assert "bulkping takes a number" in session.client.does("bulkping -1")
    assert session.server.does("") == "\nserver> "


def test_worker_that_quits_leaves_the_table(session: Session) -> None:
    session.worker.does("register")
    session.worker.does("bulk")
    session.worker.quits()
    assert "\n0 workers\n" in session.server.does("workers")


def test_worker_outlives_a_server_and_works_for_the_next_one(
    session: Session, tmp_path: Path
) -> None:
    session.worker.does("register")
    session.server.quits()
    with Program(tmp_path, "server", "--endpoint", session.endpoint) as server:
        server.until("server> ")
        assert "\n1 worker\n" in server.does("workers")
        session.client.types("pingt")
        assert session.client.until("pingt is answered by")


def test_killed_server_hands_out_the_very_message_and_takes_the_answers_of_before(
    tmp_path: Path,
) -> None:
    listen = "--listen", "round-robin=tcp://127.0.0.1:0"
    with ExitStack() as stack:
        first = stack.enter_context(Broker(tmp_path, *listen))
        endpoint = first.endpoints[1]
        worker, client, late = (stack.enter_context(bare(endpoint)) for _ in range(3))
        registered(worker, b"1")
        for number in (b"1", b"2"):
            client.send(*lmq(4, number, b"key", b"", number))
        assert worker.next(b"\x04")[3] == b"1"
        until(lambda: json.loads(run(tmp_path, "status", "--json")[1])["counts"]["ready"] == 1)
        first.kill()
        listen = "--listen", f"round-robin={endpoint}"
        stack.enter_context(Broker(tmp_path, *listen))
        assert worker.next(b"\x01")
        worker.send(client.identity, *lmq(6, b"1", b"x"))  # its slot is still taken
        registered(late, b"1")
        expected = [b"", LMQ, b"\x04", b"2", b"key", b"", b"2", b"", client.identity, late.server]
        assert late.next(b"\x04") == expected
        counts = json.loads(run(tmp_path, "status", "--json")[1])["counts"]
        assert (counts["done"], counts["leased"]) == (1, 1)


@pytest.mark.parametrize("ending", ["signal", "end of input"])
def test_signal_and_the_end_of_input_are_quit(tmp_path: Path, ending: str) -> None:
    with ExitStack() as stack:
        session = Session(tmp_path, stack, in_terminal=False)
        session.worker.does("register")
        for program in (session.worker, session.client, session.server):
            if ending == "signal":
                program.process.send_signal(signal.SIGTERM)
            else:
                assert program.process.stdin is not None
                program.process.stdin.close()
            program.ends()
            if program is session.worker:
                assert "\n0 workers\n" in session.server.does("workers")


def test_commands_of_a_file_are_carried_out_in_order(tmp_path: Path) -> None:
    with ExitStack() as stack:
        session = Session(tmp_path, stack, in_terminal=False)
        session.worker.does("register")
        done = subprocess.run(
            [*TASKYARD, "rr", "client", "-d", "0", "--endpoint", session.endpoint],
            input="pingt\nbulkping 20\nbulkdata 20",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            check=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.stdout.splitlines() == [
            "client> pingt",
            "client> bulkping 20",
            "bulkping: 20 sent, 20 succeeded",
            "client> bulkdata 20",
            "bulkdata: 20 sent, 20 succeeded",
        ]


def test_second_server_on_a_state_is_refused(tmp_path: Path) -> None:
    with Program(tmp_path, "server", "--endpoint", "tcp://127.0.0.1:0") as server:
        server.until("server> ")
        code, _, error = run(tmp_path, "rr", "server", "--endpoint", "tcp://127.0.0.1:0")
        assert code == 2
        assert "in use" in error or "locked" in error
        server.quits()


def test_server_beyond_this_machine_is_refused(tmp_path: Path) -> None:
    for who in ("server", "worker", "client"):
        code, _, error = run(tmp_path, "rr", who, "--endpoint", "tcp://192.0.2.1:6714")
        assert code == 2
        assert "beyond this machine" in error
