"""A stand-in for dwork's `dquery addfile` with a real broker: no sound line is lost.

Like the original it has a REQ socket, splits names at commas, sends 16 tasks per message, and
ignores the replies. It encodes its bytes by hand.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

import zmq

from tests.kit import processes
from tests.kit.processes import run_here

if TYPE_CHECKING:
    from pathlib import Path

#: Tasks per message, as in the original.
BLOCK = 16

LISTEN = ("--listen", "dwork=tcp://127.0.0.1:*")


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def task(name: str, *before: str) -> bytes:
    """Encode a TaskMsg: name, origin, pred."""
    named = [field(4, field(1, one.encode())) for one in before]
    return field(1, name.encode()) + field(2, b"host") + b"".join(named)


def add_file(endpoint: str, lines: list[str]) -> list[str]:
    """Send lines as `dquery addfile` does. Return the replies, which the original ignores."""
    answers: list[str] = []
    rows = [[word for word in line.split(",") if word] for line in lines]
    tasks = [task(*row) for row in rows if row]
    with zmq.Context() as context, closing(context.socket(zmq.REQ)) as hub:
        hub.linger, hub.rcvtimeo = 0, processes.PATIENCE_SECONDS * 1000
        hub.connect(endpoint)
        for start in range(0, len(tasks), BLOCK):
            block = tasks[start : start + BLOCK]
            hub.send(b"\x08\x00" + b"".join(field(2, one) for one in block))
            answers.append(hub.recv().hex())
    return answers


def status(directory: Path) -> dict[str, object]:
    code, out, err = run_here(directory, "status", "--json")
    assert code == 0, err
    document: dict[str, object] = json.loads(out)
    return document


def names_in(directory: Path) -> list[str]:
    _, out, _ = run_here(directory, "list", "--all", "--json")
    return [one["name"] for one in json.loads(out)["tasks"]]


def test_nine_lines_with_a_duplicate_make_eight_tasks(tmp_path: Path) -> None:
    lines = ["a", "b,a", "c,a", "d,b,c", "e", "f,e", "g,f", "b,e", "h,g"]
    with processes.Broker(tmp_path, *LISTEN) as broker:
        assert add_file(broker.endpoints[1], lines) == ["0806"]
        assert names_in(tmp_path) == ["a", "b", "c", "d", "e", "f", "g", "h"]
        _, out, _ = run_here(tmp_path, "show", "b", "--json")
        assert json.loads(out)["task"]["after"] == ["a", "e"]
        assert status(tmp_path)["refused"] == 0


def test_block_with_a_cycle_loses_only_the_cycle_and_logs_it(
    tmp_path: Path,
) -> None:
    lines = [f"task-{number}" for number in range(40)]
    lines[20:22] = ["p,q", "q,p"]
    lines[30] = "behind,q"
    sound = [line for line in lines if "," not in line]
    with processes.Broker(tmp_path, *LISTEN, stderr=subprocess.PIPE) as broker:
        assert add_file(broker.endpoints[1], lines) == ["0806", "0808", "0806"]
        assert names_in(tmp_path) == sound
        document = status(tmp_path)
        assert document["refused"] == 3
        assert document["refused_last"] == {
            "code": "cycle",
            "names": ["p", "q", "behind"],
            "text": "task p would wait for itself",
        }
        _, out, _ = run_here(tmp_path, "status")
        line = "3 tasks of plain dwork peers refused since the broker started, latest: p, q, "
        assert f"{line}behind (task p would wait for itself)" in out
        assert "tasks of plain dwork peers refused: 3 new, 3 since the start" in (
            broker.error_line()
        )
