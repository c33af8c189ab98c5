"""The meaning of a listener's settings in each dialect."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from taskyard.broker import listeners
from taskyard.broker.listeners import BUILDERS, ListenerOptions, Listeners
from taskyard.core.limits import SECOND_NS
from taskyard.errors import UnusableEndpoint
from taskyard.settings.keys import ListenSection
from taskyard.wire.dialect import TaskDefaults

ANY = "tcp://127.0.0.1:0"


@pytest.mark.parametrize("service", ["exec", "call", "pickle"])
def test_programs_are_for_clients_and_never_for_workers_of_other_dialects(service: str) -> None:
    options = ListenerOptions(ListenSection(dialect="ping-pong", service=service))
    assert options.worker_services() == (b"default",)
    assert options.tasks() == TaskDefaults(service.encode())
    assert options.notice().startswith(f"listener ping-pong: service {service} is for clients")


@pytest.mark.parametrize(
    ("given", "expire_ns", "lease_ns"),
    [
        ({}, 3, 60),
        ({"expire_ns": 90}, 90, 90),
        ({"timeout_ns": 9}, 3, 9),
        ({"expire_ns": 5, "timeout_ns": 7}, 5, 7),
    ],
)
def test_ping_pong_worker_without_pings_has_no_less_time(
    given: dict[str, Any], expire_ns: int, lease_ns: int
) -> None:
    times = {name: seconds * SECOND_NS for name, seconds in given.items()}
    (backend, _) = BUILDERS["ping-pong"](
        1, b"", ListenerOptions(ListenSection(dialect="ping-pong", **times))
    )
    settings = backend._settings  # type: ignore[attr-defined]  # noqa: SLF001
    assert (settings.expire_ns, settings.lease_ns) == (expire_ns * SECOND_NS, lease_ns * SECOND_NS)


@pytest.mark.parametrize("dialect", ["round-robin", "wmp"])
def test_silent_worker_is_pinged_before_it_expires(dialect: str) -> None:
    section = ListenSection(dialect=dialect, expire_ns=3 * SECOND_NS)
    (server,) = BUILDERS[dialect](1, b"", ListenerOptions(section))
    found: Any = server
    ping_ns = found._settings.ping_ns if dialect == "wmp" else found._table._settings.heartbeat_ns  # noqa: SLF001
    assert ping_ns == SECOND_NS


def test_listeners_of_one_name_share_a_server_and_others_do_not() -> None:
    with closing(Listeners(b"id")) as opened:
        section = ListenSection(dialect="wmp", service="render")
        for name in ("wmp", "wmp", "render"):
            opened.open(name, [ANY], section=section if name == "render" else None)
        lines = opened.ready_lines()
    assert [line.split()[1::2] for line in lines] == [["wmp"], ["wmp"], ["wmp", "render"]]
    assert [one.prefix for one in opened._others] == [b"wmp:", b"wmp@render:"]  # noqa: SLF001


def test_too_many_listeners_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "DIALECTS_MAX", 4)
    monkeypatch.setattr(listeners, "SOCKETS_MAX", 4)
    with closing(Listeners(b"id")) as opened:
        opened.open("ping-pong", [ANY, ANY])
        with pytest.raises(UnusableEndpoint, match="listener a: too many listeners"):
            opened.open("a", [ANY], section=ListenSection(dialect="wmp"))
        opened.open("dwork", [ANY])
        opened.open("dwork", [ANY])
        with pytest.raises(UnusableEndpoint, match="at most 4 endpoints"):
            opened.open("dwork", [ANY])
