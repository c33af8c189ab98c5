"""`taskyard.testing`: the real broker in memory, and tasks that run inside the test."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from taskyard import Client, Executor, Final, TaskBlocked, TaskFailed, UserError, testing
from tests.client import executor_calls as calls
from tests.kit.processes import PATIENCE_SECONDS, environment

#: A function's module, as a task names it.
CALLS = "tests.client.executor_calls"


def test_functions_and_programs_are_done_in_the_order_of_their_tasks() -> None:
    with testing.broker() as broker, broker.client() as client:
        first = client.submit("operator:add", args=[20, 22], name="first")
        last = client.submit(["echo", "hi"], name="last", after=[first])
        assert broker.run_all() == ["first", "last"]
        assert first.result(PATIENCE_SECONDS) == 42
        assert last.result(PATIENCE_SECONDS) == "hi\n"
        assert broker.run_all() == []


def test_functions_run_in_the_thread_of_the_test_and_can_be_mocked() -> None:
    with testing.broker() as broker, broker.client() as client:
        here = client.submit("threading:get_ident")
        mocked = client.submit(f"{CALLS}:size", args=["x"])
        with mock.patch(f"{CALLS}.size", return_value=99) as size:
            broker.run_all()
        assert here.result(PATIENCE_SECONDS) == threading.get_ident()
        assert mocked.result(PATIENCE_SECONDS) == 99
        size.assert_called_once_with("x")


def test_failures_are_reported_as_by_a_worker() -> None:
    with testing.broker() as broker, broker.client() as client:
        raised = client.submit(f"{CALLS}:refuse_odd", args=[1])
        exited = client.submit(["sh", "-c", "echo why >&2; exit 3"])
        behind = client.submit(["true"], after=[exited])
        broker.run_all()
        assert "Odd: 1" in str(raised.exception(PATIENCE_SECONDS))
        assert "exit status 3: why" in str(exited.exception(PATIENCE_SECONDS))
        assert isinstance(behind.exception(PATIENCE_SECONDS), TaskBlocked)
        assert "raise Odd(number)" in client.output(raised.name).decode()


def test_handler_that_returns_no_bytes_is_named() -> None:
    wrong: Any = bytes.decode
    with testing.broker() as broker, broker.client() as client:
        client.submit(b"x", service="post")
        with pytest.raises(UserError, match="handler of service post returned 'x', not bytes"):
            broker.run_all({"post": wrong})


def test_failed_task_is_tried_again_if_its_retries_say_so() -> None:
    with testing.broker() as broker, broker.client() as client:
        future = client.submit(f"{CALLS}:refuse_odd", args=[1], retries=1, backoff="1ms")
        with broker.worker():
            assert "Odd: 1" in str(future.exception(PATIENCE_SECONDS))
        assert client.show(future.name)["attempt"] == 2


def refuse_for_good(number: int) -> None:
    raise Final(f"no number {number}")


def test_final_failure_is_not_tried_again() -> None:
    with testing.broker() as broker, broker.client() as client:
        again: Any = {"retries": 3, "backoff": "1ms"}
        by_name = client.submit(f"{__name__}:refuse_for_good", args=[1], **again)
        by_object = client.submit(refuse_for_good, 2, **again)
        exited = client.submit(["sh", "-c", "exit 3"], final_exit_status=[3], **again)
        broker.run_all()
        assert "Final: no number 1" in str(by_name.exception(PATIENCE_SECONDS))
        with pytest.raises(Final, match="no number 2"):
            by_object.result(PATIENCE_SECONDS)
        assert "exit status 3" in str(exited.exception(PATIENCE_SECONDS))
        for future in (by_name, by_object, exited):
            assert client.show(future.name)["attempt"] == 1


def test_services_are_handled_by_the_tests_functions() -> None:
    def refuse(_payload: bytes) -> bytes:
        raise TaskFailed("not today")

    with testing.broker() as broker, broker.client() as client:
        told = client.submit(b"dear reader", service="post")
        refused = client.submit(["rm", "-r", "precious"])
        usual = client.submit("operator:neg", args=[1], service="cpu")
        left = client.submit(b"", service="other")
        broker.run_all({"post": bytes.upper, "exec": refuse, "cpu": None})
        assert told.result(PATIENCE_SECONDS) == b"DEAR READER"
        assert "not today" in str(refused.exception(PATIENCE_SECONDS))
        assert usual.result(PATIENCE_SECONDS) == b"-1"
        assert left.state == "ready"


def test_functions_can_be_limited_to_those_that_a_worker_would_allow() -> None:
    with testing.broker() as broker, broker.client() as client:
        good, bad = client.submit("operator:neg", args=[1]), client.submit("os:getpid")
        broker.run_all(allow=["operator"])
        assert good.result(PATIENCE_SECONDS) == -1
        assert "start the worker with --allow os" in str(bad.exception(PATIENCE_SECONDS))


def test_executor_has_its_calls_done_by_a_worker_here() -> None:
    with testing.broker() as broker, broker.worker(), Executor(broker.endpoint) as executor:
        assert executor.submit(os.getpid).result(PATIENCE_SECONDS) == os.getpid()
        assert list(executor.map(pow, [2, 3], [4, 5])) == [16, 243]
        error = executor.submit(calls.refuse_odd, 1).exception(PATIENCE_SECONDS)
        assert isinstance(error, calls.Odd)
        assert "raise Odd(number)" in str(error.__cause__)


def test_task_that_exits_does_not_end_the_test() -> None:
    with testing.broker() as broker, broker.client() as client:
        future = client.submit("sys:exit", args=[3])
        broker.run_all()
        assert "SystemExit: 3" in str(future.exception(PATIENCE_SECONDS))


def test_interruption_of_the_test_gives_the_task_back() -> None:
    with testing.broker() as broker, broker.client() as client:
        future = client.submit("operator:neg", args=[1])
        mocked = mock.patch("operator.neg", side_effect=KeyboardInterrupt)
        with mocked, pytest.raises(KeyboardInterrupt):
            broker.run_all()
        assert future.state == "ready"
        broker.run_all()
        assert future.result(PATIENCE_SECONDS) == -1


def test_worker_finishes_its_task_at_the_end_of_the_block(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with testing.broker() as broker, broker.client() as client:
        with broker.worker():
            future = client.submit(f"{CALLS}:read", args=[str(fifo)])
            fifo.write_text("late")  # returns when it is read
        assert future.result(PATIENCE_SECONDS) == "late"


def test_two_brokers_know_nothing_of_each_other() -> None:
    with testing.broker() as one, testing.broker() as two:
        future = one.client().submit(["true"], name="same")
        two.client().submit(["true"], name="same")
        assert one.run_all() == ["same"]
        assert future.result(PATIENCE_SECONDS) == ""
        assert two.run_all() == ["same"]


def test_nothing_is_left_behind() -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    with testing.broker():
        pass  # one-time resources of a process exist now
    before = left()
    with testing.broker() as broker:
        directory = Path(broker.endpoint.removeprefix("ipc://")).parent
        with broker.worker(), Client(broker.endpoint) as client:
            assert client.submit(["echo"]).result(PATIENCE_SECONDS) == "\n"
        broker.client()
    assert left() == before
    assert not directory.exists()


def test_fixture_works_in_a_conftest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from taskyard.testing import yard_broker\n")
    (tmp_path / "test_it.py").write_text(
        "def test_it(yard_broker):\n"
        "    future = yard_broker.client().submit(['echo', 'hi'])\n"
        "    yard_broker.run_all()\n"
        "    assert future.result() == 'hi\\n'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_pytest_is_not_needed() -> None:
    code = "import sys; sys.modules['pytest'] = None; import taskyard.testing"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'yard_borker'"):
        testing.yard_borker  # noqa: B018
