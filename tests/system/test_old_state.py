"""A state of the first version: opened, resumed, run as another campaign, exported and checked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.cli.offline import OfflineClient
from tests.kit.old_state import unpack_old_state
from tests.kit.processes import Broker, run_here

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return unpack_old_state(tmp_path)


def document_of(state: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command on the state, and return its JSON document."""
    ended, out, err = run_here(state.parent, *words, "--state", "state", "--json")
    assert ended == code, err
    document: dict[str, Any] = json.loads(out)
    return document


def names(state: Path, campaign: str) -> list[tuple[str, str]]:
    tasks = document_of(state, "list", "--campaign", campaign)["tasks"]
    return [(task["name"], task["state"]) for task in tasks]


def test_old_tasks_are_found_by_name_and_by_full_name(state: Path) -> None:
    with OfflineClient(state) as stopped:
        for name in ("fetch/a", "nightly/fetch/a"):
            view = stopped.show(name)
            assert (view["name"], view["campaign"], view["state"]) == ("fetch/a", "nightly", "done")
            assert stopped.result(name) == "a\n"
        assert stopped.show("news/0")["campaign"] == "news"
        assert stopped.show("deploy")["campaign"] == "week/7"
        assert stopped.explain("nightly/last")["after"] == ["join"]


def test_old_campaign_is_resumed_and_its_file_run_as_another(state: Path) -> None:
    here = state.parent
    (here / "mended").touch()
    resumed = document_of(state, "run", "nightly.jsonl", "--workers", "1")
    assert (resumed["campaign"], resumed["counts"]["done"]) == ("nightly", 4)
    again = document_of(state, "run", "nightly.jsonl", "--workers", "1", "--campaign", "tue")
    assert (again["campaign"], again["counts"]["done"]) == ("tue", 4)
    everything = [(task, "done") for task in ("fetch/a", "fetch/b", "join", "last")]
    assert names(state, "tue") == everything
    with OfflineClient(state) as stopped:
        assert stopped.show("last")["campaign"] == "nightly"
        assert stopped.result("tue/fetch/b") == "b\n"
        assert stopped.show("tue/last")["attempt"] == 1
    assert run_here(here, "journal", "export", "--state", "state")[0] == 0
    checked = document_of(state, "journal", "check", "--deep")
    assert checked["wrong"] == []
    assert run_here(here, "journal", "compact", "--state", "state")[0] == 0
    assert document_of(state, "journal", "check", "--deep")["wrong"] == []
    assert document_of(state, "run", "nightly.jsonl", "--workers", "1")["counts"]["done"] == 4
    assert document_of(state, "show", "nightly/last")["task"]["attempt"] == 1


def test_old_bundle_and_old_names_are_recognised(state: Path) -> None:
    (state.parent / "people.txt").write_text("ann\nbob\n")
    words = ("--name", "news", "--service", "mail", "--to", "people.txt", "--payload", "hi")
    with Broker(state.parent, "--state", "state"):
        assert document_of(state, "bundle", *words)["new"] == 0
        deploy = ("--name", "deploy", "--service", "nobody", "--payload", "x")
        assert document_of(state, "submit", "--campaign", "week/7", *deploy)["new"] is False
        assert run_here(state.parent, "submit", "--state", "state", *deploy)[0] == 2
        assert document_of(state, "submit", "--campaign", "new", *deploy)["new"] is True
        assert document_of(state, "show", "new/deploy")["task"]["campaign"] == "new"
