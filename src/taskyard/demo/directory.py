"""The directory of a demo: made anew each time, and nothing removed that is not the demo's own."""

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
from taskyard.errors import StateLocked, UserError
from taskyard.journal.lock import StateLock

if TYPE_CHECKING:
    from pathlib import Path

#: Says that a directory is a demo's; locked while one runs there.
MARKER: Final = ".taskyard-demo"

_MARKER_TEXT: Final = (
    "A demo of Taskyard works here. The next one replaces its files and no others.\n"
)

_SETTINGS: Final = """\
# The settings of the demo's broker, as a person would write them.

[lease]
heartbeat = "500ms"     # how often a worker shows life
expire = "4s"           # silence after which its tasks go to another

[service.{mail}]
command = {command}
overfeed = 2            # the next two of a lane lie ready beside its agent
interval = "1s"
retries = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
"""


class DemoDirectory(Struct, frozen=True):
    """Where everything of a demo is. Use it as a context manager: it is locked until the end."""

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
        return self.directory / "log"

    @property
    def agent_state(self) -> Path:
        """What the agents remember."""
        return self.directory / agent.OUTAGE_FILE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.marker)


def prepare_directory(directory: Path) -> DemoDirectory:
    """A directory with the settings in it and nothing of an earlier demo. Raises UserError if it is
    somebody else's, or in use."""
    directory = directory.absolute()
    _check_demo_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = DemoDirectory(directory, _locked(directory / MARKER))
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}; give another --out") from error
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
        raise UserError(f"{directory} is a file; give another --out")
    if not (directory / MARKER).exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is there and is not of an earlier demo; nothing in it was touched: give "
            "another --out"
        )


def _locked(marker: Path) -> int:
    descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"a demo runs in {marker.parent} already; wait for it, or give another --out"
        ) from None
    os.pwrite(descriptor, _MARKER_TEXT.encode(), 0)
    return descriptor


def _clear(paths: DemoDirectory) -> None:
    """Remove what an earlier demo made, unless somebody uses its state."""
    if paths.state.is_dir():
        try:
            StateLock(paths.state).release()
        except StateLocked as locked:
            raise UserError(
                f"a broker runs on {paths.state}, which an earlier demo has left; stop it "
                f"(`taskyard down --state {paths.state}`), or give another --out"
            ) from locked
    for path in (paths.state, paths.tables, paths.report, paths.logs):
        if path.is_dir():
            shutil.rmtree(path)
    for path in (paths.campaign, paths.settings, paths.agent_state):
        path.unlink(missing_ok=True)
    paths.logs.mkdir()


def _write_settings(paths: DemoDirectory) -> None:
    # A string of JSON is one of TOML, too.
    command = json.dumps(shlex.join([sys.executable, agent.__file__]), ensure_ascii=False)
    paths.settings.write_text(_SETTINGS.format(mail=campaign.MAIL, command=command))
