"""The executor in scripts: functions of the script itself, and how programs end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.kit.processes import PATIENCE_SECONDS, Running, all_children_of, environment, is_alive
from tests.kit.processes import until as wait_until

PYTHON = (sys.executable,)


def ran(directory: Path, *words: str, code: str = "") -> tuple[int, str, str]:
    """Run a program to its end. Return its exit status and output."""
    if code:
        (directory / "script.py").write_text(dedent(code))
    done = subprocess.run(
        [*PYTHON, *(words or ("script.py",))],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def test_script_calls_its_own_functions_and_gets_its_own_classes(tmp_path: Path) -> None:
    code = """
        from taskyard import Executor

        class Point:
            def __init__(self, x):
                self.x = x

        class Odd(Exception):
            pass

        def double(point):
            if point.x % 2:
                raise Odd(point.x)
            return Point(2 * point.x)

        print("imported as", __name__)

        if __name__ == "__main__":
            with Executor(slots=1) as executor:
                result = executor.submit(double, Point(4)).result()
                print(type(result) is Point, result.x)
                try:
                    executor.submit(double, Point(3)).result()
                except Odd as odd:
                    print("Odd", odd.args)
    """
    assert ran(tmp_path, code=code) == (
        0,
        "imported as __main__\nTrue 8\nOdd (3,)\n",
        "",
    )


def test_script_finds_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
    (tmp_path / "there" / "script.py").write_text(
        "import taskyard\nfrom beside import triple\n"
        "with taskyard.Executor(slots=1) as executor:\n"
        "    print(list(executor.map(triple, [1, 2])))\n"
    )
    # It needs no guard: nothing that is called is its own.
    assert ran(tmp_path, "there/script.py") == (0, "[3, 6]\n", "")


def test_module_that_is_run_calls_its_own_functions(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tool.py").write_text(
        "import taskyard\n"
        "def triple(x):\n    return 3 * x\n"
        'if __name__ == "__main__":\n'
        "    with taskyard.Executor(slots=1) as executor:\n"
        "        print(executor.submit(triple, 2).result())\n"
    )
    assert ran(tmp_path, "-m", "package.tool") == (0, "6\n", "")


def test_function_that_uses_a_lock_of_its_script_is_refused_with_its_name(tmp_path: Path) -> None:
    code = """
        import threading
        from taskyard import Executor

        lock = threading.Lock()  # so that the function can't travel by value

        def double(number):
            with lock:
                return 2 * number

        with Executor(slots=1) as executor:
            print(executor.submit(double, 2).result())
    """
    status, out, err = ran(tmp_path, code=code)
    assert (status, out) == (1, "")
    assert "it uses 'lock', of type lock: make that inside the function" in err


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError('mine')"])
def test_calls_are_finished_when_the_program_ends_without_a_shutdown(
    tmp_path: Path, ending: str
) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from taskyard import Executor

        executor = Executor(slots=1)
        for name in ("a", "b", "c"):
            executor.submit(Path(name).touch).add_done_callback(lambda _: print("done"))
        {ending}
    """
    status, out, err = ran(tmp_path, code=code)
    assert status == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert out == "done\n" * 3
    assert err == "" or "ValueError: mine" in err
    assert all((tmp_path / name).exists() for name in "abc")


def test_program_ends_with_unrun_calls_at_a_shared_broker(tmp_path: Path) -> None:
    code = """
        from taskyard import Client, Executor, testing

        with testing.broker() as broker:
            executor = Executor(broker.endpoint)
            future = executor.submit(pow, 2, 3)
            print(future.state)
        print("ends")
    """
    assert ran(tmp_path, code=code) == (0, "ready\nends\n", "")


def test_program_that_never_submits_ends(tmp_path: Path) -> None:
    code = "from taskyard import Executor\nexecutor = Executor(slots=1)\n"
    assert ran(tmp_path, code=code) == (0, "", "")


WAITING = """
    import signal, sys, time
    from pathlib import Path
    from taskyard import Executor

    executor = Executor(slots=1)
    future = executor.submit(Path(sys.argv[1]).read_text)
    while not future.running():
        time.sleep(0.01)
    print("running", flush=True)
    future.result()
"""


def of_its_family(running: Running) -> list[int]:
    """Its broker, its worker, and the processes of the worker."""
    family = all_children_of(running)
    for pid in [*family]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            family += [int(one) for one in (thread / "children").read_text().split()]
    return family


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_program_that_is_killed(
    tmp_path: Path, number: signal.Signals
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "script.py").write_text(dedent(WAITING))
    with Running(tmp_path, "script.py", "fifo", program=PYTHON) as running:
        assert running.line() == "running"
        wait_until(lambda: len(of_its_family(running)) == 3, "a call has its process")
        family = of_its_family(running)
        running.send(number).end()
        wait_until(lambda: not any(map(is_alive, family)), "its processes end")


def test_interruption_is_the_programs_own(tmp_path: Path) -> None:
    """Its processes are in other groups: a call runs on while the program cleans up."""
    os.mkfifo(tmp_path / "fifo")
    prints, waits = 'print("running", flush=True)', "future.result()"
    code = dedent(WAITING).replace(
        f"{prints}\n{waits}",  # in one block: the interrupt follows the output
        f"try:\n    {prints}\n    {waits}\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
        f"print({waits})",
    )
    assert "interrupted" in code
    (tmp_path / "script.py").write_text(code)
    with Running(tmp_path, "script.py", "fifo", program=PYTHON) as running:
        assert running.line() == "running"
        running.send(signal.SIGINT)
        assert running.line() == "interrupted"
        (tmp_path / "fifo").write_text("go on")
        assert running.line() == "go on"
        assert running.end()[0] == 0


def test_interrupted_program_ends_with_its_calls(tmp_path: Path) -> None:
    """Without a `with`: the interruption is caught by nothing, and calls are not finished."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "script.py").write_text(dedent(WAITING))
    with Running(tmp_path, "script.py", "fifo", program=PYTHON) as running:
        assert running.line() == "running"
        wait_until(lambda: len(of_its_family(running)) == 3, "a call has its process")
        family = of_its_family(running)
        code, _, err = running.send(signal.SIGINT).end()
        assert code == -signal.SIGINT
        assert err.rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: not any(map(is_alive, family)), "its processes end")
