"""Blobs in PostgreSQL while the leader of a pair is replaced."""

from __future__ import annotations

import shutil
import signal
import socket
from typing import TYPE_CHECKING

import psycopg
import pytest

from taskyard.client.client import Client
from tests.kit.processes import PATIENCE_SECONDS, Running, Worker, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.postgres import Cluster

#: Prints a part, waits for a file, and prints the rest: more than the journal keeps.
PROGRAM = "seq 20000; while [ ! -e go ]; do sleep 0.05; done; seq 20001 40000"


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def start(directory: Path, url: str, port: int) -> Running:
    """Start a broker of a pair on a machine of its own."""
    directory.mkdir()
    (directory / "taskyard.toml").write_text('[lease]\nstore = "1s"\n')
    options = ("--standby", "--store", url, "--listen", f"dwork=tcp://127.0.0.1:{port}")
    return Running(directory, "broker", "--until-eof", *options)


def output_bytes(url: str) -> int:
    with psycopg.connect(url) as connection:
        query = "SELECT coalesce(sum(bytes), 0)::bigint FROM taskyard.blobs WHERE kind = 'stream'"
        return int(connection.execute(query).fetchall()[0][0])


def test_output_of_a_running_task_survives_its_broker(tmp_path: Path, url: str) -> None:
    ports = [free_port(), free_port()]
    place = "+".join(f"tcp://127.0.0.1:{port}" for port in ports)
    work = tmp_path / "work"
    work.mkdir()
    with start(tmp_path / "first", url, ports[0]) as first:
        assert first.line().startswith("listening ")
        with (
            start(tmp_path / "second", url, ports[1]) as second,
            Worker(work, "--broker", place, "--allow-pickle"),
            Client(place) as client,
        ):
            assert second.line().startswith("standby: following ")
            content = bytes(range(256)) * 8192
            value = client.submit(bytes, content, name="value")
            assert value.result(PATIENCE_SECONDS) == content
            task = client.submit(["sh", "-c", PROGRAM], name="long")
            until(lambda: output_bytes(url) > 100_000, "the first part of the output")
            first.send(signal.SIGKILL)
            shutil.rmtree(tmp_path / "first" / ".taskyard")
            assert second.line().startswith("listening ")
            (work / "go").touch()
            lines = task.result(PATIENCE_SECONDS).splitlines()
            assert lines == [str(number) for number in range(1, 40001)]
            assert client.result("value") == content
