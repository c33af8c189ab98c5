"""The pages of the dialects: their dialogues in bytes happen with a real broker, byte for byte.

A block of `hex` has a message on each line: the peer, an arrow, and its frames. `+` continues a
frame, `…` is the rest of one. Text after two spaces, and lines with `#`, are comments.
"""

from __future__ import annotations

import re
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import pytest
import zmq

from taskyard.client.client import Client
from taskyard.wire.hungry import IDLE_LINE, Comment, Hungry, Report, decode, task_line
from tests.kit.processes import PATIENCE_SECONDS, Running
from tests.system.kit import Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = {path.stem: path.read_text() for path in (ROOT / "docs/dialects").glob("*.md")}
ANYWHERE: Final = "tcp://127.0.0.1:0"
RECEIVE_MS_MAX: Final = 20_000

#: The endpoint in the page of round-robin, where endpoints are addresses.
ENDPOINT: Final = b"tcp://127.0.0.1:6714"


class Message(NamedTuple):
    """A message of a dialogue. The last characters of a varying frame are `…`."""

    peer: str
    is_sent: bool
    frames: list[str]


def block(page: str, language: str, heading: str) -> str:
    """Return the first block of a language below a heading."""
    found = re.search(
        rf"```{language}\n(.*?)^```", page.partition(heading)[2], re.MULTILINE | re.DOTALL
    )
    assert found, f"no {language} below {heading}"
    return found[1]


def dialogue(text: str) -> list[Message]:
    """Parse a dialogue of messages."""
    messages: list[Message] = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        start = re.match(r"(\w*) ?([→←]) |  (?=\S)", line)
        assert start, line
        if start[2]:
            messages.append(Message(start[1], start[2] == "→", []))
        for frame in line[start.end() :].split("  ")[0].split(" "):
            frames = messages[-1].frames
            if frame.startswith("+"):
                frames[-1] += frame[1:]
            else:
                frames.append("" if frame == '""' else frame)
    return messages


def fits(frame: bytes, expected: str) -> bool:
    known = bytes.fromhex(expected.removesuffix("…"))
    return frame.startswith(known) if expected.endswith("…") else frame == known


class Sockets:
    """The sockets of the peers of a dialogue, by name."""

    def __init__(self, stack: ExitStack) -> None:
        self._context = stack.enter_context(zmq.Context())
        self._stack = stack
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def open(self, peer: str, kind: int, endpoint: str, identity: bytes = b"") -> None:
        opened = self._stack.enter_context(self._context.socket(kind))
        opened.linger = 0
        if identity:
            opened.identity = identity
            opened.setsockopt(zmq.CONNECT_ROUTING_ID, endpoint.encode())
        opened.connect(endpoint)
        self._sockets[peer] = opened

    def exchange(self, message: Message) -> None:
        """Send a message, or receive it and compare its frames."""
        peer = self._sockets[message.peer]
        if message.is_sent:
            peer.send_multipart([bytes.fromhex(frame) for frame in message.frames])
            return
        assert peer.poll(RECEIVE_MS_MAX), message
        frames = peer.recv_multipart()
        assert len(frames) == len(message.frames), (frames, message)
        assert all(map(fits, frames, message.frames)), (frames, message)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def start(stack: ExitStack, directory: Path, listen: str) -> Broker:
    return stack.enter_context(Broker(directory, "--listen", listen))


def replay(sockets: Sockets, messages: list[Message], count: int) -> None:
    assert len(messages) == count
    for message in messages:
        sockets.exchange(message)


def test_dialogue_of_ping_pong(stack: ExitStack, tmp_path: Path) -> None:
    broker = start(stack, tmp_path, f"ping-pong={ANYWHERE},{ANYWHERE}")
    backend, frontend = broker.endpoints[1].split(",")
    sockets = Sockets(stack)
    sockets.open("worker", zmq.DEALER, backend)
    sockets.open("client", zmq.DEALER, frontend)
    replay(sockets, dialogue(block(PAGES["ping-pong"], "hex", "## A dialogue in bytes")), 17)


