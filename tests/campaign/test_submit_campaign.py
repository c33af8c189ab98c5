"""A file's campaign is checked as a whole, and a refusal has its line."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskyard import testing
from taskyard.campaign.batches import TASKS_PER_BATCH
from taskyard.campaign.reader import LoadedCampaign, RejectedRow, read_campaign
from taskyard.campaign.submitter import SubmitResult, submit_campaign
from taskyard.client.internal import InternalClient
from taskyard.core.states import TaskState
from taskyard.errors import Refused
from taskyard.testing import InMemoryBroker
from tests.kit.clients import internal


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with testing.broker() as running:
        yield running


@pytest.fixture
def client(broker: InMemoryBroker) -> Iterator[InternalClient]:
    with internal(broker.client()) as connected:
        yield connected


def load(directory: Path, *tasks: dict[str, Any]) -> LoadedCampaign:
    path = directory / "c.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    return read_campaign(path)


def plain(name: str, *after: str) -> dict[str, Any]:
    return {"name": name, "argv": ["true"], "after": list(after)}


def submit(client: InternalClient, loaded: LoadedCampaign, **more: Any) -> SubmitResult:
    def never(rejected: Sequence[RejectedRow], _all: Sequence[RejectedRow]) -> None:
        pytest.fail(f"rejected {rejected}")

    return submit_campaign(client, loaded, "c", on_rejected=never, **more)


def names(client: InternalClient) -> list[str]:
    return [task["name"] for task in client.tasks()]


def test_only_missing_tasks_are_submitted(
    client: InternalClient, broker: InMemoryBroker, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    submit(client, load(tmp_path, plain("a"), plain("b", "a")))
    broker.run_all()
    client.submit(["false"], name="d", campaign="c", retries=0)
    broker.run_all()
    loaded = load(
        tmp_path,
        *(plain("a"), plain("b", "a"), plain("c", "b")),
        {"name": "d", "argv": ["false"], "retries": 0},
    )
    result = submit(client, loaded, progress=lambda *far: seen.append(far))
    assert (result.new, result.failed) == (1, ["c/d"])
    assert result.existing == {TaskState.DONE: 2, TaskState.FAILED: 1}
    assert seen == [(1, 1)]
    seen.clear()
    assert submit(client, loaded, progress=lambda *far: seen.append(far)).new == 0
    assert seen == []


def test_name_in_use_is_refused_with_its_line_and_nothing_is_submitted(
    client: InternalClient, tmp_path: Path
) -> None:
    client.submit(["false"], name="b", campaign="c")
    loaded = load(tmp_path, plain("a"), {"name": "x"}, plain("b"), plain("z", "b"))
    with pytest.raises(Refused) as refused:
        submit(client, loaded)
    text = str(refused.value)
    assert text.startswith(f"{loaded.file}:3: task c/b ")
    assert text.endswith(", nothing was submitted")
    assert (refused.value.code, refused.value.names) == ("conflict", ("c/b",))
    assert names(client) == ["b"]


def test_refusal_of_a_later_batch_says_how_many_tasks_were_submitted(
    client: InternalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = TASKS_PER_BATCH + 2
    loaded = load(tmp_path, *({"name": f"t{n}", "payload": "x"} for n in range(count)))
    create = client.create

    def create_first(submission: Any, *more: Any) -> int:
        if len(submission.names) < TASKS_PER_BATCH:
            raise Refused("task c/t10001 is odd", "odd", (f"c/t{count - 1}",))
        return create(submission, *more)

    monkeypatch.setattr(client, "create", create_first)
    with pytest.raises(Refused) as refused:
        submit(client, loaded)
    assert str(refused.value) == (
        f"{loaded.file}:{count}: task c/t10001 is odd, 10,000 tasks before it were submitted"
    )
    assert refused.value.code == "odd"
    assert sum(client.status()["counts"].values()) == TASKS_PER_BATCH


def test_changed_files_run_their_tasks_and_those_behind_them_again(
    client: InternalClient, broker: InMemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"inputs": ["in"], "outputs": ["out"]}
    loaded = load(
        tmp_path,
        {"name": "a", "argv": ["cp", "in", "out"], **files},
        *(plain("b", "a"), plain("c", "b"), plain("other")),
        {"name": "bad", "argv": ["test", "-e", "good"], "after": ["a"]},
    )
    (tmp_path / "in").write_text("1")
    submit(client, loaded, restart_changed=True)
    broker.run_all()
    assert submit(client, loaded, restart_changed=True).restarted == 0
    (tmp_path / "in").write_text("2")
    assert submit(client, loaded).restarted == 0
    more = [msgspec.json.decode(line) for line in (tmp_path / "c.jsonl").read_bytes().splitlines()]
    loaded = load(tmp_path, *more, plain("new", "a"))
    again = submit(client, loaded, restart_changed=True)
    assert (again.restarted, again.failed) == (3, ["c/bad"])
    (tmp_path / "good").touch()
    client.retry(again.failed)
    states = {task["name"]: task["state"] for task in client.tasks()}
    assert states == {
        "a": "ready",
        "b": "blocked",
        "c": "blocked",
        "other": "done",
        "bad": "blocked",
        "new": "blocked",
    }
    broker.run_all()
    assert {task["state"] for task in client.tasks()} == {"done"}
    assert (tmp_path / "out").read_text() == "2"
    (tmp_path / "out").unlink()
    assert submit(client, loaded, restart_changed=True).restarted == 5
