"""Tables of listeners: their keys, dialects and variables, and what is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from docs.settings import tables
from taskyard.core.limits import SECOND_NS
from taskyard.settings.keys import DIALECTS, ListenSection, listener_keys
from taskyard.settings.loader import diff
from tests.settings.kit import loaded, written, wrong

PAGE: Final = Path(__file__).parents[2] / "docs" / "settings.md"

TABLES: Final = """\
[listen]
dwork = "tcp://127.0.0.1:1"

[listen.ping-pong]
endpoint = ["tcp://127.0.0.1:2", "ipc://front"]
service = "render"
lane = "night"
expire = "5s"
timeout = "2m"

[listen.thumbs]
dialect = "round-robin"
endpoint = "tcp://127.0.0.1:3"
identity = "tcp://login:3"
"""


def test_tables_are_read_beside_the_keys_of_other_dialects(tmp_path: Path) -> None:
    settings = loaded(written(tmp_path, TABLES))
    endpoints = ("tcp://127.0.0.1:2", f"ipc://{tmp_path}/front")
    assert settings.listen == {
        "dwork": ("tcp://127.0.0.1:1",),
        "ping-pong": endpoints,
        "thumbs": ("tcp://127.0.0.1:3",),
    }
    assert settings.listeners == {
        "ping-pong": ListenSection(
            dialect="ping-pong",
            endpoint=endpoints,
            service="render",
            lane="night",
            expire_ns=5 * SECOND_NS,
            timeout_ns=120 * SECOND_NS,
        ),
        "thumbs": ListenSection(
            dialect="round-robin", endpoint=("tcp://127.0.0.1:3",), identity="tcp://login:3"
        ),
    }
    assert [path for path in settings.all if path.startswith("listen.")] == [
        "listen.dwork",
        "listen.round-robin",
        "listen.wmp",
        "listen.ping-pong.endpoint",
        "listen.ping-pong.service",
        "listen.ping-pong.lane",
        "listen.ping-pong.expire",
        "listen.ping-pong.timeout",
        "listen.thumbs.dialect",
        "listen.thumbs.endpoint",
        "listen.thumbs.identity",
    ]
    assert str(settings.all["listen.thumbs.identity"].origin).endswith("taskyard.toml:14")


def test_variables_set_the_keys_of_a_table(tmp_path: Path) -> None:
    file = written(tmp_path, "[listen.ping-pong]\n[listen.my_thumbs]\n")
    settings = loaded(
        file,
        TASKYARD_LISTEN_PING_PONG="ipc:///a,ipc:///b",
        TASKYARD_LISTEN_PING_PONG_LANE="night",
        TASKYARD_LISTEN_MY_THUMBS_DIALECT="wmp",
        TASKYARD_LISTEN_MY_THUMBS_ENDPOINT="tcp://127.0.0.1:4",
        TASKYARD_LISTEN_MY_THUMBS_LANE="x",
    )
    assert settings.listen == {
        "ping-pong": ("ipc:///a", "ipc:///b"),
        "my_thumbs": ("tcp://127.0.0.1:4",),
    }
    assert settings.listeners["ping-pong"].lane == "night"
    (unknown,) = settings.unknown_variables
    assert unknown.startswith("unknown variable TASKYARD_LISTEN_MY_THUMBS_LANE")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[listen.ping-pog]\n", "1: [listen.ping-pog] needs a dialect (did you mean [listen.ping"),
        ("[listen.render]\n", "1: [listen.render] needs a dialect (dwork, round-robin, ping-pong"),
        ('[listen.a]\ndialect = "x"\n', "2: listen.a.dialect must be dwork or round-robin or pin"),
        ('[listen.wmp]\ndialect = "dwork"\n', "2: listen.wmp.dialect must be wmp (give the table"),
        ('[listen."a:b"]\ndialect = "wmp"\n', "1: a listener's name must have 1 to 40 letters, d"),
        ('[listen.native]\ndialect = "wmp"\n', "1: a listener's name must have 1 to 40 letters"),
        ("[listen.wmp]\nservise = 1\n", "2: unknown setting listen.wmp.servise (did you mean serv"),
        ('[listen.wmp]\nlane = "x"\n', "2: unknown setting listen.wmp.lane ("),
        ('[listen.wmp]\ntimeout = "9s"\n', "2: unknown setting listen.wmp.timeout ("),
        ('[listen.dwork]\nexpire = "9s"\n', "2: unknown setting listen.dwork.expire ("),
        ('[listen.dwork]\nidentity = "x"\n', "2: unknown setting listen.dwork.identity ("),
        ('[listen.wmp]\nservice = "exec"\n', "2: listen.wmp.service must be another one (only nat"),
        ('[listen.wmp]\nexpire = "299ms"\n', "2: listen.wmp.expire must be at least 300ms"),
        ('[listen.dwork]\ntimeout = "1ms"\n', "2: listen.dwork.timeout must be at least 300ms"),
        ('[listen.ping-pong]\ntimeout = "2s"\n', "2: listen.ping-pong.timeout must be at least l"),
        ("[listen.dwork]\nretries = 3\n", "2: unknown setting listen.dwork.retries ("),
        ('[listen.ping-pong]\nendpoint = "ipc:///a"\n', "2: listen.ping-pong.endpoint must be a l"),
        (
            '[listen.round-robin]\nendpoint = ["ipc:///a", "ipc:///b"]\nidentity = "x"\n',
            "3: listen.round-robin.identity must belong to one endpoint, not 2",
        ),
        (
            f'[listen.round-robin]\nidentity = "{"x" * 256}"\n',
            "2: listen.round-robin.identity must have at most 255 bytes, not 256",
        ),
        ('[listen]\nrender = "ipc:///a"\n', "2: unknown setting listen.render (settings of [lis"),
    ],
)
def test_problem_of_a_table_has_its_line_and_reason(
    text: str, problem: str, tmp_path: Path
) -> None:
    (found,) = wrong(written(tmp_path, text))
    assert found.startswith(f"taskyard.toml:{problem}")


def test_every_key_has_a_sentence_and_a_distinct_variable() -> None:
    keys = [key for one in DIALECTS for key in listener_keys(one, one)]
    assert all(re.fullmatch(r"[A-Z].*\.", key.help) and key.text(None) for key in keys)
    variables = [key.environment for key in keys]
    assert len(variables) == len(dict.fromkeys(variables))


def test_changed_table_needs_a_restart(tmp_path: Path) -> None:
    before = loaded(written(tmp_path, TABLES))
    changed = TABLES.replace('"render"', '"other"').replace("thumbs", "photos")
    after = loaded(written(tmp_path, changed))
    assert diff(before, after).sentence() == (
        "restart needed for listen.ping-pong.service, listen.thumbs.dialect, "
        "listen.thumbs.endpoint, listen.thumbs.identity, listen.photos.dialect, "
        "listen.photos.endpoint, listen.photos.identity"
    )
    replaced = loaded(written(tmp_path, '[listen]\nping-pong = ["ipc:///a", "ipc:///b"]\n'))
    changes = diff(before, replaced).needs_restart
    assert {"listen.ping-pong", "listen.ping-pong.endpoint"} <= {*changes}


def test_page_has_the_table_of_the_code() -> None:
    assert tables()["of a listener"] in PAGE.read_text(), "run ./yard docs"
