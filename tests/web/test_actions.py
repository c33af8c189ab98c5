"""Every action of the list of tasks, in a real browser, on a live broker."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from taskyard.client.internal import InternalClient
from tests.kit.processes import Broker, run_here, until
from tests.web.test_browser import Site, Tab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import BrowserContext, Dialog

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("actions")


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[InternalClient]:
    """Start a broker without workers, with three tasks in one lane and one elsewhere."""
    tasks = [
        {"name": name, "argv": ["true"], "lane": lane}
        for name, lane in (("a", "north"), ("b", "north"), ("c", "north"), ("d", "south"))
    ]
    file = directory / "trial.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with Broker(directory):
        assert run_here(directory, "load", str(file))[0] == 0
        with InternalClient(state=directory / ".taskyard") as found:
            yield found


@pytest.fixture(scope="module")
def tab(directory: Path, client: InternalClient, window: BrowserContext) -> Iterator[Tab]:
    assert client.status()["counts"]["ready"] == 4
    with ExitStack() as stack:
        site = Site(directory)
        stack.enter_context(site.process)
        page = window.new_page()
        page.goto(site.quick_address)
        yield Tab(page, site)


class Questions:
    """The confirmations that were asked for, all of them given."""

    def __init__(self, tab: Tab) -> None:
        self._tab = tab
        self.asked: list[str] = []

    def accept(self, dialog: Dialog) -> None:
        self.asked.append(dialog.message)
        dialog.accept()

    def act(self, text: str, action: str, *, count: int) -> str:
        """Open a filter, wait for its tasks, and press a button. Return what the page says then."""
        page = self._tab.page
        page.once("dialog", self.accept)
        self._tab.open(f"/tasks?filter={quote(text)}")
        self._tab.wait_for_text("#total", f"{count} task{'s' if count > 1 else ''} match")
        page.click(f"#actions button[value={action}]")
        page.wait_for_selector(".flash, .bad")
        return page.inner_text(".flash, .bad")


@pytest.fixture
def questions(tab: Tab) -> Questions:
    return Questions(tab)


def states(client: InternalClient) -> dict[str, str]:
    return {task["name"]: task["state"] for task in client.tasks()}


def test_priority_is_set(questions: Questions, tab: Tab, client: InternalClient) -> None:
    page = tab.page
    tab.open("/tasks?filter=--lane%20north")
    tab.wait_for_text("#total", "3 tasks match")
    page.once("dialog", questions.accept)
    page.fill("#actions input[name=priority]", "7")
    page.click("#actions button[value=priority]")
    page.wait_for_selector(".flash")
    assert page.inner_text(".flash") == "changed the priority of 3 tasks"
    assert questions.asked == ["Set the priority of all 3 tasks that match?"]
    assert {task["name"]: task["priority"] for task in client.tasks()} == {
        "a": 7,
        "b": 7,
        "c": 7,
        "d": 0,
    }


def test_failed_tasks_are_retried(questions: Questions, client: InternalClient) -> None:
    assert client.expire(lane="north") == 3
    assert set(states(client).values()) == {"failed", "ready"}
    assert questions.act("--failed", "retry", count=3) == "retried 3 tasks"
    assert set(states(client).values()) == {"ready"}
    assert questions.asked == ["Retry all 3 tasks that match?"]


def test_lane_is_paused_and_resumed(questions: Questions, client: InternalClient) -> None:
    lane = "--service exec --lane north"
    assert questions.act(lane, "pause", count=3) == "paused lane north of service exec with 3 tasks"
    assert client.status()["pauses"] == [{"service": "exec", "lane": "north"}]
    assert (
        questions.act(lane, "resume", count=3) == "resumed lane north of service exec with 3 tasks"
    )
    assert client.status()["pauses"] == []
    service = "--service exec"
    assert questions.act(service, "pause", count=4) == "paused service exec with 4 tasks"
    assert questions.act(service, "resume", count=4) == "resumed service exec with 4 tasks"


def test_other_selections_are_not_paused(questions: Questions) -> None:
    said = questions.act("--lane north", "pause", count=3)
    assert "pause: a service or a lane can be paused" in said


def test_refused_confirmation_does_nothing(tab: Tab, client: InternalClient) -> None:
    tab.open("/tasks")
    tab.wait_for_text("#total", "4 tasks match")
    with tab.page.expect_event("dialog") as asked:
        tab.page.once("dialog", lambda dialog: dialog.dismiss())
        tab.page.click("#actions button[value=cancel]")
    assert asked.value.message == "Cancel all 4 tasks that match?"
    assert set(states(client).values()) == {"ready"}


def test_tasks_are_cancelled(questions: Questions, client: InternalClient) -> None:
    assert questions.act("--lane south", "cancel", count=1) == "cancelled 1 task"
    assert states(client) == {"a": "ready", "b": "ready", "c": "ready", "d": "cancelled"}
    assert questions.asked == ["Cancel the task that matches?"]


def test_confirmed_number_follows_the_broker(
    tab: Tab, questions: Questions, client: InternalClient
) -> None:
    tab.open("/tasks?filter=--match%20late")
    tab.wait_for_text("#total", "0 tasks match")
    tab.page.fill("#actions input[name=priority]", "3")
    client.submit(["true"], name="late-1")
    client.submit(["true"], name="late-2")
    tab.wait_for_text("#total", "2 tasks match")
    assert tab.page.input_value("#actions input[name=priority]") == "3"
    tab.page.once("dialog", questions.accept)
    tab.page.click("#actions button[value=cancel]")
    tab.page.wait_for_selector(".flash")
    assert questions.asked == ["Cancel all 2 tasks that match?"]
    until(lambda: states(client)["late-1"] == "cancelled", "the action was carried out")
    assert not [one for one in tab.complaints if "400 (Bad Request)" not in one]
