"""The client for asyncio: the same as `Client`, awaited; and what `asyncio` itself does to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.client import client as both
from taskyard.client import task_buffer
from taskyard.client.client import AsyncClient, Client
from taskyard.client.exchanges import AwaitingRunner
from taskyard.client.futures import Future, as_completed
from taskyard.client.internal import InternalClient
from taskyard.client.requests import scope_of
from taskyard.core.model import Submission, Terms
from taskyard.errors import (
    ClientClosed,
    NoBroker,
    Refused,
    TaskBlocked,
    TaskFailed,
    TimedOut,
    UserError,
)
from tests.cli.yard import Yard, running
from tests.client.test_session import Q, Stage
from tests.kit.processes import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

    Story = Callable[[AsyncClient], Coroutine[Any, Any, None]]

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard") / "state", worker=False) as running_yard:
        yield running_yard.start_worker("--allow", "operator", "--allow", "builtins")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    played = Stage(tmp_path / "broker.sock")
    with contextlib.closing(played.wire):
        yield played


def play(yard: Yard, scenario: Story) -> None:
    """Run a coroutine with a client in a new loop."""

    async def all_of_it() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), AsyncClient(state=yard.state) as client:
            await scenario(client)

    asyncio.run(all_of_it())


@asynccontextmanager
async def welcomed(stage: Stage) -> AsyncIterator[AsyncClient]:
    """Yield a client of a broker that the test plays, after its first answer."""
    client = AsyncClient(stage.wire.endpoint)
    status = asyncio.create_task(client.status())
    stage.reply(await next_request(stage), Q.Stats, document=b"{}")
    await status
    try:
        yield client
    finally:
        await client.close(0)


async def next_request(stage: Stage) -> Q:
    """Return the next request, received in another thread so that the loop runs."""
    return await asyncio.to_thread(stage.receive)


async def acknowledged(stage: Stage, count: int) -> dict[str, Q]:
    """Accept `count` tasks, in any number of requests. Return the request of each."""
    taken: dict[str, Q] = {}
    while len(taken) < count:
        asked = await next_request(stage)
        stage.reply(asked, Q.OK)
        taken |= {name.decode(): asked for name in asked.batch.name}
    return taken


# Methods.

#: Public members of a client. Another one names what it replaces.
MEMBERS_MAX = 22


def names_of(kind: type) -> list[str]:
    return sorted(name for name in dir(kind) if not name.startswith("_"))


def parameters_of(kind: type, name: str) -> list[tuple[Any, ...]] | None:
    member = inspect.getattr_static(kind, name)
    if not callable(member):
        return None
    parameters = inspect.signature(member).parameters.values()
    return [(one.name, one.kind, one.default, one.annotation) for one in parameters]


def test_methods_have_the_parameters_of_the_blocking_client() -> None:
    blocking, awaited = Client, AsyncClient
    assert names_of(blocking) == names_of(awaited)
    assert len(names_of(blocking)) <= MEMBERS_MAX
    for name in [*names_of(awaited), "__init__"]:
        if name != "__init__" or blocking is InternalClient:
            assert parameters_of(blocking, name) == parameters_of(awaited, name), name


def test_future_has_the_methods_of_a_blocking_future() -> None:
    blocking = {"await_sent"}  # for clients whose calls may block
    own = [name for name in vars(Future) if not name.startswith("_") and name not in blocking]
    standard = ["name", "done", "cancelled", "result", "exception", "add_done_callback"]
    assert [name for name in own + standard if not hasattr(Future, name)] == []


# Pauses and records.


def test_pause_and_resume_show_up_in_followed_records(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        batches = client.follow()
        assert (await anext(batches)).records == []  # from now on
        await client.pause("unserved")
        assert [one["service"] for one in (await client.status())["pauses"]] == ["unserved"]
        await client.resume("unserved")
        assert (await client.status())["pauses"] == []
        kinds: list[str] = []
        while "paused" not in kinds:  # the worker of the yard may join meanwhile
            kinds += [one["kind"] for one in (await anext(batches)).records]

    play(yard, scenario)


# Outcomes of tasks.


def test_task_is_submitted_and_awaited(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        assert await client.submit(["echo", "hi"]) == "hi\n"
        assert await client.submit("operator:add", args=[20, 22]) == 42
        named = client.submit("builtins:dict", kwargs={"a": [1, None]}, name="named", retries=1)
        assert (named.name, await named) == ("named", {"a": [1, None]})
        after = client.submit(["echo", "then"], after=[named])
        assert await after == "then\n"

    play(yard, scenario)


def test_failure_is_raised_with_its_reason_as_often_as_it_is_awaited(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        future = client.submit(["sh", "-c", "echo why >&2; exit 3"], name="fails")
        behind = client.submit(["true"], name="behind", after=["fails"])
        for _ in range(2):
            with pytest.raises(TaskFailed, match=r"^task fails failed: exit status 3: why$"):
                await future
        with pytest.raises(TaskBlocked):
            await behind
        assert isinstance(future.exception(), TaskFailed)
        assert await future.state == "failed"
        assert (await future.why()).startswith("it failed after 1 attempt: exit status 3: why")
        assert repr(future) == "<Future of task 'fails': finished raised TaskFailed>"

    play(yard, scenario)


def test_refused_task_is_found_inside_a_batch(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        await client.submit(["true"], name="taken")
        futures = [client.submit(["echo", str(n)]) for n in range(100)]
        with pytest.raises(Refused, match="task taken was refused"):
            await client.submit(["false"], name="taken")
        assert await asyncio.gather(*futures) == [f"{n}\n" for n in range(100)]
        with pytest.raises(UserError, match="neither 'module:function' nor a list"):
            client.submit("echo hi")
        with pytest.raises(UserError, match="only for a function"):
            client.submit(["echo"], args=[1], retries=1)

    play(yard, scenario)


def test_cancelled_task_raises_what_a_blocking_future_raises(yard: Yard) -> None:
    """`asyncio.CancelledError` would mean that the waiter was cancelled."""

    async def scenario(client: AsyncClient) -> None:
        future = client.submit(b"", service=UNSERVED)
        behind = client.submit(["true"], after=[future])
        assert await future.cancel()
        for one in (future, behind):
            with pytest.raises(concurrent.futures.CancelledError):
                await one
            with pytest.raises(concurrent.futures.CancelledError):
                one.exception()
        done = client.submit(["true"])
        await done
        assert not await done.cancel()
        assert repr(future).endswith(": cancelled>")

    play(yard, scenario)


def test_result_of_an_unsettled_future_raises(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        future = client.submit(b"", service=UNSERVED)
        for ask in (future.result, future.exception):
            with pytest.raises(asyncio.InvalidStateError, match="not settled yet"):
                ask()
        assert not future.done()
        assert not future.cancelled()
        await future.cancel()

    play(yard, scenario)


# With asyncio.


def test_futures_work_with_gather_wait_for_and_shield(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        futures = await client.map("operator:neg", range(20))
        assert await asyncio.gather(*futures) == [-n for n in range(20)]
        assert sorted([await one for one in asyncio.as_completed(futures)]) == list(range(-19, 1))
        assert await asyncio.wait_for(futures[3], 1) == -3
        assert await asyncio.shield(futures[4]) == -4
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(twice(future)) for future in futures]
        assert [task.result() for task in tasks] == [-2 * n for n in range(20)]

    async def twice(future: Future[Any, Any]) -> Any:
        return 2 * await future

    play(yard, scenario)


def test_future_of_a_blocking_client_is_awaited_in_any_loop(yard: Yard) -> None:
    async def scenario() -> None:
        futures = client.map("operator:neg", range(5))
        assert await asyncio.gather(*futures) == [0, -1, -2, -3, -4]
        assert await futures[1] == -1
        with pytest.raises(TaskFailed, match="exit status 1"):
            await client.submit(["false"])
        never = client.submit(b"", service=UNSERVED)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(never, 0.01)
        assert (never.done(), never.state) == (False, "ready")
        assert never.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await never

    with InternalClient(state=yard.state) as client:
        asyncio.run(scenario())


def test_wait_returns_settled_and_unsettled_futures(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        good, never = client.submit(["true"]), client.submit(b"", service=UNSERVED)
        bad = client.submit(["false"])
        for when, settled in (("FIRST_COMPLETED", good), ("FIRST_EXCEPTION", bad)):
            waiting: Any = {settled, never}  # it takes whatever has the callbacks of a future
            done, pending = await asyncio.wait(waiting, return_when=when)
            assert (done, pending) == ({settled}, {never})
        assert (await asyncio.wait([never], timeout=0.01))[1] == {never}  # type: ignore[type-var]
        await never.cancel()

    play(yard, scenario)


def test_timeout_of_a_waiter_leaves_the_task_alone(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        future = client.submit(b"", service=UNSERVED)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await future
        assert (future.done(), await future.state) == (False, "ready")
        assert await future.cancel()

    play(yard, scenario)


def test_cancelled_waiter_leaves_the_task_and_the_other_waiters_alone(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        future = client.submit(b"", service=UNSERVED)

        async def awaits() -> None:
            await future

        first, second = asyncio.create_task(awaits()), asyncio.create_task(awaits())
        together = asyncio.gather(future, asyncio.sleep(PATIENCE_SECONDS))
        await asyncio.sleep(0)
        assert first.cancel()
        assert together.cancel()
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)
        assert first.cancelled()
        assert (future.done(), second.done(), await future.state) == (False, False, "ready")
        await future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await second
        with pytest.raises(asyncio.CancelledError):
            await together

    play(yard, scenario)


def test_callbacks_are_called_by_the_loop(yard: Yard) -> None:
    called: list[tuple[object, int]] = []

    def note(future: object) -> None:
        called.append((future, threading.get_ident()))

    def unwanted(_future: object) -> None:
        raise AssertionError

    async def scenario(client: AsyncClient) -> None:
        future = client.submit(["true"])
        future.add_done_callback(note)
        future.add_done_callback(unwanted)
        assert future.remove_done_callback(unwanted) == 1
        assert future.remove_done_callback(unwanted) == 0
        await future
        future.add_done_callback(note)
        await asyncio.sleep(0)
        here = threading.get_ident()
        assert called == [(future, here), (future, here)]

    play(yard, scenario)


def counting(loop: asyncio.AbstractEventLoop, patch: pytest.MonkeyPatch) -> list[object]:
    """How often another thread wakes the loop from here on."""
    woken: list[object] = []
    wake = loop.call_soon_threadsafe

    def counted(callback: Any, *words: Any, context: Any = None) -> asyncio.Handle:
        woken.append(callback)
        return wake(callback, *words, context=context)

    patch.setattr(loop, "call_soon_threadsafe", counted)
    return woken


def test_ten_thousand_futures_wake_the_loop_a_few_times(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: AsyncClient) -> None:
        futures = [client.submit(b"", service=UNSERVED) for _ in range(10_000)]
        await client.status()  # all of them are taken
        woken = counting(asyncio.get_running_loop(), monkeypatch)
        assert await client.cancel(service=UNSERVED) == 10_000
        settled = await asyncio.gather(*futures, return_exceptions=True)
        assert {type(one) for one in settled} == {concurrent.futures.CancelledError}
        assert len(woken) < 200

    play(yard, scenario)


def test_outcomes_that_arrive_while_the_loop_is_busy_wake_it_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with welcomed(stage) as client:
            held = [client.submit(b"", name=name) for name in ("a", "b", "c")]
            taken = await acknowledged(stage, 3)
            woken = counting(asyncio.get_running_loop(), monkeypatch)
            for name, asked in taken.items():
                stage.settle(asked, name, left=1)
            until(lambda: len(landed(held[0])) == 3, "all three are there")  # the loop is busy
            assert not any(future.done() for future in held)
            await asyncio.gather(*held)
            assert len(woken) == 1

    asyncio.run(scenario())


def test_first_outcome_wins(stage: Stage) -> None:
    async def scenario() -> None:
        async with welcomed(stage) as client:
            future = client.submit(b"", name="a")
            stage.settle((await acknowledged(stage, 1))["a"], "a", left=0)
            until(lambda: landed(future), "the result is there")
            future.set_exception(ClientClosed("closed a moment later"))
            assert await future == b""
            await asyncio.sleep(0)
            assert future.exception() is None

    asyncio.run(scenario())


def landed(future: Future[Any, Any]) -> Any:
    bridge: Any = future._client._bridge  # noqa: SLF001
    return bridge._arrived  # noqa: SLF001


# Inspecting and changing tasks.


def test_inspecting_methods_are_awaited(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        future = client.submit(["sh", "-c", "echo out; echo err >&2"], name="seen")
        await future
        assert (await client.show("seen"))["state"] == "done"
        assert (await client.status())["counts"]["done"] >= 1
        assert await client.result("seen") == "out\n"
        assert await client.output("seen", "result") == b"out\n"
        assert await client.submit(["printf", r"\377"]).bytes() == b"\xff"
        assert await client.output("seen") == b"out\nerr\n"
        assert await client.output("seen", "stderr", offset=1, count=2) == b"rr"
        assert (await client.why("seen")).startswith("it ")
        assert await (await client.future("seen")) == "out\n"
        with pytest.raises(UserError, match="unknown task 'no-such'"):
            await client.future("no-such")

    play(yard, scenario)


def test_tasks_are_listed_page_by_page(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        names = [f"page-{n:04}".encode() for n in range(2_500)]
        terms = Terms(campaign=b"pages", service=UNSERVED.encode())
        with InternalClient(client.broker) as blocking:
            assert blocking.create(Submission(names, [b""], [terms])) == 2_500
        scope = scope_of(campaign="pages")
        assert [one["name"].encode() async for one in client.tasks(scope)] == names
        assert len([one async for one in client.tasks(match="page-249")]) == 10
        assert await client.cancel(campaign="pages") == 2_500

    play(yard, scenario)


def test_waiting_for_campaigns(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        client.submit(["true"], name="w1", campaign="w")
        client.submit(["false"], name="w2", campaign="w")
        await client.campaign("w").wait(PATIENCE_SECONDS)
        counts = await client.campaign("w").status()
        assert (counts["done"], counts["failed"]) == (1, 1)
        assert await client.retry(["w/w2"]) == 1
        client.submit(b"", name="w3", campaign="w", service=UNSERVED)
        with pytest.raises(TimedOut, match=r"not settled after 0.05 s"):
            await client.campaign("w").wait(0.05)
        await client.cancel(["w/w3"])

    play(yard, scenario)


def test_as_completed_yields_named_futures(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        futures = [client.submit(["echo", name], name=f"ac-{name}") for name in "abc"]
        twice = [*futures, futures[0]]
        found = [(done.name, done.result()) async for done in as_completed(twice)]
        assert sorted(found) == [("ac-a", "a\n"), ("ac-b", "b\n"), ("ac-c", "c\n")]
        late = client.submit(b"", service=UNSERVED)
        settled = as_completed([late, futures[0]], 0.05)
        assert await anext(settled) is futures[0]
        with pytest.raises(TimeoutError):
            await anext(settled)
        await late.cancel()

    play(yard, scenario)


def test_as_completed_of_no_futures_is_empty_for_both_clients() -> None:
    async def scenario() -> list[Future[Any, AwaitingRunner]]:
        nothing: list[Future[Any, AwaitingRunner]] = []
        return [done async for done in as_completed(nothing)]

    assert asyncio.run(scenario()) == []
    blocking: list[Future] = []
    assert list(as_completed(blocking)) == []


# Failures.


def test_missing_broker_raises_within_the_timeout(tmp_path: Path) -> None:
    async def with_a_context() -> None:
        async with AsyncClient(state=tmp_path / "state", timeout=0.2):
            raise AssertionError

    async def without() -> None:
        client = AsyncClient(state=tmp_path / "state", timeout=0.2)
        try:
            await client.submit(["true"])
        finally:
            await client.close()

    before = couriers()
    for scenario in (with_a_context, without):
        with pytest.raises(NoBroker, match=r"broker at ipc://.*: no answer within 0.2 s"):
            asyncio.run(scenario())
    until(lambda: couriers() <= before, "their threads end")


def couriers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "taskyard-client"}


def test_client_needs_a_running_loop(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient(state=tmp_path)


def test_loop_runs_while_an_answer_is_late(stage: Stage) -> None:
    async def scenario() -> None:
        async with welcomed(stage) as client:
            looking = asyncio.create_task(client.status(timeout=0.3))
            turns = 0
            while not looking.done():
                turns += 1
                await asyncio.sleep(0.01)
            assert turns > 3
            with pytest.raises(TimedOut, match=r"^the broker did not answer within 0.3 s$"):
                await looking

    asyncio.run(scenario())


def test_cancelling_a_task_that_does_not_end_in_time_returns_false(stage: Stage) -> None:
    async def scenario() -> None:
        async with welcomed(stage) as client:
            client._timeout = 0.1  # noqa: SLF001
            future = client.submit(b"", name="endless")
            await acknowledged(stage, 1)
            cancelling = asyncio.create_task(future.cancel())
            stage.reply(await next_request(stage), Q.OK, n=1)
            assert not await cancelling

    asyncio.run(scenario())


def test_cancelled_request_is_not_sent_again(stage: Stage) -> None:
    async def scenario() -> None:
        async with welcomed(stage) as client:
            waiting = asyncio.create_task(client.campaign("given-up").wait())
            assert (await next_request(stage)).scope.campaign == b"given-up"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            looking = asyncio.create_task(client.show("given-up", timeout=0.05))
            assert (await next_request(stage)).type == Q.Show
            with pytest.raises(TimedOut):
                await looking
            stage.process = 2  # whatever is open is sent again
            status = asyncio.create_task(client.status())
            asked = await next_request(stage)
            assert asked.type == Q.Stats
            stage.reply(asked, Q.Stats, document=b"{}")
            await status
            assert stage.is_quiet()

    asyncio.run(scenario())


def test_submit_never_blocks_on_a_full_buffer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_buffer, "TASKS_MAX", 0)

    async def scenario() -> None:
        async with welcomed(stage) as client:
            assert len([client.submit(b"") for _ in range(5_000)]) == 5_000

    asyncio.run(scenario())


def test_map_waits_for_acknowledgements(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "_TASKS_UNACKNOWLEDGED_MAX", 2)
    taken = []

    def items() -> Iterator[str]:
        for number in range(4):
            taken.append(number)
            yield str(number)

    async def scenario() -> None:
        async with welcomed(stage) as client:
            mapping = asyncio.create_task(client.map("operator:neg", items()))
            first = await next_request(stage)
            assert (taken, mapping.done()) == ([0, 1], False)
            stage.reply(first, Q.OK)
            await acknowledged(stage, 4 - len(first.batch.name))
            assert taken == [0, 1, 2, 3]
            receiving = asyncio.create_task(next_request(stage))  # answers heartbeats
            assert len(await mapping) == 4
            client.submit(b"")
            await receiving

    asyncio.run(scenario())


def test_closed_client_fails_its_futures_and_refuses_calls(yard: Yard) -> None:
    async def scenario() -> None:
        client = AsyncClient(state=yard.state)
        future = client.submit(b"", name="left", service=UNSERVED)
        await client.close()
        with pytest.raises(ClientClosed):
            await future
        with pytest.raises(ClientClosed):
            client.submit(["true"])
        with pytest.raises(ClientClosed):
            await client.status()
        await client.close()

    asyncio.run(scenario())
    with InternalClient(state=yard.state) as other:  # closing waited until it was taken
        assert other.cancel(["left"]) == 1


def test_close_waits_for_acknowledgements_unless_cancelled(stage: Stage) -> None:
    async def scenario() -> None:
        async with welcomed(stage) as client:
            future = client.submit(b"", name="a")
            await next_request(stage)
            began = time.monotonic()
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0.05)
            assert not closing.done()
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await client.close()  # it has hung up: there is nothing to wait for
            with pytest.raises(ClientClosed):
                await future
            assert time.monotonic() - began < PATIENCE_SECONDS / 2

    asyncio.run(scenario())


def test_cancelled_context_does_not_wait_for_a_dead_broker(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both, "CLOSE_ON_ERROR_SECONDS", 0.05)

    async def scenario() -> None:
        client = AsyncClient(stage.wire.endpoint)

        async def inside() -> None:
            async with client:
                client.submit(b"")
                await asyncio.sleep(PATIENCE_SECONDS)

        running_inside = asyncio.create_task(inside())
        stage.reply(await next_request(stage), Q.Stats, document=b"{}")
        await next_request(stage)
        running_inside.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_inside
        await client.close()  # it has hung up: there is nothing to wait for

    asyncio.run(scenario())


def test_outcomes_after_the_loop_was_closed_are_dropped(stage: Stage) -> None:
    """The session's thread does not fail."""
    kept: list[AsyncClient] = []
    asked: list[Q] = []

    async def scenario() -> None:
        client = AsyncClient(stage.wire.endpoint)
        kept.append(client)
        client.submit(b"", name="a")
        asked.append(await next_request(stage))

    asyncio.run(scenario())
    stage.reply(asked[0], Q.OK)
    stage.settle(asked[0], "a", left=0)
    kept[0]._session.stop_accepting()  # noqa: SLF001


