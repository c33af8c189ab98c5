"""Functions by value: of a session without a file, of scripts, and of a Jupyter notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.kit.kernel import Kernel
from tests.kit.processes import PATIENCE_SECONDS, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

SESSION = """
import dataclasses, enum, functools, threading
from taskyard import Executor

LOCK = threading.Lock()
FACTOR = 3

def times(x): return FACTOR * x

def factorial(n): return 1 if n < 2 else n * factorial(n - 1)

def is_even(n): return n == 0 or is_odd(n - 1)

def is_odd(n): return n != 0 and is_even(n - 1)

def add(n):
    def inner(x): return x + n
    return inner

@functools.lru_cache(maxsize=3)
def cached(n): return n if n < 2 else cached(n - 1) + cached(n - 2)

def locked():
    with LOCK: return 1

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: int
    def scaled(self): return Point(times(self.x))

class Odd(Exception): pass

def fail(point): raise Odd(point)

executor = Executor(slots=1)
submit = executor.submit
print(submit(times, 2).result())
FACTOR = 4
print(submit(times, 2).result())
print(list(executor.map(times, range(5), chunksize=2)), list(executor.map(fail, [])))
print(submit(factorial, 5).result(), submit(is_even, 10).result(), submit(cached, 20).result())
print(submit(lambda x: x, 3).result(), submit(add(5), 1).result())
print(submit(functools.partial(times, x=5)).result(), submit(Point(2).scaled).result())
scaled = Point.scaled
result = submit(Point.scaled, Point(1)).result()
print(type(result) is Point, result == Point(4), scaled is Point.scaled)
print(submit(lambda: Colour.RED).result() is Colour.RED, submit(lambda: Point).result() is Point)
print(submit(lambda: lambda x: x + FACTOR).result()(1))
error = submit(fail, Point(1)).exception()
print(type(error) is Odd, error.args, "in fail" in str(error.__cause__))
print(submit(locked).exception())
print(submit(lambda: LOCK).exception())
executor.shutdown()
"""

SESSION_PRINTS = """\
6
8
[0, 4, 8, 12, 16] []
120 True 6765
3 6
20 Point(x=8)
True True True
True True
5
True (Point(x=1),) True
function <function locked> can't be pickled: cannot pickle '_thread.lock' object (it uses 'LOCK', \
of type lock: make that inside the function)
function <function <lambda>> can't be pickled: cannot pickle '_thread.lock' object (it uses \
'LOCK', of type lock: make that inside the function)
"""


def run_python(directory: Path, *words: str, stdin: str = "") -> tuple[int, str, str]:
    """Run Python to its end. Return its exit status and output, without addresses."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    words_out = [part.partition(">")[2] for part in done.stdout.split(" at 0x")[1:]]
    out = ">".join([done.stdout.split(" at 0x")[0], *words_out])
    return done.returncode, out, done.stderr


def test_program_on_stdin_calls_everything_that_it_defines(tmp_path: Path) -> None:
    assert run_python(tmp_path, "-", stdin=SESSION) == (0, SESSION_PRINTS, "")


def test_interactive_session_calls_what_was_typed(tmp_path: Path) -> None:
    typed = """\
        import taskyard
        executor = taskyard.Executor(slots=1)
        def double(x): return 2 * x

        list(executor.map(double, [1, 2]))
        def double(x): return "again", x

        executor.submit(double, 3).result()
        executor.shutdown()
    """
    status, out, err = run_python(tmp_path, "-i", stdin=dedent(typed))
    assert (status, out) == (0, "[2, 4]\n('again', 3)\n"), err


SCRIPT = """
    import threading
    from taskyard import Executor

    LOCK = threading.Lock()

    class Point:
        def __init__(self, x):
            self.x = x

    def double(point):
        return Point(2 * point.x)

    def locked(point):
        with LOCK:
            return double(point)

    print("runs as", __name__)

    if __name__ == "__main__":
        with Executor(slots=1) as executor:
            for function in CALLED:
                result = executor.submit(function, Point(4)).result()
                print(type(result) is Point, result.x)
                print([point.x for point in executor.map(function, [Point(1), Point(2)])])
"""


def test_script_with_an_unused_lock_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(dedent(SCRIPT).replace("CALLED", "[double]"))
    out = "runs as __main__\nTrue 8\n[2, 4]\n"
    assert run_python(tmp_path, "script.py") == (0, out, "")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path) as started:
        yield started


def test_notebook_maps_a_function_and_its_next_definition(kernel: Kernel) -> None:
    begin = """
        import taskyard
        executor = taskyard.Executor(slots=1)
        class Point:
            def __init__(self, x): self.x = x
        offset = 1
        def move(point): return Point(point.x + offset)
        points = list(executor.map(move, [Point(1), Point(2)]))
        print([type(one) is Point for one in points], [one.x for one in points])
    """
    assert kernel.run(dedent(begin)) == "[True, True] [2, 3]\n"
    again = """
        offset = 10
        def move(point): return point.x - offset
        print(list(executor.map(move, points)))
    """
    assert kernel.run(dedent(again)) == "[-8, -7]\n"
    assert kernel.run("executor.shutdown(); print('ended')") == "ended\n"
