"""The round-robin programs as processes: the published example session from start to end."""

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
from tests.wire.round_robin.test_streams import THREE_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.wire.round_robin.test_sockets import Bare

ROOT = Path(__file__).parents[2]


class Program:
    """One of the three programs, at the other end of a pipe or a terminal."""

    def __init__(self, directory: Path, who: str, *options: str, in_terminal: bool = False) -> None:
        self._prompt = f"{who}> "
        self._text = ""
        #: The position up to which the output was read.
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
        """Return the output up to a match of the pattern."""
        ends = time.monotonic() + PATIENCE_SECONDS
        while (found := re.compile(pattern).search(self._text, self._read)) is None:
            assert time.monotonic() < ends, self._text
            if not self._take():
                raise AssertionError(f"it ended without printing {pattern}: {self._text}")
        output = self._text[self._read : found.end()]
        self._read = found.end()
        return output

    def answer_to(self, line: str) -> str:
        """Return the output for a command, up to the next prompt."""
        self.types(line)
        self.until(f"{re.escape(line)}(?=\n)")
        # Between them the server may print a message, and the prompt again.
        total = rf"(?m)^({self._prompt})?\d+ workers?$"
        listed = self.until(total).replace(self._prompt, "") if line == "workers" else ""
        return listed + self.until(f"(?m)^{self._prompt}")

    def _take(self) -> bool:
        if not select.select([self._output], [], [], 1)[0]:
            return True
        try:
            part = os.read(self._output, 65_536)
        except OSError:  # the other end of the terminal was closed
            return False
        self._text += part.decode().replace("\r\n", "\n")
        return bool(part)

    def quit(self) -> str:
        """Return the output after the last command. Check that it exits with 0."""
        self.types("quit")
        return self.ends()

    def ends(self) -> str:
        while self._take():
            pass
        assert self.process.wait(PATIENCE_SECONDS) == 0, self._text
        return self._text[self._read :]

    @property
    def output(self) -> str:
        return self._text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self._output)


class Session:
    """A connected server, worker and client."""

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
    assert "worker is registered with 10 slots" in worker.answer_to("register")
    assert "10 of 10 slots free\n1 worker\n" in server.answer_to("workers")
    assert f"pingt: answered by {session.endpoint}:worker-" in client.answer_to("pingt")
    worker.until(f"worker got PING from {session.endpoint}:client-")
    assert worker.answer_to("bulk").count(" is registered with 10 slots") == 9
    listed = server.answer_to("workers")
    assert listed.count("10 of 10 slots free") == 10
    assert "\n10 workers\n" in listed
    pinged = client.answer_to("bulkping 100")
    assert [f"bulkping: {ten}0 of 100" in pinged for ten in range(1, 11)] == [True] * 10
    assert "bulkping: 100 sent, 100 succeeded" in pinged
    assert "bulkdata: 100 sent, 100 succeeded" in client.answer_to("bulkdata 100")
    ended = worker.answer_to("endbulk")
    # Ten workers shared 200 messages.
    assert re.findall(r"child-\d passed (\d+) messages", ended) == ["20"] * 9
    assert "9 child workers have ended" in ended
    assert "\n1 worker\n" in server.answer_to("workers")
    assert "worker is deregistered" in worker.answer_to("deregister")
    assert "\n0 workers\n" in server.answer_to("workers")
    worker.quit()
    server.quit()
    client.quit()


#: Lines of the server about messages, and repeated prompts.
MESSAGE = re.compile(r"$|server> ?$|.* from tcp:|(de)?registered |message passed|response passed")


def as_on_the_page(text: str, endpoint: str) -> list[tuple[str, list[str]]]:
    """Return commands with their sorted output, without parts that differ between runs."""
    text = text.replace(endpoint, "tcp://127.0.0.1:6714")
    text = re.sub(r"-\d+-[0-9a-f]{4,8}(?=\s)", "-N", text)
    parts = re.split(r"(?m)^(\w+> .+)$", text)[1:]
    output = [
        sorted(line for line in one.splitlines() if not MESSAGE.match(line)) for one in parts[1::2]
    ]
    return list(zip(parts[::2], output, strict=True))


