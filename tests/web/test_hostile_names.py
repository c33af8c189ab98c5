"""Names full of HTML and script, and names and commands with control characters: all are text.

Taskyard's own clients refuse names with control characters. A plain dwork client may send them.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import pytest
import zmq

from taskyard.client.client import Client
from taskyard.wire import dwork_pb2 as pb
from tests.kit.processes import Broker, until
from tests.web.test_browser import Site, Tab

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import BrowserContext

pytestmark = pytest.mark.slow

#: Each would run a script or end an element somewhere, if it were not text.
NAMES = (
    "</script><script>alert(1)</script>",
    "<svg onload=alert(1)>",
    "\"' onmouseover='alert(1)' autofocus onfocus=alert(1) x=\"",
    "javascript:alert(1)",
    "<img src=x onerror=alert(1)>'\"&--{{7*7}}",
    "a\u202e\ufeffb",
)
#: Sent by the raw socket of dwork.
CONTROLS = "nul\x00 red\x1b[31m flip\u202eline\nend"
SHOWN = "nul\\x00 red\\x1b[31m flip\\u202eline end"
LANE = "<b class=planted>lane</b>"
CAMPAIGN = "<i class=planted>campaign"
PLANTED = ".planted, img, svg[onload], [onfocus], [autofocus]"
SERVICE = "<u class=planted>service</u>"


def test_hostile_names_are_text_in_every_view(tmp_path: Path, window: BrowserContext) -> None:
    with (
        Broker(tmp_path, "--listen", "dwork=tcp://127.0.0.1:0") as broker,
        Client(state=tmp_path / ".taskyard") as client,
    ):
        for name in NAMES:
            argv = ["echo", f"{name}\x1b[31m\x07"]
            client.submit(argv, name=name, campaign=CAMPAIGN, lane=LANE, service=SERVICE)
        until(lambda: client.status()["counts"]["ready"] == len(NAMES), "all are submitted")
        site = Site(tmp_path)
        with site.process:
            page = window.new_page()
            dialogs: list[str] = []
            page.on("dialog", lambda dialog: dialogs.append(dialog.message))
            page.goto(site.quick_address)
            tab = Tab(page, site)
            tab.open("/tasks")
            tab.wait_for_text("#total", f"{len(NAMES)} tasks match")
            shown = page.inner_text("#rows")
            assert all(name in shown for name in (*NAMES[:5], LANE, SERVICE))
            views = ["/", "/campaigns", "/lanes", "/timeline", "/workers"]
            views += [f"{path}?{urlencode({key: CAMPAIGN})}" for path, key in CAMPAIGN_VIEWS]
            views += [f"/tasks?filter={quote(f'--match {one!r}')}" for one in (LANE, NAMES[1])]
            views += [f"/task?{urlencode({'name': f'{CAMPAIGN}/{name}'})}" for name in NAMES]
            for address in views:
                tab.open(address)
                assert not page.locator(PLANTED).count()
                assert "alert(1)" not in "".join(page.locator("script").all_inner_texts())
            assert page.inner_text("h1").startswith(CAMPAIGN)
            assert not dialogs
            assert not tab.complaints
            submit_plain(broker.endpoints[1], CONTROLS.encode())
            act_on_controls(tab)
            assert client.show(CONTROLS)["state"] == "cancelled"
            assert not tab.complaints


def submit_plain(endpoint: str, name: bytes) -> None:
    """Submit a task as a program that knows only dwork."""
    task = pb.TaskMsg(name=name, origin=b"raw").SerializeToString()
    plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    with plain:
        plain.connect(endpoint)
        plain.send(pb.QueryMsg(type=pb.QueryMsg.Create, task=[task]).SerializeToString())
        assert pb.QueryMsg.FromString(plain.recv()).type == pb.QueryMsg.OK


def act_on_controls(tab: Tab) -> None:
    """Find the task with control characters, and act on it alone and by a filter."""
    page = tab.page
    tab.open("/tasks")
    page.locator("#rows a").filter(has_text=SHOWN).click()
    tab.wait_for_text("h1", SHOWN)
    page.on("dialog", lambda dialog: dialog.accept())
    page.fill("[name=priority]", "7")
    page.click("button[value=priority]")
    tab.wait_for_text(".note.good", "changed the priority of 1 task")
    tab.wait_for_text("h1", SHOWN)
    assert page.input_value("[name=priority]") == "7"
    match = shlex.quote(CONTROLS.partition(" ")[0])
    tab.open(f"/tasks?{urlencode({'filter': f'--match {match}'})}")
    tab.wait_for_text("#total", "1 task matches")
    page.click("button[value=cancel]")
    tab.wait_for_text(".note.good", "cancelled 1 task")
    tab.wait_for_text("#rows .state", "cancelled")


CAMPAIGN_VIEWS = (("/campaign", "name"), ("/graph", "campaign"))
