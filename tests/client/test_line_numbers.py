"""Lines as names of tasks: `cmds.txt:500` and `cmds/500`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard import testing
from taskyard.campaign import shell_lines
from taskyard.campaign.reader import read_campaign
from taskyard.campaign.shell_lines import line_name
from taskyard.campaign.submitter import submit_campaign
from taskyard.client.line_numbers import NumberedFile, NumberedLine
from taskyard.errors import UnknownName, UserError
from tests.kit.clients import internal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from taskyard.client.internal import InternalClient


@pytest.fixture
def client() -> Iterator[InternalClient]:
    with testing.broker() as running, internal(running.client()) as connected:
        yield connected


def load(client: InternalClient, path: Path, text: str, campaign: str = "cmds") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    submit_campaign(client, read_campaign(path), campaign, on_rejected=lambda *_: None)
    return path


TEXT = "echo a\n\n# comment\necho b\necho a\n"


def test_line_is_found_by_its_file_and_by_its_campaign(
    client: InternalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = load(client, tmp_path / "cmds.txt", TEXT)
    monkeypatch.chdir(tmp_path)
    second = f"cmds/{line_name('echo b')}"
    for spelled in ("cmds.txt:4", "./cmds.txt:4", "cmds/4", f"{file}:4"):
        assert client.resolve([spelled]) == [second]
    assert client.resolve(["cmds.txt:5", "cmds/1"]) == [
        f"cmds/{line_name('echo a', 2)}",
        f"cmds/{line_name('echo a')}",
    ]
    found = client.find_line("cmds/4")
    assert found == NumberedLine(NumberedFile("cmds", str(file)), 4, line_name("echo b"))
    assert found.label == "cmds.txt:4"
    views = [*client.tasks()]
    assert {name.split("/")[1]: one for name, one in client.line_labels(views).items()} == {
        line_name("echo a"): "cmds.txt:1",
        line_name("echo b"): "cmds.txt:4",
        line_name("echo a", 2): "cmds.txt:5",
    }


def test_names_of_tasks_go_before_lines(client: InternalClient, tmp_path: Path) -> None:
    load(client, tmp_path / "cmds.txt", TEXT)
    client.submit(["true"], name="cmds.txt:4")
    client.submit(["true"], name="4", campaign="cmds")
    assert client.resolve(["cmds.txt:4", "cmds/4"]) == ["cmds.txt:4", "cmds/4"]


@pytest.mark.parametrize("spelled", ["cmds.txt:3", "cmds/2", "cmds.txt:99", "cmds/6000"])
def test_line_without_a_task_is_refused(
    client: InternalClient, tmp_path: Path, spelled: str
) -> None:
    load(client, tmp_path / "cmds.txt", TEXT)
    with pytest.raises(UnknownName, match=f"{spelled}: no task on that line in the last load$"):
        client.resolve([spelled])


@pytest.mark.parametrize("spelled", ["other.txt:1", "none/1", "cmds.txt:0", "cmds.txt", "txt:1"])
def test_other_texts_are_unknown_tasks(
    client: InternalClient, tmp_path: Path, spelled: str
) -> None:
    load(client, tmp_path / "cmds.txt", TEXT)
    with pytest.raises(UnknownName, match="unknown task"):
        client.resolve([spelled])


def test_number_of_a_line_that_has_changed_is_refused_with_its_text(
    client: InternalClient, tmp_path: Path
) -> None:
    file = load(client, tmp_path / "cmds.txt", TEXT)
    file.write_text("echo new\n" + TEXT)
    name = f"cmds/{line_name('echo a', 2)}"
    text = f"cmds.txt:5: changed since the file was loaded, to 'echo b' .*{name}"
    with pytest.raises(UserError, match=text):
        client.resolve(["cmds.txt:5"])
    with pytest.raises(UserError, match=r"cmds/4: changed since .*, and is no command now"):
        client.resolve(["cmds/4"])
    load(client, file, file.read_text())
    assert client.resolve(["cmds.txt:5"]) == [f"cmds/{line_name('echo b')}"]
    file.unlink()
    assert client.resolve(["cmds.txt:5"]) == [f"cmds/{line_name('echo b')}"]


def test_newest_load_of_a_file_is_meant_and_another_file_is_ambiguous(
    client: InternalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(client, tmp_path / "a" / "cmds.txt", "echo a\n", "first")
    load(client, tmp_path / "a" / "cmds.txt", "echo a\n", "second")
    assert client.resolve(["cmds.txt:1"]) == [f"second/{line_name('echo a')}"]
    load(client, tmp_path / "b" / "cmds.txt", "echo b\n", "third")
    text = r"cmds.txt:1: several files have that name \(give second/1 .* or third/1 "
    with pytest.raises(UserError, match=text):
        client.resolve(["cmds.txt:1"])
    assert client.resolve(["a/cmds.txt:1"]) == [f"second/{line_name('echo a')}"]
    monkeypatch.chdir(tmp_path / "b")
    assert client.resolve(["cmds.txt:1"]) == [f"third/{line_name('echo b')}"]
    assert client.resolve(["../a/cmds.txt:1"]) == [f"second/{line_name('echo a')}"]


def test_long_file_has_its_numbers_in_parts(
    client: InternalClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shell_lines, "LINES_PER_PART", 2)
    texts = [f"echo {number}" for number in range(70)]
    load(client, tmp_path / "cmds.txt", "\n".join(texts))
    names = [f"cmds/{line_name(text)}" for text in texts]
    assert client.resolve([f"cmds/{line}" for line in (1, 2, 3, 70)]) == [
        *names[:3],
        names[69],
    ]
    assert len(client.campaign_lines("cmds")) == 70
