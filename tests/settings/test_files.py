"""Finding the settings file and the state directory, unreadable files, and line numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taskyard.settings import files
from taskyard.settings.files import InvalidSettings, find, find_state, read
from tests.settings.kit import written


def test_file_is_that_of_the_flag_else_of_the_variable_else_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    variables = {"TASKYARD_CONFIG": "of-variable.toml"}
    assert find(Path("of-flag.toml"), variables) == Path("of-flag.toml")
    assert find(None, variables) == Path("of-variable.toml")
    assert find(None, {}) == Path("taskyard.toml")


def test_file_is_found_from_subdirectories_and_the_nearest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = written(tmp_path, "")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find(None, {}) == outer
    inner = written(tmp_path / "a", "")
    assert find(None, {}) == inner


def test_directory_of_that_name_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = written(tmp_path, "")
    (tmp_path / "a" / "taskyard.toml").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    assert find(None, {}) == outer


def test_file_of_another_user_in_a_public_directory_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = written(tmp_path, "")
    shared = tmp_path / "shared"
    shared.mkdir()
    near = written(shared, "")
    (shared / "mine").mkdir()
    monkeypatch.chdir(shared / "mine")
    monkeypatch.setattr(os, "getuid", lambda: near.stat().st_uid + 1)
    assert find(None, {}) == near
    shared.chmod(0o1777)
    assert find(None, {}) == outer
    assert find(near, {}) == near
    monkeypatch.undo()
    monkeypatch.chdir(shared / "mine")
    assert find(None, {}) == near


def test_working_directory_that_is_gone_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert find(None, {}) is None


# The state directory.


def test_nearest_state_of_this_user_is_found_from_subdirectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / ".taskyard"
    (tmp_path / "a" / "b").mkdir(parents=True)
    state.mkdir()
    (tmp_path / "a" / ".taskyard").write_text("a file is no state")
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find_state() == state
    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)
    assert find_state() == Path(".taskyard")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert find_state() == Path(".taskyard")


def test_state_of_another_user_hides_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".taskyard").mkdir()
    near = tmp_path / "a" / ".taskyard"
    (tmp_path / "a" / "b").mkdir(parents=True)
    near.mkdir()
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert find_state() == near
    is_own = files._is_own  # noqa: SLF001
    monkeypatch.setattr(files, "_is_own", lambda path: path != near and is_own(path))
    assert find_state() == Path(".taskyard")


def test_working_directory_that_is_gone_has_a_state_to_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert find_state() == Path(".taskyard")


# Unreadable files, and line numbers.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "settings file {}: No such file or directory (check --config"),
        (b"[broker]\n# \xff\n", "{}:2: not valid UTF-8"),
        (b"a = " + b"[" * 100_000, "{}: lists or tables are nested too deeply"),
        (
            b"#" * (files.FILE_BYTES_MAX + 1),
            "settings file {}: larger than 1,048,576 bytes",
        ),
        (b"[broker]\nstate = 'x\n", "{}:2: invalid TOML: "),
    ],
)
def test_unreadable_file_is_reported(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidSettings) as raised:
        read(file)
    assert str(raised.value).startswith(message.format(file))


def test_device_without_content_is_an_empty_file() -> None:
    assert read(Path(os.devnull)).content == {}


def test_lines_are_found_however_keys_are_written(tmp_path: Path) -> None:
    text = """
top = 1
"quoted key" = 2  # = 3
dotted.inner = 4

[ section ] # with [a] remark
key=5
long = [
    1,
    [2],
]
text = '''
[section]
key = 6
fake = 7
'''
after = 8
inline = { deep = 9 }
[section."a.b"]
last = 10
[[many]]
one = 11
"""
    lines = read(written(tmp_path, text)).lines
    assert lines == {
        ("top",): 2,
        ("quoted key",): 3,
        ("dotted",): 4,
        ("dotted", "inner"): 4,
        ("section",): 6,
        ("section", "key"): 7,
        ("section", "long"): 8,
        ("section", "text"): 12,
        ("section", "after"): 17,
        ("section", "inline"): 18,
        ("section", "a.b"): 19,
        ("section", "a.b", "last"): 20,
        ("many",): 21,
    }


def test_place_is_the_nearest_known_line(tmp_path: Path) -> None:
    file = written(tmp_path, "[a]\nb = {c = 1}\n")
    document = read(file)
    assert document.location("a", "b", "c") == f"{file}:2"
    assert document.location("a", "x") == f"{file}:1"
    assert document.location("x") == str(file)
