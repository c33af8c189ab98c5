"""Logs of real daemons: joins and leaves, JSON, files, and the log of `up`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.processes import Broker, Running, run, until


def events(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log in JSON. A line that is not JSON is an error."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(path: Path, event: str) -> list[dict[str, Any]]:
    return [one for one in events(path) if one["event"] == event] if path.exists() else []


def test_joins_and_leaves_have_names_addresses_and_reasons(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "broker.log"
    (tmp_path / "taskyard.toml").write_text(
        '[listen.wmp]\nexpire = "1s"\nendpoint = "tcp://127.0.0.1:0"\n[log]\nformat = "json"\n'
    )
    options = ("--log-file", str(log), "--listen", "dwork=tcp://127.0.0.1:0")
    with Broker(tmp_path, *options, "--listen", "wmp=tcp://127.0.0.1:0") as broker:
        places = dict(zip(("native", "dwork", "wmp"), broker.endpoints, strict=True))
        named = ("--name", "w\x1b[2J\n{}", "--broker", places["dwork"])
        with Running(tmp_path, "worker", *named) as worker:
            until(lambda: of_kind(log, "worker joined"))
            worker.terminate()
        with Running(tmp_path, "worker", "--dialect", "wmp", "--broker", places["wmp"]) as lost:
            until(lambda: len(of_kind(log, "worker joined")) == 2)
            lost.kill()
        until(lambda: len(of_kind(log, "worker left")) == 2)
        until(lambda: len(of_kind(log, "peer disconnected")) == 2)
        code, _, err = broker.terminate()
        assert (code, err) == (0, "")
    first, second = of_kind(log, "worker joined")
    connected = of_kind(log, "peer connected")
    assert (first["worker"], first["dialect"], first["pid"]) == (
        "w\x1b[2J\n{}",
        "dwork",
        worker.pid,
    )
    assert [first["address"], second["address"]] == [one["address"] for one in connected]
    assert [one["listener"] for one in connected] == [
        places[dialect].removeprefix("tcp://") for dialect in ("dwork", "wmp")
    ]
    assert [(one["worker"], one["reason"]) for one in of_kind(log, "worker left")] == [
        (first["worker"], "left"),
        (second["worker"], "lease expired"),
    ]
    assert events(log)[-1]["event"].startswith("stopped: ")


def test_log_of_a_worker_in_json_has_nothing_else(tmp_path: Path) -> None:
    with (
        Broker(tmp_path),
        Running(tmp_path, "worker", "--log-format", "json", "--log-level", "info") as worker,
    ):
        line = json.loads(worker.error_line())
        assert (line["level"], line["process"]) == ("info", "worker")
        assert " works for the broker at " in line["event"]
        code, _, err = worker.terminate()
    assert code == 0
    assert [json.loads(line)["process"] for line in err.splitlines()] in ([], ["worker"])


def test_log_of_detached_up_is_json_with_its_children_and_is_rotated(tmp_path: Path) -> None:
    (tmp_path / "taskyard.toml").write_text('[log]\nsize = "200"\nfiles = 50\n')
    try:
        code, _, err = run(tmp_path, "up", "--detach", "--log-format", "json")
        assert code == 0, err
    finally:
        assert run(tmp_path, "down")[0] == 0
    files = sorted((tmp_path / ".taskyard" / "log").iterdir())
    assert len(files) > 2
    found = [one for file in files for one in events(file)]
    assert {("broker", "worker joined"), ("broker", "worker left")} <= {
        (one["process"], one["event"]) for one in found
    }
    printed = [one["text"] for one in found if one["event"] == "output"]
    assert any(line.startswith("listening native ") for line in printed)