def test_transcript_on_the_page_matches_the_programs(session: Session) -> None:
    programs = {"server": session.server, "worker": session.worker, "client": session.client}
    page = (ROOT / "docs" / "dialects" / "round-robin.md").read_text()
    (transcript,) = re.findall(r"```text\n(.+?)```", page, re.DOTALL)
    happened = ""
    for command, _ in as_on_the_page(transcript, session.endpoint):
        who, line = command.split("> ")
        output = "" if line == "quit" else programs[who].answer_to(line).removesuffix(f"{who}> ")
        happened += f"{command}\n{output.strip()}\n"
        if line == "quit":
            programs[who].quit()
        if line == "pingt":
            session.worker.until("worker got PING .+\n")
    assert as_on_the_page(happened, session.endpoint) == as_on_the_page(transcript, "tcp://-")


def test_ping_that_wants_no_answer_and_one_stream(session: Session) -> None:
    session.worker.answer_to("register")
    assert "PING sent, no answer expected" in session.client.answer_to("ping")
    session.worker.until("worker got PING")
    assert "data: answered by" in session.client.answer_to("data")
    session.worker.until("worker got STREAM")


def test_server_prints_messages_in_the_order_of_the_example(session: Session) -> None:
    session.worker.answer_to("register")
    session.client.answer_to("pingt")
    session.server.until("response passed back")
    session.worker.answer_to("deregister")
    session.server.until("deregistered")
    printed = re.findall(r"(?m)^(registered|PING|message|response|deregistered) ", output(session))
    assert printed == ["registered", "PING", "message", "response", "deregistered"]


def output(session: Session) -> str:
    return session.server.output.replace("server> ", "")


def response_to(client: Bare, number: bytes, *message: bytes) -> list[bytes]:
    """Return the arguments of the RESPONSE to a message, and the addresses at the bottom."""
    client.send(*message)
    frames = client.next(b"\x06")
    assert frames[3] == number
    return frames[4:]


def test_worker_runs_the_programs_of_installed_commands(session: Session, tmp_path: Path) -> None:
    options = ["--command", "count=wc -c", "--command", "fail=sh -c 'echo no >&2; exit 3'"]
    options += ["--command", "wait=sleep 60", "--slots", "3", "--endpoint", session.endpoint]
    with Program(tmp_path, "worker", *options) as worker, bare(session.endpoint) as client:
        worker.until("worker> ")
        assert "worker is registered with 3 slots" in worker.answer_to("register")
        client.send(*lmq(4, b"0", b"wait"))
        worker.until("worker got wait")
        (counted, *_) = response_to(client, b"1", *lmq(4, b"1", b"count", b"seven  "))
        assert counted.strip() == b"7"
        (failed, *_) = response_to(client, b"2", *lmq(4, b"2", b"fail", b""))
        assert failed.startswith(b"ERROR ")
        assert b"3" in failed
        (unknown, *_) = response_to(client, b"3", *lmq(4, b"3", b"other"))
        assert unknown.endswith(b"PING and STREAM, and count, fail, wait")
        until(lambda: "2 of 3 slots free" in session.server.answer_to("workers"))
        assert "worker has stopped 1 program\n" in worker.answer_to("deregister")
        worker.quit()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("count", "expected NAME=PROGRAM"),
        ("=wc", "expected NAME=PROGRAM"),
        ("count=", "expected NAME=PROGRAM"),
        ("count='wc", "No closing quotation"),
        ("mqs_more=wc", "is a key of the protocol"),
        ("count=no-such-program-here", "no program 'no-such-program-here'"),
    ],
)
def test_bad_command_is_refused(tmp_path: Path, command: str, problem: str) -> None:
    code, _, error = run(tmp_path, "rr", "worker", "--command", command)
    assert code == 2
    assert problem in error


