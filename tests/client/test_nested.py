"""Tasks that submit tasks, and wait for them without holding their slots."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import taskyard
from taskyard import Executor
from taskyard.client.internal import InternalClient
from taskyard.errors import UserError
from tests.client import nested_calls
from tests.kit.processes import Broker, Running, Worker, run, until

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Leases of killed workers expire soon.
SHORT = ("--lease", "1s", "--heartbeat", "200ms")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a directory with the functions for the workers."""
    shutil.copy(nested_calls.__file__, tmp_path / "nested.py")
    return tmp_path


def a_worker(home: Path, *options: str, slots: int = 1) -> Running:
    return Worker(home, "--allow", "nested", "--slots", str(slots), *options)


@contextmanager
def a_yard(home: Path, *options: str, slots: int = 1) -> Iterator[InternalClient]:
    with (
        Broker(home) as broker,
        a_worker(home, *options, slots=slots),
        InternalClient(broker.endpoint) as client,
    ):
        yield client


def test_current_task_outside_a_task_is_an_error() -> None:
    with pytest.raises(UserError, match="current task: there is none"):
        taskyard.current()


def test_function_and_program_find_their_task_and_its_broker(home: Path) -> None:
    with a_yard(home) as client:
        found = client.submit("nested:facts", name="f", campaign="c").result()
        expected = {"name": "c/f", "attempt": 1, "broker": client.broker, "submitted": "leased"}
        assert found == expected | {"key": None}
        code = "import nested, json; print(json.dumps(nested.facts()))"
        program = client.submit([sys.executable, "-c", code], name="p", cwd=str(home))
        assert client.broker in program.result()
        words = [sys.executable, "-m", "taskyard", "submit", "--name", "inner", "true"]
        submitted = client.submit(words)
        assert submitted.result() == "inner\n"
        assert client.future("inner").result() == ""


@pytest.mark.parametrize(
    ("slots", "number", "value"),
    [
        (1, 5, 5),
        (2, 5, 5),
        *(pytest.param(slots, 7, 13, marks=pytest.mark.whole) for slots in (1, 2)),
    ],
)
def test_recursion_ends_on_few_slots(home: Path, slots: int, number: int, value: int) -> None:
    with a_yard(home, slots=slots) as client:
        assert client.submit("nested:fib", args=[number]).result(120) == value
        (worker,) = client.workers()
        assert (worker["slots_used"], worker["tasks"]) == (0, 0)


def test_recursion_of_pickled_calls_ends() -> None:
    with Executor(slots=1) as executor:
        assert executor.submit(nested_calls.fib_pickled, 4).result(120) == 3


@pytest.mark.parametrize("depth", [4, pytest.param(8, marks=pytest.mark.whole)])
def test_deep_recursion_ends_on_one_slot(home: Path, depth: int) -> None:
    with a_yard(home) as client:
        assert client.submit("nested:depth", args=[depth]).result(120) == depth


def test_waiting_call_gives_its_cores_back(home: Path) -> None:
    with a_yard(home, "--cpus", "1", slots=2) as client:
        call = "nested:depth_with_cores"
        assert client.submit(call, args=[3], cpus=1).result(60) == 3
        until(lambda: client.workers()[0]["resources_free"]["cpus"] == 1, "its cores are free")


def test_users_see_that_a_call_waits(home: Path) -> None:
    with a_yard(home) as client:
        parent = client.submit("nested:wait_for_later", args=["child"])
        until(lambda: client.workers()[0]["waiting"], "the call waits")
        (worker,) = client.workers()
        shown = [worker[key] for key in ("state", "slots_used", "tasks", "waiting")]
        assert shown == ["running", 0, 1, 1]
        assert "its call waits for other tasks, without its slots" in parent.why()
        assert "1 (1 waits)" in run(home, "workers")[1]
        parent.cancel()
        until(lambda: not client.workers()[0]["tasks"], "the call ends")
        assert client.workers()[0]["waiting"] == 0


