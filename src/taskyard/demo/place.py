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

_MARKED: Final = "A demo of Taskyard works here. The next one replaces its files and no others.\n"

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


class Place(Struct, frozen=True):
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
    def memory(self) -> Path:
        """What the agents remember."""
        return self.directory / agent.MEMORY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.marker)


def prepare(directory: Path) -> Place:
    """A directory with the settings in it and nothing of an earlier demo. Raises UserError if it is
    somebody else's, or in use."""
    directory = directory.absolute()
    _check_ours(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        place = Place(directory, _locked(directory / MARKER))
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}; give another --out") from error
    try:
        _clear(place)
        _write_settings(place)
    except BaseException:
        os.close(place.marker)
        raise
    return place


def _check_ours(directory: Path) -> None:
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
    os.pwrite(descriptor, _MARKED.encode(), 0)
    return descriptor


def _clear(place: Place) -> None:
    """Remove what an earlier demo made, unless somebody uses its state."""
    if place.state.is_dir():
        try:
            StateLock(place.state).release()
        except StateLocked as locked:
            raise UserError(
                f"a broker runs on {place.state}, which an earlier demo has left; stop it "
                f"(`taskyard down --state {place.state}`), or give another --out"
            ) from locked
    for path in (place.state, place.tables, place.report, place.logs):
        if path.is_dir():
            shutil.rmtree(path)
    for path in (place.campaign, place.settings, place.memory):
        path.unlink(missing_ok=True)
    place.logs.mkdir()


def _write_settings(place: Place) -> None:
    # A string of JSON is one of TOML, too.
    command = json.dumps(shlex.join([sys.executable, agent.__file__]), ensure_ascii=False)
    place.settings.write_text(_SETTINGS.format(mail=campaign.MAIL, command=command))
