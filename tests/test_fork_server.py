"""Commands of tests are forked from one interpreter, and behave like executed ones."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.kit.processes import TASKYARD, Broker, Running, environment


def is_forked(running: Running) -> bool:
    """Return whether the process has the command line of the fork server."""
    return b"fork_server.py" in Path(f"/proc/{running.pid}/cmdline").read_bytes()


def test_forked_command_is_a_child_in_its_directory_that_leads_its_group(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        assert is_forked(broker)
        status = Path(f"/proc/{broker.pid}/status").read_text()
        assert f"PPid:\t{os.getpid()}\n" in status
        assert Path(f"/proc/{broker.pid}/cwd").readlink() == tmp_path
        assert os.getpgid(broker.pid) == broker.pid
        assert broker.kill() == -signal.SIGKILL


def test_forked_commands_end_by_signal_and_by_end_of_file(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        assert broker.terminate()[0] == 0
    with Broker(tmp_path) as broker:
        broker.hang_up()
        assert broker.end()[0] == 0


@pytest.mark.parametrize("variable", [{}, {"PYTHONDEVMODE": "1"}, {"TASKYARD_NONE": "x" * 70_000}])
def test_forked_and_executed_commands_print_the_same(variable: dict[str, str]) -> None:
    done = subprocess.run(
        [*TASKYARD, "status", "--no-such"],
        env=environment(**variable),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unknown option --no-such" in done.stderr
    assert done.stdout == ""
