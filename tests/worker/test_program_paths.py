"""Where programs are, and for how long that is remembered."""

from pathlib import Path

import pytest

from taskyard.worker.processes import REMEMBERED_NS_MAX, ProgramPaths
from tests.worker.runner_harness import SetClock


def make_program(directory: Path) -> str:
    """Make a program called `tool`, and return its path."""
    directory.mkdir(exist_ok=True)
    path = directory / "tool"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_path_is_remembered_for_a_moment(tmp_path: Path) -> None:
    clock = SetClock()
    paths = ProgramPaths(clock.monotonic_ns)
    env = {"PATH": f"{tmp_path / 'a'}:{tmp_path / 'b'}"}
    second = make_program(tmp_path / "b")
    assert paths.find("tool", env) == second
    first = make_program(tmp_path / "a")
    assert paths.find("tool", env) == second
    assert paths.find("tool", {"PATH": str(tmp_path / "a")}) == first
    clock.now_ns += REMEMBERED_NS_MAX
    assert paths.find("tool", env) == first


def test_path_that_did_not_work_is_searched_again(tmp_path: Path) -> None:
    paths = ProgramPaths(SetClock().monotonic_ns)
    env = {"PATH": str(tmp_path)}
    path = make_program(tmp_path)
    assert paths.find("tool", env) == path
    Path(path).unlink()
    paths.forget()
    with pytest.raises(FileNotFoundError):
        paths.find("tool", env)


def test_path_below_a_relative_directory_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ProgramPaths(SetClock().monotonic_ns)
    env = {"PATH": f"bin:{tmp_path / 'b'}"}
    absolute = make_program(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert paths.find("tool", env) == absolute
    make_program(tmp_path / "bin")
    assert paths.find("tool", env) == "bin/tool"
