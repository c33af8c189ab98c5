"""Results of tasks in the arguments of others: real workers, killed ones, and refusals."""

from __future__ import annotations

import asyncio
import operator
import os
import pickle
import signal
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import pytest

import taskyard
from taskyard import AsyncClient, Client, Executor, Refused, TaskBlocked, TaskFailed, testing
from taskyard.campaign.task_spec import InvalidTask
from taskyard.errors import UserError
from taskyard.journal.blobs import FOLDER
from tests.kit.processes import (
    AT_THE_GATE,
    PATIENCE_SECONDS,
    Broker,
    Running,
    Worker,
    campaign,
    run_here,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Longer than a result in a message.
LONG = 3 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the directory of a broker with a worker that allows everything."""
    directory = tmp_path_factory.mktemp("yard")
    allow = ("--allow", "operator", "--allow", "builtins", "--allow-pickle")
    with Broker(directory), Worker(directory, *allow, "--slots", "2"):
        yield directory


@pytest.fixture
def client(place: Path) -> Iterator[Client]:
    with Client(state=place / ".taskyard", timeout=30) as one:
        yield one


def values(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (*args, kwargs) if kwargs else args


def test_future_of_another_client_is_there_before_the_call(client: Client) -> None:
    with Client(client.broker) as other:
        for number in range(20):  # each is a race
            squared = other.submit(pow, number, 2)
            assert client.submit(pow, squared, 1).result() == number**2
    with Executor(client.broker) as executor:
        for number in range(20):
            again: Any = client.submit(pow, executor.submit(pow, number, 2), 1)
            assert executor.submit(pow, again, 2).result() == number**4


def test_results_of_all_kinds_replace_futures_at_any_depth(client: Client) -> None:
    program = client.submit(["echo", "two words"])
    by_path = client.submit("operator:add", args=[1, 2])
    by_value = client.submit(lambda: {"set": {1}})
    long = client.submit(["head", "-c", str(LONG), "/dev/zero"])
    found = client.submit(values, program, [by_path, {"a": (by_value,)}], size=long).result()
    assert found == ("two words\n", [3, {"a": ({"set": {1}},)}], {"size": "\0" * LONG})
    futures = (program, by_path, by_value, long)
    assert client.submit(values, *futures).result() == tuple(one.result() for one in futures)


def test_results_replace_futures_of_a_call_by_path(client: Client) -> None:
    number = client.submit("operator:add", args=[1, 2])
    text = client.submit(["printf", "a"])
    like_ours = [{"$result": ["x", ""]}, {"$literal": 1}, {"$result": 1, "b": 2}]
    kept = {"n": [number], "text": text, "like": like_ours}
    later = client.submit("builtins:dict", kwargs=kept, priority=1)
    assert later.result() == {"n": [3], "text": "a", "like": like_ours}
    # Without a reference nothing is replaced.
    assert client.submit("builtins:list", args=[like_ours]).result() == like_ours


def test_pickled_result_replaces_a_future_of_a_call_by_path(client: Client) -> None:
    pickled = client.submit(operator.add, 20, 1)
    assert client.submit("operator:mul", args=[pickled, 2]).result() == 42


def test_earlier_task_is_given_by_its_name(client: Client) -> None:
    client.submit(["echo", "early"], name="early", campaign="letters")
    reference = taskyard.result("letters/early")
    assert client.submit(str.upper, reference).result() == "EARLY\n"
    assert client.submit("builtins:len", args=[reference]).result() == 6
    assert repr(reference) == "taskyard.result('letters/early')"


def test_executors_futures_and_map_take_results(place: Path) -> None:
    with Executor(state=place / ".taskyard") as executor:
        first = [executor.submit(operator.add, number, 1) for number in range(3)]
        assert list(executor.map(operator.mul, first, [10, 10, 10], chunksize=2)) == [10, 20, 30]
        add_all: Any = sum
        assert executor.submit(add_all, first).result() == 6
        in_closure: Any = lambda: first[0]  # noqa: E731
        assert executor.submit(in_closure).result() == 1


def test_futures_of_asyncio_are_taken(place: Path) -> None:
    async def total() -> Any:
        async with AsyncClient(state=place / ".taskyard") as client:
            first = client.submit("operator:add", args=[1, 2])
            return await client.submit("operator:add", args=[first, 10])

    assert asyncio.run(total()) == 13


def test_commands_take_texts_and_files(client: Client) -> None:
    client.submit(["printf", "line 1\nline 2\n\n"], name="a", campaign="c")
    long = client.submit(["head", "-c", str(LONG), "/dev/zero"])
    text = client.submit(["printf", "%s|", "<{result:a}>", "{} {x} {result}"], campaign="c")
    assert text.result() == "<line 1\nline 2\n>|{} {x} {result}|"
    name = long.full_name
    lengths = client.submit(
        ["wc", "-c", "{result_file:a}", f"{{result_file:{name}}}"], campaign="c"
    )
    assert [int(row.split()[0]) for row in lengths.result().splitlines()] == [15, LONG, LONG + 15]
    with pytest.raises(TaskFailed, match="3,145,728 bytes are too long for a word of a command"):
        client.submit(["echo", f"{{result:{name}}}"]).result()


def test_files_of_results_are_removed_with_their_tasks(client: Client) -> None:
    client.submit(["echo", "x"], name="x", campaign="files")
    path = client.submit(["echo", "{result_file:x}"], campaign="files").result().strip()
    until(lambda: not os.path.exists(path), "the file is removed")  # noqa: PTH110


def test_removed_long_result_is_the_reason_of_the_failure(place: Path, client: Client) -> None:
    first = client.submit(["head", "-c", str(LONG), "/dev/zero"], name="gone", campaign="files")
    first.result()
    for file in (place / ".taskyard" / FOLDER).rglob("*"):
        if file.is_file():
            file.unlink()
    later = client.submit(values, first)
    with pytest.raises(TaskFailed, match=r"result of files/gone: .* are missing"):
        later.result()


def test_campaign_file_names_results_as_dependencies(place: Path, client: Client) -> None:
    tasks = [
        {"name": "sum", "argv": ["expr", "{result:one}", "+", "{result:two}"]},
        {"name": "one", "argv": ["echo", "20"]},
        {"name": "two", "argv": ["echo", "22"], "after": ["one"]},
    ]
    file = campaign(place, tasks)
    code, _, err = run_here(place, "load", file, "--campaign", "sums")
    assert (code, err.count("rror")) == (0, 0), err
    assert client.future("sums/sum").result() == "42\n"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["sh", "-c", "echo {result:a}"], "its text would be a part of the script"),
        (["bash", "-ec", "x {result:a}", "y"], "its text would be a part of the script"),
        (["python3", "-c", "x({result:a})"], "its text would be a part of the script"),
    ],
)
def test_text_of_a_result_is_no_part_of_a_script(
    client: Client, argv: list[str], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        client.submit(argv)
    with pytest.raises(UserError, match=problem):
        client.submit(argv, priority=1)


def test_own_result_and_unknown_ones_are_refused(client: Client) -> None:
    with pytest.raises(Refused, match="task self would wait for itself"):
        client.submit(["echo", "{result:self}"], name="self").result()
    with pytest.raises(InvalidTask, match="waits for itself"):
        client.submit(["echo", "{result:self}"], name="self", priority=1)
    with pytest.raises(Refused, match="unknown predecessor nowhere/x"):
        client.submit(values, taskyard.result("nowhere/x")).result()
    with pytest.raises(UserError, match="name of a task: must be a text"):
        taskyard.result(3)  # type: ignore[arg-type]  # on purpose


def test_future_can_not_be_pickled_outside_a_call(client: Client) -> None:
    future = client.submit(["true"])
    with pytest.raises(TypeError, match=f"future of task {future.name}: can't be pickled, except"):
        pickle.dumps(future)


def test_task_behind_a_failed_one_names_it_and_its_reason(client: Client) -> None:
    first = client.submit(["sh", "-c", "echo no room >&2; exit 3"], name="first", campaign="bad")
    second = client.submit(values, first, name="second", campaign="bad")
    third = client.submit("builtins:len", args=[second])
    reason = "task bad/first failed: exit status 3: no room"
    for future in (second, third):
        error = future.exception()
        assert isinstance(error, TaskBlocked)
        assert str(error) == f"task {future.full_name}: blocked, because {reason}"
        assert isinstance(error.__cause__, TaskFailed)
        assert str(error.__cause__) == reason


def test_task_behind_a_cancelled_one_is_cancelled(client: Client) -> None:
    first = client.submit(["sleep", "60"])
    second = client.submit(values, first)
    assert first.cancel()
    with pytest.raises(CancelledError):
        second.result()


def test_function_by_path_gets_no_pickle_without_permission(tmp_path: Path) -> None:
    """The result of a program must not be unpickled because a payload asks for it."""
    payload = b'{"call":"builtins:len","args":[{"$result":["x","pickle"]}],"results":["x"]}'
    with (
        Broker(tmp_path) as broker,
        Worker(tmp_path, "--allow", "builtins"),
        Client(broker.endpoint, timeout=30) as client,
    ):
        client.submit(["printf", "x"], name="x").result()
        later = client.submit(payload, service="call", after=["x"])
        with pytest.raises(TaskFailed, match="result of x can't be decoded: NotPlain"):
            later.result()


def begun(client: Client, directory: Path) -> Any:
    """Return the future of a command that has its inputs and waits at a gate."""
    client.submit(["echo", "input"], name="first")
    script = f'cd {directory}; {AT_THE_GATE}; echo "got $1"; cat "$2"'
    argv = ["sh", "-c", script, "sh", "{result:first}", "{result_file:first}"]
    later = client.submit(argv, name="later")
    until(lambda: later.state == "leased", "a worker holds it")
    return later


def test_inputs_are_fetched_again_after_their_worker_was_killed(tmp_path: Path) -> None:
    with Broker(tmp_path), Client(state=tmp_path / ".taskyard", timeout=30) as client:
        with Worker(tmp_path, "--slots", "1", "--lease", "2s") as worker:
            later = begun(client, tmp_path)
            worker.kill()
        with Worker(tmp_path, "--slots", "1"):
            until(lambda: client.show("later")["attempt"] == 2, "another worker holds it")
            (tmp_path / "gate").touch()
            assert later.result() == "got input\ninput\n"


def test_inputs_survive_a_restart_of_the_broker(tmp_path: Path) -> None:
    state = tmp_path / ".taskyard"
    with Broker(tmp_path) as broker, Worker(tmp_path, "--slots", "1"):
        with Client(state=state, timeout=30) as client:
            begun(client, tmp_path)
        broker.kill()
        with Broker(tmp_path), Client(state=state, timeout=30) as client:
            (tmp_path / "gate").touch()
            assert client.future("later").result() == "got input\ninput\n"


def test_stopped_broker_only_delays_the_inputs(tmp_path: Path) -> None:
    """It is killed with the request for them, and another one answers it."""
    state = tmp_path / ".taskyard"
    with Broker(tmp_path) as broker, Client(state=state, timeout=30) as client:
        client.submit(["echo", "a"], name="a")
        client.submit(["echo", "{result:a}!"], name="b")
        with Worker(tmp_path, "--slots", "1"):
            broker.send(signal.SIGSTOP)
            broker.kill()
            with Broker(tmp_path), Client(state=state, timeout=30) as again:
                assert again.future("b").result() == "a!\n"


def test_worker_of_a_test_takes_results() -> None:
    with testing.broker() as broker, broker.client() as client:
        first = client.submit("operator:add", args=[1, 2], name="n")
        later = client.submit("operator:add", args=[first, 10])
        printed = client.submit(["cat", "{result_file:n}"])
        assert len(broker.run_all()) == 3
        assert (later.result(), printed.result()) == (13, "3")


def test_relayed_worker_gets_its_inputs(tmp_path: Path) -> None:
    listen = ("--listen", "dwork=tcp://127.0.0.1:0")
    with Broker(tmp_path, *listen) as broker:
        relay = ("relay", "--until-eof", "--to", f"dwork={broker.endpoints[1]}")
        with Running(tmp_path, *relay, "--listen", "dwork=tcp://127.0.0.1:0") as relaying:
            endpoint = relaying.line().split()[-1]
            with Worker(tmp_path, "--broker", endpoint), Client(broker.endpoint) as client:
                client.submit(["echo", "a"], name="a")
                assert client.submit(["echo", "{result:a}!"]).result(PATIENCE_SECONDS) == "a!\n"
