"""Control files that are loaded, and delivered by agents with ZMailer's lines, through kills."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from taskyard.client.client import Client
from tests.kit.processes import Broker, Worker, run_here, until
from tests.worker import zmailer_agent
from tests.worker.zmailer_agent import control_file

AGENT = shlex.join([sys.executable, "-S", "-E", zmailer_agent.__file__, "local"])

USERS = {
    101: ("a-1", "a-2", "a-3"),
    102: ("b-1", "die-b", "b-3"),
    103: ("c-1", "defer-c", "gate-c"),
    104: ("d-1", "refuse-d", "d-3"),
}

MARKS = [["+", "+", "+"]] * 3 + [["+", "-", "+"]]


def marks(directory: Path, number: int) -> list[str]:
    lines = (directory / str(number)).read_text().splitlines()
    return [line[1] for line in lines if line.startswith("r")]


def test_recipients_are_delivered_once_although_agent_and_broker_are_killed(
    tmp_path: Path,
) -> None:
    settings = '[service.default]\nlines = "zmailer"\noverfeed = 9\nretries = [1, 1, 1]\n'
    (tmp_path / "taskyard.toml").write_text(settings + 'interval = "0.05s"\n')
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        for number, users in USERS.items():
            (tmp_path / str(number)).write_text(control_file(*users, number=number))
            assert run_here(tmp_path, "load", str(number))[0] == 0
        # Without --service the worker offers that of the loaded tasks.
        stack.enter_context(Worker(tmp_path, "--slots", "1", "--agent", AGENT))
        until(lambda: "~" in marks(tmp_path, 103))
        broker.kill()
        (tmp_path / "gate").touch()
        stack.enter_context(Broker(tmp_path))
        client = stack.enter_context(Client(state=tmp_path / ".taskyard"))
        until(lambda: client.status()["counts"]["done"] == 11)
        reasons = [one["reason"] for one in client.tasks() if one["state"] == "failed"]
        assert reasons == ["no such user"]
        until(lambda: [marks(tmp_path, number) for number in USERS] == MARKS)
    delivered = [user for users in USERS.values() for user in users if user != "refuse-d"]
    counts = {user: (tmp_path / user).read_text().count("delivered") for user in delivered}
    assert counts == dict.fromkeys(delivered, 1) | {"die-b": 2}
