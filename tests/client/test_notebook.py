"""HTML of clients, campaigns and futures: escaped, without exceptions, within a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from taskyard.client import notebook
from taskyard.client.client import AsyncClient, Client
from taskyard.client.futures import Future
from taskyard.client.requests import CampaignCounts
from taskyard.web.address import bind, published
from tests.cli.yard import Yard, running
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"

EVIL = '<script>alert("1")</script>&'

#: A campaign has no `/`.
EVIL_CAMPAIGN = EVIL.replace("/", "|")


class Page(HTMLParser):
    """The text of a piece of HTML, and its elements."""

    def __init__(self, piece: str) -> None:
        super().__init__()
        self.text = ""
        self.elements: list[str] = []
        self._open: list[str] = []
        self.feed(piece)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert [name for name, _ in attrs if name != "style"] == []
        self.elements.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self.text += "\n" if tag == "div" else " "

    def handle_data(self, data: str) -> None:
        self.text += data


def seen(shown: Any) -> str:
    """Return the visible text on one line."""
    page = Page(shown._repr_html_())
    assert set(page.elements) <= {"div", "span", "code"}
    return " ".join(page.text.split())


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard") / "state") as running_yard:
        yield running_yard


@pytest.fixture
def client(yard: Yard) -> Iterator[Client]:
    with Client(state=yard.state) as connected:
        yield connected


def test_future_shows_its_task_and_what_came_of_it(client: Client) -> None:
    future = client.submit(["echo", "hi"], name="f")
    future.result(PATIENCE_SECONDS)
    assert seen(future) == "Future of task f done result: 'hi\\n'"
    failed = client.submit(["false"], name="g")
    failed.exception(PATIENCE_SECONDS)
    assert seen(failed) == "Future of task g failed task g failed: exit status 1"
    long = client.submit(["head", "-c", "1100000", "/dev/zero"], name="l")
    long.exception(PATIENCE_SECONDS)
    assert seen(long) == "Future of task l done result: str, 1,100,000 long"


def test_future_that_waits_says_why(client: Client) -> None:
    future = client.submit(b"", name="waits", service=UNSERVED)
    behind = client.submit(["true"], name="behind", after=["waits"])
    assert seen(future) == f"Future of task waits ready {future.why()}"
    assert seen(behind) == f"Future of task behind blocked {behind.why()}"
    future.cancel()
    assert seen(future) == "Future of task waits cancelled"


def test_client_shows_counts_and_workers(client: Client, yard: Yard) -> None:
    client.submit(["true"], name="one").result(PATIENCE_SECONDS)
    shown = seen(client)
    assert shown.startswith(f"Client {yard.broker.endpoint} ")
    assert " done" in shown
    assert shown.endswith(" 1 worker") or " 1 worker, " in shown
    assert " ready" not in shown
    assert repr(client) == f"<Client of {yard.broker.endpoint}>"


def test_client_links_to_a_page_that_runs(client: Client, yard: Yard) -> None:
    assert "http" not in client._repr_html_()
    with bind("127.0.0.1:0") as bound, published(Path(yard.state), bound) as page:
        html = client._repr_html_()
        assert f'<a href="{page.address}" target="_blank">{page.address}</a>' in html
        assert "token" not in html
    assert "http" not in client._repr_html_()


def test_campaign_shows_its_counts(client: Client) -> None:
    assert seen(client.campaign("c")) == "Campaign c no tasks"
    client.submit(b"", campaign="c", service=UNSERVED)
    assert seen(client.campaign("c")) == "Campaign c 1 ready"
    client.campaign("c").cancel()


def test_campaign_shows_its_failures_and_how_far_it_is(client: Client) -> None:
    for number in range(7):
        client.submit(["false"], name=f"bad-{number}", campaign="f").exception(PATIENCE_SECONDS)
    for name in ("waits", "waits-too", "last"):
        client.submit(b"", name=name, campaign="f", service=UNSERVED)
    first = seen(client.campaign("f"))
    assert first.startswith("Campaign f 7 failed 3 ready 70% ended bad-0 failed: exit status 1 bad")
    assert first.endswith("bad-4 failed: exit status 1 and 2 more")
    client.campaign("f").cancel()
    assert "% ended" not in seen(client.campaign("f"))


def test_campaign_shown_again_tells_the_time_left(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {**dict.fromkeys(("blocked", "delayed", "leased", "failed", "cancelled"), 0)}
    monkeypatch.setattr(notebook, "_query", lambda *_: CampaignCounts(counts, is_settled=False))
    shown = ""
    for seconds, done in ((0, 10), (60, 40)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: 100.0 + seconds)
        counts |= {"done": done, "ready": 100 - done}
        shown = seen(client.campaign("t"))
    assert shown == "Campaign t 40 done 60 ready 40% ended, 30.0/min, about 2 min left"


def test_long_texts_are_cut(client: Client) -> None:
    future = Future(client, b"x" * 4000, b"")
    future.set_exception(ValueError("y" * 100_000))
    assert len(future._repr_html_()) < 3000


def test_everything_is_escaped(client: Client) -> None:
    future = client.submit(["echo", EVIL], name=EVIL, campaign=EVIL_CAMPAIGN)
    future.result(PATIENCE_SECONDS)
    assert seen(future) == f"Future of task {EVIL_CAMPAIGN}/{EVIL} done result: {EVIL + chr(10)!r}"
    assert seen(client.campaign(EVIL_CAMPAIGN)) == f"Campaign {EVIL_CAMPAIGN} 1 done"
    failed = client.submit(["sh", "-c", 'echo "$0" >&2; exit 1', EVIL])
    failed.exception(PATIENCE_SECONDS)
    assert seen(failed).endswith(f"exit status 1: {EVIL}")


def settled(client: Client, value: object) -> Future:
    future = Future(client, b"t", b"")
    future.set_result(value)
    return future


class Unreadable:
    """Can't be shown."""

    def __repr__(self) -> str:
        raise ValueError("broken")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        ([1, {"a": "..."}], "[1, {'a': '...'}]"),
        ("x" * 500, "str, 500 long"),
        (b"x" * 500, "bytes, 500 long"),
        (list(range(1_000_000)), "list, 1,000,000 long"),
        ([["x" * 150], ["y" * 150]], "list, 2 long"),
        (10**300, "int"),
        (object, "<class 'object'>"),
    ],
)
def test_result_is_shown_if_it_is_small(client: Client, value: object, shown: str) -> None:
    assert seen(settled(client, value)) == f"Future of task t done result: {shown}"


