"""Lines, rotation and the thread of a daemon's log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from taskyard.errors import UserError
from taskyard.net.event_log import INTERVAL_NS, LINES_MAX, EventLog
from taskyard.process import logs
from taskyard.process.logs import (
    LineFormatter,
    LogWriter,
    RotatedFile,
    Rotation,
    captured_stderr,
    timestamp,
)


class Lines:
    """A sink in memory, which can be made to block."""

    def __init__(self) -> None:
        self.text = ""
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_closed = False

    def write(self, lines: bytes) -> None:
        self.may_write.wait()
        self.text += lines.decode()

    def close(self) -> None:
        self.is_closed = True


def record(text: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("taskyard.x", logging.WARNING, "", 0, text, (), None)
    made.fields = fields
    return made


def test_text_has_time_level_process_event_and_fields() -> None:
    line = LineFormatter("broker", as_json=False).format(
        record("worker joined", worker="a b", slots=2, services=["exec", "x=y"], key=b"\xff")
    )
    _, rest = line.split(" ", 1)
    assert rest == (
        'warning broker: worker joined worker="a b" slots=2 services=exec,"x=y" key="\\\\xff"'
    )


def test_json_is_one_object_with_the_fields() -> None:
    line = LineFormatter("broker", as_json=True).format(record("100 % done", worker="w", pid=3))
    found = json.loads(line)
    assert found.pop("ts").endswith("Z")
    assert found == {
        "level": "warning",
        "process": "broker",
        "event": "100 % done",
        "worker": "w",
        "pid": 3,
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_control_characters_of_a_name_forge_no_line(*, as_json: bool) -> None:
    name = "w\n2026 error broker: fake\x1b[2J\x9b31m\u202e\u2028"
    line = LineFormatter("broker", as_json=as_json).format(record(f"lost {name}", worker=name))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_traceback_is_a_field() -> None:
    error = ValueError("no")
    failed = logging.LogRecord(
        "t", logging.ERROR, "", 0, "bad", (), (ValueError, error, error.__traceback__)
    )
    line = LineFormatter("web", as_json=False).format(failed)
    assert "error web: bad traceback=" in line
    assert line.isprintable()


def test_time_is_utc_with_milliseconds() -> None:
    assert timestamp(1_789_000_000_123_456_789) == "2026-09-10T00:26:40.123Z"


def test_full_file_is_renamed_and_old_ones_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "log" / "x.log"
    file = RotatedFile(path, Rotation(bytes_max=10, files=2))
    for number in range(5):
        file.write(b"line %d\n" % number)
    file.close()
    assert {one.name: one.read_text() for one in path.parent.iterdir()} == {
        "x.log": "line 4\n",
        "x.log.1": "line 3\n",
        "x.log.2": "line 2\n",
    }


def test_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = RotatedFile(path, Rotation())
    file.write(b"one\n")
    path.rename(tmp_path / "moved")
    file.write(b"two\n")
    path.unlink()
    file.write(b"three\n")
    file.close()
    assert (path.read_text(), (tmp_path / "moved").read_text()) == ("three\n", "one\n")


def test_second_process_is_refused(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "x.log", Rotation(bytes_max=1))
    file.write(b"a\n")
    file.write(b"b\n")  # the new file is locked too
    with pytest.raises(UserError, match="in use by another process"):
        RotatedFile(tmp_path / "x.log", Rotation())
    file.close()


def test_blocked_sink_blocks_no_logger_and_dropped_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "LINES_MAX", 3)
    sink = Lines()
    sink.may_write.clear()
    writer = LogWriter(LineFormatter("broker", as_json=False), sink)
    for number in range(100):
        writer.emit(record(f"line {number}"))
    sink.may_write.set()
    writer.close()
    writer.close()  # `logging` closes all handlers at the end, too
    assert sink.is_closed
    lines = sink.text.splitlines()
    written = [line for line in lines if ": line " in line]
    dropped = sum(int(line.rpartition("=")[2]) for line in lines if "log full" in line)
    assert 3 <= len(written) < 100
    assert dropped + len(written) == 100


def test_stderr_of_children_is_captured_across_rotations(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    writer = LogWriter(
        LineFormatter("up", as_json=False), RotatedFile(path, Rotation(bytes_max=20_000, files=100))
    )
    program = "import sys\nfor n in range(5000): print(sys.argv[1], n, file=sys.stderr)"
    with captured_stderr(writer, path):
        children = [
            subprocess.Popen([sys.executable, "-S", "-c", program, name]) for name in ("a", "b")
        ]
        assert [child.wait() for child in children] == [0, 0]
        os.write(2, b"the last line has no end")
    writer.close()
    files = [one.read_text() for one in tmp_path.iterdir()]
    assert len(files) > 3
    lines = "".join(files).splitlines()
    assert sorted(lines) == sorted(
        [f"{name} {number}" for name in "ab" for number in range(5000)]
        + ["the last line has no end"]
    )


def test_output_of_children_becomes_json_in_a_log_of_json() -> None:
    formatter = LineFormatter("up", as_json=True)
    assert json.loads(formatter.wrapped("Traceback:"))["text"] == "Traceback:"
    own = LineFormatter("worker", as_json=True).format(record("hi"))
    assert formatter.wrapped(own) == own


def test_many_events_become_a_count(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.events")
    events = EventLog(logger, "worker joined")
    with caplog.at_level(logging.INFO, "tests.events"):
        for number in range(LINES_MAX + 950):
            events.log(number, lambda: {"worker": "w"})
        events.log_if_due(INTERVAL_NS)
        events.log_if_due(3 * INTERVAL_NS)
    assert len(caplog.records) == LINES_MAX + 1
    assert caplog.records[-1].getMessage() == "worker joined: not logged"
    assert vars(caplog.records[-1])["fields"] == {"count": 950}