def test_task_in_the_full_lane_of_its_caller_is_explained(home: Path) -> None:
    (home / "taskyard.toml").write_text("[service.call]\nlane_workers_max = 1\n")
    with a_yard(home) as client:
        client.submit("nested:wait_in_lane", args=["child", "one"], lane="one")
        until(lambda: client.workers()[0]["waiting"], "the call waits")
        text = client.why("child")
        assert "its running task waits for other tasks, perhaps for this one" in text


def test_waiting_for_a_campaign_gives_the_slot_back(home: Path) -> None:
    with a_yard(home) as client:
        assert client.submit("nested:wait_for_campaign", args=["inner"]).result(60) is None


def test_cancelled_parent_stops_waiting(home: Path) -> None:
    with a_yard(home) as client:
        parent = client.submit("nested:wait_for_later", args=["child"])
        until(lambda: client.existing(["child"]), "the child is submitted")
        assert parent.cancel()
        until(lambda: not client.workers()[0]["tasks"], "the worker stops the call")
        assert client.submit("nested:fib", args=[3]).result(60) == 2
        assert client.show("child")["state"] == "ready"


def wait_for_children(client: InternalClient, count: int) -> None:
    names = [f"child-{number}" for number in range(count)]
    until(lambda: len(client.existing(names)) == count, "the children are submitted")


def test_worker_is_killed_while_parents_wait(home: Path) -> None:
    with Broker(home) as broker, InternalClient(broker.endpoint) as client:
        with a_worker(home, *SHORT) as killed:
            parents = [
                client.submit("nested:wait_for_later", args=[f"child-{number}"])
                for number in range(3)
            ]
            wait_for_children(client, 3)
            killed.kill()
        later = ("--service", "later", "--command", "cat", "--slots", "1")
        with Worker(home, *later), a_worker(home):
            assert [one.result(60) for one in parents] == ["late 2"] * 3


def test_broker_is_restarted_while_parents_wait(home: Path) -> None:
    with a_worker_waiting(home) as broker, InternalClient(broker.endpoint) as client:
        parents = [
            client.submit("nested:wait_for_later", args=[f"child-{number}"]) for number in range(3)
        ]
        wait_for_children(client, 3)
        broker.kill()
        with (
            Broker(home),
            Worker(home, "--service", "later", "--command", "cat", "--slots", "1"),
        ):
            assert [one.result(60) for one in parents] == ["late 1"] * 3


@contextmanager
def a_worker_waiting(home: Path) -> Iterator[Broker]:
    with Broker(home) as broker, a_worker(home):
        yield broker


def test_key_of_a_worker_needs_the_role_of_a_producer(home: Path) -> None:
    listen = ("--secure", "--listen", "dwork=tcp://127.0.0.1:0")
    for name, roles in {"w": ["worker"], "both": ["worker", "producer"]}.items():
        options = [word for role in roles for word in ("--role", role)]
        assert run(home, "keys", "new", name, *options)[0] == 0
    with Broker(home, *listen) as broker, InternalClient(broker.endpoint) as client:
        endpoint = broker.endpoints[1]
        with a_worker(home, "--broker", endpoint, "--key", "w.key") as worker:
            text = client.submit("nested:submit_more").result(60)
            assert "this needs a producer's key" in text
            worker.terminate()
        with a_worker(home, "--broker", endpoint, "--key", "both.key"):
            found = client.submit("nested:facts").result(60)
            assert found["key"] == str(home / "both.key")
            assert found["broker"] == endpoint
            assert client.submit("nested:fib", args=[3]).result(60) == 2


def test_worker_of_two_brokers_gives_slots_back(home: Path) -> None:
    other = home / "other"
    other.mkdir()
    with Broker(home) as first, Broker(other, "--state", str(other)) as second:
        brokers = ("--broker", first.endpoint, "--broker", second.endpoint, "--cpus", "1")
        words = ("worker", "--until-eof", "--allow", "nested", "--slots", "1", *brokers)
        with (
            Running(home, *words),
            InternalClient(first.endpoint) as one,
            InternalClient(second.endpoint) as two,
        ):
            call = "nested:depth_with_cores"
            futures = [client.submit(call, args=[3], cpus=1) for client in (one, two)]
            assert [future.result(60) for future in futures] == [3, 3]
            assert two.submit("nested:facts").result(60)["broker"] == second.endpoint
