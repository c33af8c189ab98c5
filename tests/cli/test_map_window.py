"""The window between who submits and who tells: how it is left."""

import threading
from concurrent.futures import Future
from typing import Any

from taskyard.cli.map import FutureWindow


def test_who_leaves_waits_for_the_line_that_is_being_written_and_none_follows() -> None:
    told: list[Any] = []
    is_writing, may_go_on = threading.Event(), threading.Event()

    def on_settled(future: Any) -> None:
        is_writing.set()
        may_go_on.wait()
        told.append(future.result())

    futures: list[Any] = [Future(), Future()]
    with FutureWindow(on_settled, lambda: None, in_order=False) as window:
        for future in futures:
            window.add(future)
        futures[0].set_result("one")
        is_writing.wait()
        threading.Timer(0.05, may_go_on.set).start()
    assert told == ["one"]
    futures[1].set_result("two")
    assert told == ["one"]
    assert window.added == 2