def test_long_stream_goes_through_the_server(session: Session) -> None:
    session.worker.answer_to("register")
    with bare(session.endpoint) as client:
        (data, *_) = response_to(client, b"1", *lmq(4, b"1", b"\x0a", b"STREAM_ID", b"20000"))
        assert data[:3] == b"2R\x08"
        assert len(data) == 11 + 20_000 + 8 * 20
    until(lambda: "10 of 10 slots free" in session.server.answer_to("workers"))


def test_client_reads_the_stream_of_an_original_worker(session: Session) -> None:
    with bare(session.endpoint) as worker:
        registered(worker)
        session.client.types("data")
        message = worker.next(b"\x04")
        assert message[4:7] == [b"\x0a", b"STREAM_ID", b"1024"]
        worker.send(message[-2], *lmq(6, message[3], THREE_BLOCKS))
        session.client.until("data: answered by")


@pytest.mark.parametrize("session", ["pipe", "terminal"], indirect=True)
def test_unknown_commands_are_answered(session: Session) -> None:
    assert "unknown command 'dance'" in session.worker.answer_to("dance")
    assert "not registered" in session.worker.answer_to("deregister")
    assert "no child workers" in session.worker.answer_to("endbulk")
    assert "bulkping: expected a number" in session.client.answer_to("bulkping")
    assert "bulkping: expected a number" in session.client.answer_to("bulkping -1")
    assert session.server.answer_to("") == "\nserver> "


def test_worker_that_quits_leaves_the_table(session: Session) -> None:
    session.worker.answer_to("register")
    session.worker.answer_to("bulk")
    session.worker.quit()
    assert "\n0 workers\n" in session.server.answer_to("workers")


def test_worker_survives_its_server_and_works_for_the_next(
    session: Session, tmp_path: Path
) -> None:
    session.worker.answer_to("register")
    session.server.quit()
    with Program(tmp_path, "server", "--endpoint", session.endpoint) as server:
        server.until("server> ")
        assert "\n1 worker\n" in server.answer_to("workers")
        session.client.types("pingt")
        assert session.client.until("pingt: answered by")


def test_restarted_server_resends_messages_and_accepts_earlier_answers(
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
        worker.send(client.identity, *lmq(6, b"1", b"x"))  # its slot is still in use
        registered(late, b"1")
        expected = [b"", LMQ, b"\x04", b"2", b"key", b"", b"2", b"", client.identity, late.server]
        assert late.next(b"\x04") == expected
        counts = json.loads(run(tmp_path, "status", "--json")[1])["counts"]
        assert (counts["done"], counts["leased"]) == (1, 1)


@pytest.mark.parametrize("ending", ["signal", "end of input"])
def test_signal_and_the_end_of_input_are_quit(tmp_path: Path, ending: str) -> None:
    with ExitStack() as stack:
        session = Session(tmp_path, stack, in_terminal=False)
        session.worker.answer_to("register")
        for program in (session.worker, session.client, session.server):
            if ending == "signal":
                program.process.send_signal(signal.SIGTERM)
            else:
                assert program.process.stdin is not None
                program.process.stdin.close()
            program.ends()
            if program is session.worker:
                assert "\n0 workers\n" in session.server.answer_to("workers")


def test_commands_of_a_file_are_carried_out_in_order(tmp_path: Path) -> None:
    with ExitStack() as stack:
        session = Session(tmp_path, stack, in_terminal=False)
        session.worker.answer_to("register")
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
            "client> ",
        ]


def test_second_server_on_a_state_is_refused(tmp_path: Path) -> None:
    with Program(tmp_path, "server", "--endpoint", "tcp://127.0.0.1:0") as server:
        server.until("server> ")
        code, _, error = run(tmp_path, "rr", "server", "--endpoint", "tcp://127.0.0.1:0")
        assert code == 2
        assert "in use" in error or "locked" in error
        server.quit()


def test_server_beyond_this_machine_needs_a_key(tmp_path: Path) -> None:
    for who in ("server", "worker", "client"):
        code, _, error = run(tmp_path, "rr", who, "--endpoint", "tcp://192.0.2.1:6714")
        assert code == 2
        assert ("requires keys" if who == "server" else "needs a key (give --key FILE") in error
