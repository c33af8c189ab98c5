"""The directory of a demo. Created anew each time, without removing any file of others."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from taskyard.demo import agent, campaign
from taskyard.errors import StateLocked, UnusableFile
from taskyard.journal.lock import StateLock

if TYPE_CHECKING:
    from pathlib import Path

#: Marks a directory as a demo's. Locked while a demo runs there.
MARKER: Final = ".taskyard-demo"

#: The folder of the processes' logs.
LOGS: Final = "log"

_MARKER_TEXT: Final = (
    "A demo of Taskyard uses this directory. The next demo replaces its files and no others.\n"
)

_SETTINGS: Final = """\
# The settings of the demo's broker.

[lease]
heartbeat = "500ms"     # interval of a worker's heartbeats
expire = "4s"           # without heartbeats, its tasks go to another worker

[service.{mail}]
command = {command}
overfeed = 2            # the worker prefetches two more tasks of a lane for its agent
interval = "1s"
retries = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
"""


class DemoDirectory(Struct, frozen=True):
    """The paths of a demo. Use it as a context manager, which holds the lock."""

    directory: Path
    marker: int

    @property
    def campaign(self) -> Path:
        return self.directory / "campaign.jsonl"

    @property
    def settings(self) -> Path:
        return self.directory / "taskyard.toml"

    @property
    def state(self) -> Path:
        return self.directory / ".taskyard"

    @property
    def tables(self) -> Path:
        return self.directory / "tables"

    @property
    def report(self) -> Path:
        return self.directory / "report"

    @property
    def logs(self) -> Path:
        return self.directory / LOGS

    @property
    def agent_state(self) -> Path:
        """The agents' own file."""
        return self.directory / agent.OUTAGE_FILE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.marker)


def prepare_directory(directory: Path) -> DemoDirectory:
    """Create a directory with settings and without files of an earlier demo.

    Raises UserError if it is not a demo's, or in use.
    """
    directory = directory.absolute()
    _check_demo_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = DemoDirectory(directory, _locked(directory / MARKER))
    except OSError as error:
        raise UnusableFile(f"{directory}: {error.strerror} (use another --out)") from error
    try:
        _clear(paths)
        _write_settings(paths)
    except BaseException:
        os.close(paths.marker)
        raise
    return paths


def _check_demo_directory(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UnusableFile(f"{directory}: not a directory (use another --out)")
    if not (directory / MARKER).exists() and any(directory.iterdir()):
        raise UnusableFile(
            f"{directory}: exists and is not of an earlier demo, left unchanged (use another --out)"
        )


def _locked(marker: Path) -> int:
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateLocked(
            f"{marker.parent}: another demo is running here (use another --out)"
        ) from None
    os.pwrite(descriptor, _MARKER_TEXT.encode(), 0)
    return descriptor


def _clear(paths: DemoDirectory) -> None:
    """Remove the files of an earlier demo, unless a broker uses its state."""
    if paths.state.is_dir():
        try:
            StateLock(paths.state).release()
        except StateLocked as locked:
            raise StateLocked(
                f"{paths.state}: a broker of an earlier demo is running (stop it with "
                f"`taskyard down --state {paths.state}`, or use another --out)"
            ) from locked
    for path in (paths.state, paths.tables, paths.report, paths.logs):
        if path.is_dir():
            shutil.rmtree(path)
    for path in (paths.campaign, paths.settings, paths.agent_state):
        path.unlink(missing_ok=True)
    paths.logs.mkdir()


def _write_settings(paths: DemoDirectory) -> None:
    # A JSON string is also a TOML string. Braces in a command are doubled.
    line = shlex.join([sys.executable, agent.__file__]).replace("{", "{{").replace("}", "}}")
    command = json.dumps(line, ensure_ascii=False)
    paths.settings.write_text(_SETTINGS.format(mail=campaign.MAIL, command=command))
