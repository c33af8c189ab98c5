"""What a broker and the program that compacts beside it say to each other.

Apart from the program itself, which needs Arrow: a broker must not wait for that, nor hold it.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from taskyard.journal.chain import Head, seal

#: Given the state directory and the sealed head up to which to go, in hexadecimal.
COMPACTION_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "taskyard.journal.compacting")


class CompactionReport(msgspec.Struct, omit_defaults=True):
    """How a compaction ended, as far as it is done beside the broker."""

    #: Why it could not be done; empty: all is there, and was read back.
    failed: str = ""
    rows: int = 0
    events: int = 0
    #: Tasks that ended in these rows, and tasks in the snapshot.
    ended: int = 0
    unfinished: int = 0


_decode = msgspec.json.Decoder(CompactionReport).decode


class CompactionChild:
    """The program at work, for one head. Raises OSError if it can't be started."""

    def __init__(self, directory: Path, identity: bytes, head: Head) -> None:
        self.head = head
        # A session of its own: Ctrl-C is for the broker, which ends this in its own time.
        self._process = subprocess.Popen(
            [*COMPACTION_COMMAND, str(directory.absolute()), seal(identity, head).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> CompactionReport | None:
        """How it ended, once; None while it has not."""
        if self._process.poll() is None:
            return None
        said, _ = self._process.communicate()
        try:
            return _decode(said)
        except msgspec.MsgspecError:
            status = self._process.returncode
            how = f"was killed by signal {-status}" if status < 0 else f"left with status {status}"
            return CompactionReport(f"the process that does it {how}")

    def kill(self) -> None:
        """Kill it: whatever it was at, the next one comes to the same end."""
        self._process.kill()
        self._process.communicate()
