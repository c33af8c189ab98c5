"""One process at a time writes a state directory. Tested with real processes."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from taskyard.errors import ExitCode, StateLocked, UnusableFile, UserError
from taskyard.journal.files import OWNER_VARIABLE, check_owner
from taskyard.journal.lock import FILE_NAME, StateLock

HOLD = """
import sys
from pathlib import Path
from taskyard.journal.lock import StateLock
lock = StateLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

#: The holder ends without releasing the lock. Its child lives on and reports for it.
END_BEFORE_THE_CHILD = """
import os, subprocess, sys
from pathlib import Path
from taskyard.journal.lock import StateLock
lock = StateLock(Path(sys.argv[1]))
program = "import sys; print('held', flush=True); sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", program], close_fds=False)
os._exit(0)
"""

END_BEFORE_THE_FORK = """
import os, sys
from pathlib import Path
from taskyard.journal.lock import StateLock
lock = StateLock(Path(sys.argv[1]))
if os.fork() == 0:
    print("held", flush=True)
    sys.stdin.read()
os._exit(0)
"""


def started(script: str, directory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def ended(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b"")


def test_second_process_is_refused_with_the_holders_process_id(tmp_path: Path) -> None:
    holder = started(HOLD, tmp_path)
    with pytest.raises(StateLocked) as caught:
        StateLock(tmp_path)
    ended(holder)
    assert str(caught.value) == (
        f"state directory {tmp_path}: in use by process {holder.pid} "
        "(stop it, or use another --state)"
    )
    assert caught.value.exit_code == ExitCode.USAGE


def test_holder_that_ends_frees_it(tmp_path: Path) -> None:
    ended(started(HOLD, tmp_path))
    StateLock(tmp_path).release()


def test_sigkill_of_the_holder_frees_it(tmp_path: Path) -> None:
    holder = started(HOLD, tmp_path)
    holder.send_signal(signal.SIGKILL)
    ended(holder)
    StateLock(tmp_path).release()


def test_second_lock_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with (
        StateLock(tmp_path),
        pytest.raises(StateLocked, match=f"in use by process {os.getpid()} "),
    ):
        StateLock(tmp_path)
    StateLock(tmp_path).release()


@pytest.mark.parametrize("script", [END_BEFORE_THE_CHILD, END_BEFORE_THE_FORK])
def test_child_that_outlives_the_holder_does_not_keep_it(tmp_path: Path, script: str) -> None:
    holder = started(script, tmp_path)
    holder.wait()
    StateLock(tmp_path).release()
    ended(holder)


def test_released_lock_is_free_while_a_child_starts(tmp_path: Path) -> None:
    lock = StateLock(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
    )
    lock.release()
    StateLock(tmp_path).release()
    child.communicate(b"\n")


def test_releasing_twice_is_once(tmp_path: Path) -> None:
    lock = StateLock(tmp_path)
    lock.release()
    with StateLock(tmp_path):
        lock.release()
        with pytest.raises(StateLocked):
            StateLock(tmp_path)


def test_holder_without_a_process_id_is_another_process(tmp_path: Path) -> None:
    with StateLock(tmp_path):
        (tmp_path / FILE_NAME).write_bytes(b"")
        with pytest.raises(StateLocked, match="in use by another process "):
            StateLock(tmp_path)


def test_state_directory_is_made_private(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "state"
    with StateLock(directory):
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"")
    with pytest.raises(UnusableFile, match=r"state directory .*/state: Not a dir"):
        StateLock(tmp_path / "state")


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "directory"])
def test_lock_that_is_no_file_is_refused_and_nothing_is_written(tmp_path: Path, kind: str) -> None:
    state, precious = tmp_path / "state", tmp_path / "precious"
    state.mkdir(mode=0o700)
    precious.write_text("kept")
    lock = state / FILE_NAME
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(precious if kind == "link" else tmp_path / "missing")
    with pytest.raises(UserError) as refused:
        StateLock(state)
    assert kind == "directory" or str(lock) in str(refused.value)
    assert precious.read_text() == "kept"
    assert not (tmp_path / "missing").exists()


def test_link_to_a_state_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with StateLock(tmp_path / "link"), pytest.raises(StateLocked):
        StateLock(tmp_path / "real")


@pytest.mark.needs("root")
class TestOwner:
    OTHER = 65534

    @pytest.fixture
    def foreign(self, tmp_path: Path) -> Path:
        state = tmp_path / "state"
        state.mkdir(mode=0o700)
        os.chown(state, self.OTHER, self.OTHER)
        return state

    def test_root_refuses_a_state_directory_of_another_user(self, foreign: Path) -> None:
        with pytest.raises(UserError, match=r"belongs to user 65534, not to user 0 .*OWNER=65534"):
            StateLock(foreign)
        assert not [*foreign.iterdir()]

    @pytest.mark.parametrize(("owner", "is_accepted"), [("any", 1), ("65534", 1), ("1000", 0)])
    def test_variable_names_whose_it_may_be(
        self, foreign: Path, monkeypatch: pytest.MonkeyPatch, owner: str, is_accepted: int
    ) -> None:
        monkeypatch.setenv(OWNER_VARIABLE, owner)
        if is_accepted:
            StateLock(foreign).release()
        else:
            with pytest.raises(UserError, match="belongs to user 65534"):
                StateLock(foreign)

    def test_state_directory_of_root_is_accepted(self, tmp_path: Path) -> None:
        os.chown(tmp_path, 0, 0)
        check_owner(tmp_path, {})


@pytest.mark.parametrize(("mode", "is_open"), [(0o700, 0), (0o755, 0), (0o770, 1), (0o1777, 1)])
def test_state_directory_that_others_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_open: int
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(mode)
    StateLock(state).release()
    assert ("other users may write in it" in caplog.text) is bool(is_open)


def test_lock_that_another_process_looks_at_is_taken(tmp_path: Path) -> None:
    StateLock(tmp_path).release()
    looking = os.open(tmp_path / FILE_NAME, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    timer = threading.Timer(0.03, os.close, [looking])
    timer.start()
    with StateLock(tmp_path):
        timer.join()
