"""Names full of HTML and script, and commands with control characters: all of them are text.

Task names with control characters are refused before they reach a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import pytest

from taskyard.client.client import Client
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
LANE = "<b class=planted>lane</b>"
CAMPAIGN = "<i class=planted>campaign"
PLANTED = ".planted, img, svg[onload], [onfocus], [autofocus]"
SERVICE = "<u class=planted>service</u>"


def test_hostile_names_are_text_in_every_view(tmp_path: Path, window: BrowserContext) -> None:
    with Broker(tmp_path), Client(state=tmp_path / ".taskyard") as client:
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


CAMPAIGN_VIEWS = (("/campaign", "name"), ("/graph", "campaign"))
