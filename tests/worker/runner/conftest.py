"""A directory with modules for tests of calls."""

from pathlib import Path

import pytest

#: A user's module, in the directory where the worker is started.
YARD = """
import os, signal, sys, threading
from os.path import join
from subprocess import run

SIZE = 7

def nothing(): pass
def add(a, b=0): return a + b
def echo(text): print(text)
def where(): return os.getcwd()
def go(directory): os.chdir(directory)
def look(name): return os.environ.get(name)
def search(directory):
    sys.path.insert(0, directory)
    globals()["__path__"] = [directory]
    import package
    package.__path__ = [directory]
def pid(): return os.getpid()
def size(text): return len(text)
def hold(mebibytes):
    held = bytearray(mebibytes << 20)
    signal.pause()
def letters(count): return "x" * count
def flood(count): os.write(1, bytes(count))
def strange(): return {1}
def lost(): return float("nan")
def raise_error(text):
    print("before")
    raise ValueError(text)
def raise_final(text):
    import taskyard
    raise taskyard.Final(text)
def raise_ours(name, *args):
    from taskyard import errors
    raise getattr(errors, name)(*args)
def submit_wrongly():
    import taskyard
    taskyard.task(retry=3)(nothing).submit()
def raise_cancelled():
    import asyncio
    raise asyncio.CancelledError
def leave(status): sys.exit(status)
def leave_at_once(status):
    print("last words")
    os._exit(status)
def crash(): os.kill(os.getpid(), signal.SIGSEGV)
def close_all():
    sys.stdout.close()
    sys.stderr.close()
def connection(): return int(sys.argv[1])
def hands_down_connection(): return os.get_inheritable(connection())
def write_nonsense():
    os.write(connection(), b"\\1\\0\\0\\0\\xff")
    signal.pause()
def close_connection(): os.close(connection())
def hang(fifo, ignore=False):
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(fifo, "w") as file:
        file.write(str(os.getpid()))
    signal.pause()
def read(fifo): return open(fifo).read()
def note(number):
    with open("notes", "a") as file:
        file.write(f"{number}\\n")
def write(fifo, text): open(fifo, "w").write(text)
def return_on_sigterm(fifo):
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    with open(fifo, "w") as file:
        file.write(str(os.getpid()))
    while not signals:
        signal.sigtimedwait([], 0.01)
    return "late"
def answer_and_die(fifo):
    threading.Thread(target=lambda: (open(fifo).read(), os._exit(9))).start()
    return "x" * 30_000  # one packet
def die_later():
    threading.Thread(target=lambda: (open("fifo").read(), os._exit(9))).start()
    return os.getpid()

class Unprintable(Exception):
    def __str__(self): raise RuntimeError

def raise_unprintable(): raise Unprintable

class Adder:
    @staticmethod
    def add(a, b): return a + b
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the worker's directory, with a module to call, and modules that shadow others."""
    (tmp_path / "yard.py").write_text(YARD)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json that was wanted')\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from os import getpid, getppid\n__all__ = ['getpid']\n")
    (package / "inner.py").write_text("def f(): return 'inner'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path
