"""Lines of files as names of tasks, on the command line, and after a broker was killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.campaign.shell_lines import line_name
from tests.cli.yard import Caller, running
from tests.kit.processes import run_here

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = "echo one\n# a comment\necho two; exit 3\n"
ONE, TWO = (f"cmds/{line_name(text)}" for text in ("echo one", "echo two; exit 3"))


def test_numbers_are_known_to_the_broker_after_sigkill(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cmds.txt").write_text(COMMANDS)
    with running(tmp_path) as yard:
        call = Caller(yard.state, capsysbinary)
        assert call("load", "cmds.txt", "--wait").code == 1
        yard.kill_broker()
        yard.start_broker()
        reason = "it failed after 1 attempt: exit status 3: two"
        assert call("why", "cmds.txt:3").out == f"{TWO} (cmds.txt:3): {reason}\n"
        assert call("why", TWO).out == f"{TWO} (cmds.txt:3): {reason}\n"
        assert call("log", "cmds/3")[1:] == ("two\n", f"cmds.txt:3: {TWO}\n")
        assert call("results", "cmds.txt:1").out == "one\n"
        assert "\nline        cmds.txt:1\n" in call("show", "cmds/1").out
        assert f"{ONE} cmds.txt:1 done" in " ".join(call("list").out.split())
        assert call("retry", "cmds.txt:3")[1:] == (
            "retried 1 task\n",
            "cmds.txt:3: echo two; exit 3\n",
        )
        assert call("wait", "cmds.txt:3", "cmds/1").code == 1
        (tmp_path / "cmds.txt").write_text("echo new\n" + COMMANDS)
        code, out, err = call("cancel", "cmds.txt:3")
        assert (code, out) == (2, "")
        assert "cmds.txt:3: changed since the file was loaded, and is no command now" in err
        assert call("cancel", TWO).err == ""


def test_numbers_are_known_offline_and_after_a_compaction(tmp_path: Path) -> None:
    (tmp_path / "cmds.txt").write_text(COMMANDS)
    code, _, err = run_here(tmp_path, "run", "cmds.txt")
    assert code == 1
    assert f"taskyard: cmds.txt:3 (echo two; exit 3): failed: exit status 3: two ({TWO})" in err
    assert "explain:  taskyard why cmds.txt:3\n" in err
    assert run_here(tmp_path, "journal", "compact")[0] == 0
    assert run_here(tmp_path, "results", "cmds.txt:1")[1] == "one\n"
    assert f"{TWO} (cmds.txt:3): " in run_here(tmp_path, "why", "cmds/3")[1]
    assert "no task on that line in the last load" in run_here(tmp_path, "why", "cmds.txt:2")[2]
