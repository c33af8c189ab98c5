"""`log`, `results` and `clean`: whole output, live, of every attempt, and its removal."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest

from taskyard.campaign.shell_lines import line_name
from taskyard.cli import task_output
from taskyard.client.internal import InternalClient
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import FOLDER, name_of
from tests.cli.yard import Caller, Yard, running
from tests.kit.processes import TASKYARD, Broker, Running, Worker, run_here, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Writes random bytes to both streams at once, and their hashes to files.
WRITER = """
import hashlib, os, sys, threading
def write(descriptor, size):
    rest, digest = size, hashlib.sha256()
    while rest:
        data = os.urandom(min(rest, 50_000))
        digest.update(data)
        rest -= len(data)
        while data:
            data = data[os.write(descriptor, data):]
    open(f"{sys.argv[1]}.{descriptor}", "w").write(digest.hexdigest())
threads = [threading.Thread(target=write, args=(one, 3_000_000 * one)) for one in (1, 2)]
for one in threads: one.start()
for one in threads: one.join()
"""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_output, "POLL_SECONDS", 0.02)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Return a pipe that a task reads from until the test writes to it."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_output_is_followed_while_the_task_runs_and_over_its_attempts(
    call: Caller, yard: Yard, fifo: Path
) -> None:
    script = f'echo "try $TASKYARD_ATTEMPT"; read line < {fifo}; echo "$line" >&2; exit 1'
    call.submit("live", "sh", "-c", script, retries="1", backoff="0s")
    words = [*TASKYARD, "log", "live", "--follow", "--state", str(yard.state)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        for attempt in (1, 2):
            assert follower.stdout.readline() == f"try {attempt}\n"
            fifo.write_text(f"word {attempt}\n")
            assert follower.stdout.readline() == f"word {attempt}\n"
        assert follower.stdout.read() == ""
    assert follower.returncode == 0
    assert call("log", "live", "--attempt", "1").out == "try 1\nword 1\n"
    assert call("log", "live", "--stderr").out == "word 2\n"
    assert not [*(yard.state / FOLDER).rglob("*.stream")]


def test_follower_ends_when_the_run_with_the_broker_ends(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("echo one; exec sleep 600\n")
    with Running(tmp_path, "run", "--shell", "f.txt") as runner:
        until(lambda: _is_leased(tmp_path), "the task runs")
        name = line_name("echo one; exec sleep 600")
        with Running(tmp_path, "log", "--follow", name) as follower:
            assert follower.line() == "one"
            runner.terminate()
            code, out, err = follower.end()
    assert (code, out) == (0, "")
    assert f"task f/{name} is ready, and its broker has ended" in err


def _is_leased(directory: Path) -> bool:
    code, out, _ = run_here(directory, "status", "--json", "--broker-timeout", "1s")
    return code == 0 and bool(json.loads(out)["counts"]["leased"])


def test_reader_that_stops_early_is_no_error(call: Caller, yard: Yard, fifo: Path) -> None:
    script = f"echo one; read line < {fifo}; echo two; sleep 0.1; echo three"
    call.submit("head", "sh", "-c", script)
    words = [*TASKYARD, "log", "head", "--follow", "--state", str(yard.state)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as follower:  # type: ignore[call-overload]
        assert follower.stdout.readline() == "one\n"
        follower.stdout.close()
        fifo.write_text("\n")
        assert follower.stderr.read() == ""
    assert follower.returncode == 0


def test_results_of_a_campaign_are_tagged_lines_or_documents(call: Caller) -> None:
    call.submit("text", "printf", "a\nb", campaign="all")
    call.submit("bytes", "printf", r"\377", campaign="all")
    call.submit("long", "head", "-c", "80000", "/dev/zero", campaign="all")
    call.submit("bad", "sh", "-c", "echo part; exit 1", campaign="all")
    call("wait", "--campaign", "all")
    zeros = "\0" * 80_000
    outcome = call("results", "--campaign", "all")
    assert outcome.out == f"text\ta\ntext\tb\nbytes\t\udcff\nlong\t{zeros}\nbad\tpart\n"
    assert outcome.code == 1
    assert outcome.err == "taskyard: 1 of 4 tasks have no result: bad (failed)\n"
    documents = call("results", "--campaign", "all", "--json").out.splitlines()
    lines = [json.loads(line) for line in documents]
    assert [line["name"] for line in lines] == ["text", "bytes", "long", "bad"]
    assert lines[0]["result"] == "a\nb"
    assert base64.b64decode(lines[1]["result_base64"]) == b"\xff"
    assert lines[2]["result"] == zeros
    failed = ("failed", "exit status 1: part", "part\n")
    assert tuple(lines[3][field] for field in ("state", "reason", "stdout")) == failed
    assert call("results", "--campaign", "none").code == 2


def test_clean_removes_output_of_settled_tasks(call: Caller, yard: Yard, fifo: Path) -> None:
    script = 'yes "$0" | head -c 80000'
    for name in ("old", "new"):
        call.submit(name, "sh", "-c", script, name, campaign="litter")
        call("wait", f"litter/{name}")
    call.submit("busy", "sh", "-c", f"{script}; read line < {fifo}", "busy", campaign="litter")
    files = BlobFiles(yard.state / FOLDER)
    running = yard.state / FOLDER / "streams" / "1.1.6.litterbusy.stream"
    until(running.exists, "output of the running task")
    os.utime(files.path(name_of(b"old\n" * 20_000)), (0, 0))
    assert call("clean").code == 2
    removed = "1 file of 1 task, 78 KiB\n"
    words = ("clean", "--campaign", "litter", "--older-than", "1h")
    note = "1 task may still run: their files stay\n"
    assert call(*words, "--dry-run") == (0, f"would remove {removed}", note)
    assert call(*words) == (0, f"removed {removed}", note)
    missing = "80,000 bytes of output are missing (`taskyard clean` and blobs.keep remove them)"
    message = f"taskyard: task litter/old, attempt 1: {missing}\n"
    for verb in ("results", "log"):
        assert call(verb, "litter/old") == (1, "", message)
    assert f"output      {missing}\n" in call("show", "litter/old").out
    assert "output      stdout 78 KiB\n" in call("show", "litter/new").out
    assert len(call("results", "litter/new").out) == 80_000
    keep = ("clean", "--campaign", "litter", "--keep-size", "10K", "--json")
    document = call(*keep).document()
    assert (document["files"], document["recent_files"]) == (0, 1)
    used = "1 file used in the last minute: kept\n"
    assert call(*keep[:-1]).err == used + note
    os.utime(files.path(name_of(b"new\n" * 20_000)), (0, 0))
    document = call(*keep).document()
    assert (document["files"], document["bytes"], document["active_tasks"]) == (1, 80_000, 1)
    fifo.write_text("\n")
    call("wait", "litter/busy")
    busy = files.path(name_of(b"busy\n" * 16_000))
    assert not running.exists()
    os.utime(busy, (0, 0))
    assert call("clean", "--campaign", "litter", "--every-file").out == f"removed {removed}"
    assert not busy.exists()


LAYOUT = {"a-1": ("x\n", "err\n"), "a-2": ("y\n", "err\n")}
MAP_LAYOUT = {line_name("x"): ("x\n", "err\n"), line_name("y"): ("y\n", "err\n")}


def read_layout(directory: Path, campaign: str) -> dict[str, tuple[str, str]]:
    tasks = sorted((directory / campaign).iterdir())
    return {
        task.name: ((task / "1.out").read_text(), (task / "1.err").read_text()) for task in tasks
    }


def test_map_writes_output_to_a_directory_with_a_job_log(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\ny\n")
    script = "echo {}; echo err >&2; exit 3"
    words = ["--lines", str(tmp_path / "lines"), "--campaign", "a", "--output", str(tmp_path / "d")]
    assert call("map", *words, "--", "sh", "-c", script).code == 1
    assert read_layout(tmp_path / "d", "a") == MAP_LAYOUT
    header, *rows = (tmp_path / "d" / "joblog.tsv").read_text().splitlines()
    names = "Seq Host Starttime JobRuntime Send Receive Exitval Signal Command"
    assert header == "\t".join(names.split())
    table = [dict(zip(header.split("\t"), row.split("\t"), strict=True)) for row in rows]
    assert [(row["Seq"], row["Receive"], row["Exitval"]) for row in table] == [
        ("1", "2", "3"),
        ("2", "2", "3"),
    ]
    assert table[0]["Command"] == shlex.join(["sh", "-c", "echo 'x'; echo err >&2; exit 3"])
    assert float(table[0]["Starttime"]) > 0


def test_map_tags_lines_with_their_input(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x y\nz\n")
    words = ["--lines", str(tmp_path / "lines"), "--campaign", "tag", "--tag", "--"]
    assert call("map", *words, "printf", "%s\n\n%s", "{}", "end").out == (
        "x y\tx y\nx y\t\nx y\tend\nz\tz\nz\t\nz\tend\n"
    )


def test_map_shows_stderr_of_tasks_that_are_done(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\ny\n")
    words = ["--lines", str(tmp_path / "lines"), "--campaign", "stderr"]
    script = ["--", "sh", "-c", r"echo {}; printf '\33%s' {} >&2"]
    outcome = call("map", *words, *script)
    assert outcome.out == "x\ny\n"
    assert call("map", *words, "--tag", *script).err.startswith("x\t\\x1bx\ny\t\\x1by\n")
    assert outcome.err == "\\x1bx\n\\x1by\ncampaign stderr: 2 tasks: 2 done\n"
    assert call("map", *words, "-q", *script).err == ""


def test_map_prints_lines_of_running_tasks(
    yard: Yard, call: Caller, tmp_path: Path, fifo: Path
) -> None:
    (tmp_path / "lines").write_text("x\n")
    script = f": {{}}; echo one; printf tw; read line < {fifo}; echo o; echo three"
    words = ["--lines", str(tmp_path / "lines"), "--line-buffer", "--tag", "-q", "--campaign", "lb"]
    command = [*TASKYARD, "map", "--state", str(yard.state), *words, "--", "sh", "-c", script]
    assert call("map", *words, "--json", "--", "true", "{}").code == 2
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mapping:
        assert mapping.stdout is not None
        assert mapping.stdout.readline() == "x\tone\n"
        fifo.write_text("\n")
        assert mapping.stdout.read() == "x\ttwo\nx\tthree\n"
    assert mapping.returncode == 0


def test_submit_writes_output_to_a_directory(call: Caller, tmp_path: Path) -> None:
    words = ["submit", "--name", "copy", "--output", str(tmp_path)]
    assert call(*words, "--", "echo", "out").err == "taskyard: --output: needs --wait\n"
    assert call(*words, "--wait", "--", "echo", "out").out == "out\n"
    assert (tmp_path / "@" / "copy" / "1.out").read_text() == "out\n"
    assert (tmp_path / "@" / "copy" / "1.err").read_text() == ""


def test_run_writes_output_of_every_attempt(tmp_path: Path) -> None:
    task = {"name": "r", "argv": ["sh", "-c", "echo $TASKYARD_ATTEMPT; exit 1"], "retries": 1}
    (tmp_path / "f.jsonl").write_text(json.dumps({**task, "backoff": 0.1}))
    assert run_here(tmp_path, "run", "f.jsonl", "--output", "out")[0] == 1
    found = tmp_path / "out" / "f" / "r"
    assert [(found / f"{one}.out").read_text() for one in (1, 2)] == ["1\n", "2\n"]


@pytest.fixture
def quota_yard(tmp_path: Path) -> Iterator[Yard]:
    (tmp_path / "taskyard.toml").write_text('[blobs]\nquota = "70000"\n')
    with running(tmp_path) as yard:
        yield yard


def test_tasks_are_refused_at_the_quota_and_nothing_is_cut(
    quota_yard: Yard, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    call = Caller(quota_yard.state, capsysbinary)
    call.submit("long", "head", "-c", "80000", "/dev/zero")
    call("wait", "long")
    refused = call("submit", "--name", "more", "--json", "--", "true")
    error = json.loads(refused.err)["error"]
    assert (refused.code, error["code"]) == (2, "full")
    assert "quota of 70,000 (remove some with `taskyard clean`" in error["text"]
    assert len(call("results", "long").out) == 80_000


def test_output_is_whole_after_kills_of_the_broker(tmp_path: Path) -> None:
    with ExitStack() as stack:
        yard = stack.enter_context(running(tmp_path))
        with InternalClient(state=yard.state) as client:
            future = client.submit([sys.executable, "-c", WRITER, str(tmp_path / "hash")], name="w")
            stdout = yard.state / FOLDER / "streams" / "1.1.0.w.stream"
            for kill in range(2):
                until(partial(_has, stdout, 1 + kill * 500_000), "some output")
                yard.kill_broker()
                yard.start_broker()
            hashes = [hashlib.sha256(future.bytes(60)).hexdigest()]
            hashes.append(hashlib.sha256(client.output("w", "stderr")).hexdigest())
        assert hashes == [(tmp_path / f"hash.{one}").read_text() for one in (1, 2)]
        files = BlobFiles(yard.state / FOLDER).walk()
        assert sorted(file.bytes_total for file in files) == [3_000_000, 6_000_000]


def _has(path: Path, size: int) -> bool:
    return _size(path) >= size


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_results_of_archived_tasks_come_first_in_the_order_of_their_end(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(
        '{"name": "a", "argv": ["printf", "1\\\\n2"], "after": ["z"]}\n'
        '{"name": "z", "argv": ["echo", "zero"]}\n'
        '{"name": "gone", "argv": ["true"], "due": "1h"}\n'
    )
    with Broker(tmp_path), Worker(tmp_path):
        assert run_here(tmp_path, "load", "f.jsonl")[0] == 0
        assert run_here(tmp_path, "wait", "f/a")[0] == 0
        assert run_here(tmp_path, "cancel", "f/gone")[0] == 0
    assert run_here(tmp_path, "journal", "compact")[0] == 0
    code, out, err = run_here(tmp_path, "results", "--campaign", "f", "-q")
    assert (code, out, err) == (1, "z\tzero\na\t1\na\t2\n", "")
    with Broker(tmp_path) as broker, Worker(tmp_path):
        words = ("submit", "--campaign", "f", "--name", "new", "--wait", "--", "echo", "new")
        assert run_here(tmp_path, *words)[0] == 0
        assert run_here(tmp_path, "results", "f/a")[1] == "1\n2"  # recalled
        _, out, err = run_here(tmp_path, "results", "--campaign", "f", "--broker", broker.endpoint)
        assert (out, err.count("2 ended tasks are not in the broker's memory")) == (
            "new\tnew\na\t1\na\t2\n",
            1,
        )
        for _ in range(2):  # the first time recalls all
            code, out, err = run_here(tmp_path, "results", "--campaign", "f", "--json")
            lines = [json.loads(line) for line in out.splitlines()]
            states = [(line["name"], line["state"]) for line in lines]
            assert states == [("z", "done"), ("a", "done"), ("gone", "cancelled"), ("new", "done")]
            missing = "taskyard: 1 of 4 tasks have no result: gone (cancelled)\n"
            assert (code, err) == (1, missing)
            assert [line.get("result") for line in lines] == ["zero\n", "1\n2", None, "new\n"]