def test_future_is_awaited_in_any_loop(yard: Yard) -> None:
    async def scenario(client: AsyncClient) -> None:
        future = client.submit(b"", service=UNSERVED)

        async def elsewhere() -> None:
            with pytest.raises(concurrent.futures.CancelledError):
                await future

        waiting = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
        assert await future.cancel()
        await waiting

    play(yard, scenario)


def test_each_loop_has_its_own_client(yard: Yard) -> None:
    async def negative(number: int) -> Any:
        async with AsyncClient(state=yard.state) as client:
            return await client.submit("operator:neg", args=[number])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda number: asyncio.run(negative(number)), range(8))
        assert list(results) == [-number for number in range(8)]


def test_killed_broker_loses_and_doubles_no_task(tmp_path: Path) -> None:
    count = 5_000

    async def scenario(yard: Yard) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), AsyncClient(state=yard.state) as client:
            futures = [client.submit(b"", service=UNSERVED) for _ in range(count // 2)]
            await asyncio.sleep(0)
            yard.kill_broker()
            futures += [client.submit(b"", service=UNSERVED) for _ in range(count // 2)]
            status = asyncio.create_task(client.status())
            await asyncio.to_thread(yard.start_broker)
            counts = (await status)["counts"]
            assert counts["ready"] == sum(counts.values()) == count
            yard.kill_broker()
            await asyncio.to_thread(yard.start_broker)
            assert await client.cancel(service=UNSERVED) == count
            settled = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(one) for one in settled} == {concurrent.futures.CancelledError}

    with running(tmp_path / "state", worker=False) as yard:
        asyncio.run(scenario(yard))