def test_result_that_can_not_be_shown_is_no_error(client: Client) -> None:
    assert "Unreadable" in seen(settled(client, Unreadable()))


def test_whatever_goes_wrong_is_shown_in_its_place(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(notebook, "_query", fail)
    assert seen(client).endswith("can't be shown: ZeroDivisionError('of ours')")


def test_broker_that_is_gone_is_said_to_be_so_within_a_second(tmp_path: Path) -> None:
    with running(tmp_path / "state", worker=False) as yard:
        client = Client(state=yard.state, timeout=PATIENCE_SECONDS)
        future = client.submit(b"", name="left", service=UNSERVED)
        assert "ready" in seen(future)
        yard.kill_broker()
    for shown in (client, client.campaign("c"), future):
        began = time.monotonic()
        assert f"broker at {client.broker}: no answer within 1 s" in seen(shown)
        assert time.monotonic() - began < PATIENCE_SECONDS
    client.close(0)
    assert "the client is closed" in seen(client)


def test_what_is_awaited_looks_the_same_and_does_not_stop_the_loop(yard: Yard) -> None:
    async def scenario() -> None:
        async with AsyncClient(state=yard.state) as client:
            future = client.submit(["echo", "hi"], name="awaited", campaign="a")
            assert seen(future).startswith("Future of task a/awaited ")
            await future
            assert seen(future) == "Future of task a/awaited done result: 'hi\\n'"
            assert seen(client.campaign("a")) == "Campaign a 1 done"
            assert seen(client).startswith(f"AsyncClient {yard.broker.endpoint} ")
            cancelled = client.submit(b"", name="gone", service=UNSERVED)
            await cancelled.cancel()
            assert seen(cancelled) == "Future of task gone cancelled"

    asyncio.run(scenario())


def test_callback_that_looks_at_its_client_is_told_that_it_can_not(client: Client) -> None:
    looked: list[str] = []
    future = client.submit(["true"])
    future.add_done_callback(lambda _: looked.append(seen(client)))
    future.result(PATIENCE_SECONDS)
    with contextlib.suppress(Exception):
        client.status()  # after the callback, which the same thread calls
    assert "callback: must not wait for the client" in looked[0]