def connect(stack: ExitStack, endpoint: str) -> tuple[socket.socket, BinaryIO]:
    """Connect to a TCP endpoint. Return the socket, and a file to read from it."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    peer = stack.enter_context(socket.create_connection((host, int(port)), RECEIVE_MS_MAX / 1000))
    return peer, stack.enter_context(peer.makefile("rb"))


def test_dialogue_of_ping_pong_on_tcp(stack: ExitStack, tmp_path: Path) -> None:
    broker = start(stack, tmp_path, f"ping-pong={ANYWHERE},{ANYWHERE}")
    peer, replies = connect(stack, broker.endpoints[1].split(",")[0])
    text = block(PAGES["ping-pong"], "tcp", "## Without a ZeroMQ library")
    messages = re.findall(r"^([→←]) (.*?)(?=^[→←]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(messages) == 8
    for arrow, body in messages:
        expected = "".join(body.split())
        if arrow == "→":
            peer.sendall(bytes.fromhex(expected))
        elif expected == "04…":
            assert read_command(replies).startswith(b"\x05READY")
        else:
            known = bytes.fromhex(expected)
            assert replies.read(len(known)) == known


def read_command(replies: BinaryIO) -> bytes:
    """Read a short command of ZMTP."""
    flags, length = replies.read(2)
    assert flags == 4
    return replies.read(length)


def test_first_message_of_round_robin_on_tcp(stack: ExitStack, tmp_path: Path) -> None:
    peer, replies = connect(stack, start(stack, tmp_path, f"round-robin={ANYWHERE}").endpoints[1])
    sent = re.search(r"the first message is `([0-9a-f ]+)`", " ".join(PAGES["round-robin"].split()))
    assert sent
    greeting = block(PAGES["ping-pong"], "tcp", "## Without a ZeroMQ library").split("→")[1]
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\x01p"
    peer.sendall(bytes.fromhex(greeting) + bytes([4, len(ready)]) + ready)
    replies.read(64)
    read_command(replies)
    peer.sendall(bytes.fromhex(sent[1]))
    pong = sent[1].replace("010101", "010102")
    assert replies.read(len(bytes.fromhex(pong))) == bytes.fromhex(pong)


def test_dialogue_of_round_robin(stack: ExitStack, tmp_path: Path) -> None:
    endpoint = start(stack, tmp_path, f"round-robin={ANYWHERE}").endpoints[1]
    sockets = Sockets(stack)
    addresses = {"srv": "", "cli": ":client-1", "wrk": ":worker-1"}
    for name, suffix in addresses.items():
        address = ENDPOINT + suffix.encode()
        assert f"| `{name}` | `{address.hex()}` | {address.decode()} |" in PAGES["round-robin"]
    for peer in ("worker", "client"):
        sockets.open(peer, zmq.ROUTER, endpoint, f"{endpoint}:{peer}-1".encode())
    text = block(PAGES["round-robin"], "hex", "## A dialogue in bytes")
    for name, suffix in addresses.items():
        text = re.sub(rf"\b{name}\b", (endpoint + suffix).encode().hex(), text)
    replay(sockets, dialogue(text), 19)


def test_dialogue_of_wmp(stack: ExitStack, tmp_path: Path) -> None:
    broker = start(stack, tmp_path, f"wmp={ANYWHERE}")
    sockets = Sockets(stack)
    sockets.open("worker", zmq.DEALER, broker.endpoints[1])
    before, mark, after = block(PAGES["wmp"], "hex", "## A dialogue in bytes").partition("# a task")
    assert mark
    replay(sockets, dialogue(before), 1)
    client = stack.enter_context(Client(broker.endpoint))
    future = client.submit(b"shout", name="a")
    replay(sockets, dialogue(mark + after), 7)
    assert future.result(PATIENCE_SECONDS) == b"SHOUT"


def test_dialogue_of_dwork(stack: ExitStack, tmp_path: Path) -> None:
    endpoint = start(stack, tmp_path, f"dwork={ANYWHERE}").endpoints[1]
    sockets = Sockets(stack)
    for peer in ("client", "worker"):
        sockets.open(peer, zmq.DEALER, endpoint)
    replay(sockets, dialogue(block(PAGES["dwork"], "hex", "### A dialogue in bytes")), 30)


def test_lines_of_hungry() -> None:
    text = block(PAGES["hungry"], "hex", "## A dialogue")
    lines = [bytes.fromhex(line) for line in re.findall(r"^[→←] (\w+)", text, re.MULTILINE)]
    asked, task, comment, report, again, idle, end = lines
    assert decode(asked) == decode(again) == Hungry()
    assert task == task_line(b"fetch-7", 1, b"", b"a\tb")
    assert isinstance(decode(comment), Comment)
    reported = decode(report)
    assert isinstance(reported, Report)
    assert (reported.key, reported.detail) == ((b"fetch-7", 1), b"100312")
    assert (idle, end) == (IDLE_LINE, b"\n")


@pytest.mark.parametrize(
    ("page", "language", "file"),
    [
        ("ping-pong", "python", "examples/ping_pong_worker.py"),
        ("hungry", "sh", "examples/agents/count.sh"),
    ],
)
def test_minimal_peer_of_a_page_is_the_example(page: str, language: str, file: str) -> None:
    assert block(PAGES[page], language, "## A minimal") == (ROOT / file).read_text()


@pytest.mark.parametrize("page", ["ping-pong", "round-robin"])
def test_minimal_client_of_a_page_prints_the_result(
    page: str, stack: ExitStack, tmp_path: Path
) -> None:
    listen = ",".join([ANYWHERE] * (2 if page == "ping-pong" else 1))
    backend, *more = start(stack, tmp_path, f"{page}={listen}").endpoints[1].split(",")
    for role in ("worker", "client"):
        (tmp_path / f"{role}.py").write_text(block(PAGES[page], "python", f"## A minimal {role}"))
    python = (sys.executable, "-I")
    stack.enter_context(Running(tmp_path, "worker.py", backend, program=python, stderr=None))
    client = Running(tmp_path, "client.py", *more or [backend], "shout", program=python)
    assert stack.enter_context(client).end() == (0, "SHOUT\n", "")


def test_minimal_client_of_dwork_creates_tasks_for_the_minimal_worker(
    stack: ExitStack, tmp_path: Path
) -> None:
    broker = start(stack, tmp_path, f"dwork={ANYWHERE}")

    def output_of(role: str, *names: str) -> tuple[int, str, str]:
        text = block(PAGES["dwork"], "python", f"### A minimal {role}")
        (tmp_path / f"{role}.py").write_text(text)
        options = (broker.endpoints[1], *names)
        program = Running(tmp_path, f"{role}.py", *options, program=(sys.executable, "-I"))
        return stack.enter_context(program).end()

    assert output_of("client", "b", "a", "c") == (0, "b\na\nc\n", "")
    futures = stack.enter_context(Client(broker.endpoint)).futures(["b", "a", "c"])
    assert [future.state for future in futures] == ["ready", "blocked", "blocked"]
    assert output_of("worker") == (0, "b\na\nc\n", "")


def test_pages_describe_key_files_alike() -> None:
    pages = [PAGES[name] for name in ("dwork", "ping-pong", "round-robin", "wmp")]
    parts = [" ".join(page.partition("# Keys\n")[2].split()) for page in pages]
    common = {part.partition("when its key is valid.")[0] for part in parts}
    assert len(common) == 1
    assert "the field `broker`" in common.pop()
