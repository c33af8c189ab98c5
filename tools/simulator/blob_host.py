"""The blobs of a simulated broker on one machine: its disk, its processes, and what sweeps them.

Runs the product's `BlobFiles`, `BrokerBlobs` and `BlobRetention` on a simulated disk.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, cast

from simulator.blob_disk import BlobDisk, read_file
from simulator.outputs import draw_blobs
from simulator.plan import chance
from taskyard.broker.blob_retention import BlobRetention
from taskyard.broker.blobs import BlobLimits, BrokerBlobs
from taskyard.core import identity
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import StreamKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from simulator.disk import SimIndex, SimStore
    from simulator.world import World
    from taskyard.broker.turn import Broker
    from taskyard.journal.archive import Archive

_SEED_OFFSET: Final = 1 << 46

#: Characters of the names of directories that blobs are in.
_FOLDER_CHARACTERS: Final = 2


class BlobHost:
    """The directory of blobs, which outlives the broker's processes. Implements `BlobContents`."""

    def __init__(self, world: World) -> None:
        self._world = world
        rng = Random(world.plan.seed + _SEED_OFFSET)
        self._rng = rng
        self._disk = BlobDisk(rng, world.clock, has_faults=chance(rng, 0.5))
        self._disk.is_healed = lambda: world.healed
        self._disk.on_removed = self._on_removed
        self._disk.on_lost = self._on_lost
        self._drawn = draw_blobs(world.plan.seed, jumps=world.plan.faults.clock_jump > 0)
        self._files: BlobFiles | None = None
        self._retention: BlobRetention | None = None
        world.checker.blobs.store, world.checker.blobs.plan = self, self._drawn

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the product the disk."""
        self._disk.full = lambda: self._world.host.store.full
        with self._disk.installed():
            try:
                yield
            finally:
                self.crash()

    # The processes.

    def open(self, identity: bytes) -> BrokerBlobs:
        """Open the blobs for a process of the broker."""
        self._files = BlobFiles(self._disk.root / "blobs")
        limits = BlobLimits(keep_ns=self._drawn.keep_ns, grace_ns=self._drawn.grace_ns)
        return BrokerBlobs(self._files, identity.hex(), lambda: limits)

    def begin(self, broker: Broker, blobs: BrokerBlobs, rows: SimStore, index: SimIndex) -> None:
        """Sweep the blobs of a broker from now on."""
        ledger, result_of = broker.scheduler.ledger, broker.completer.result_of
        rows.on_kept = self.sweep_in_commit
        self._retention = BlobRetention(
            blobs, ledger, broker.clock, rows, cast("Archive", index), result_of
        )

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let the broker crash at any call inside."""
        self._disk.is_busy = True
        try:
            yield
        finally:
            self._disk.is_busy = False

    def run_step(self) -> int | None:
        """Sweep as the product does between turns. Return the time until the next step."""
        return None if self._retention is None else self._retention.run_step()

    def sweep_in_commit(self) -> None:
        """Go on with a sweep while a row is committed, at times, as another process may."""
        if self._retention is not None and chance(self._rng, 0.3):
            self._retention.run_step()

    def crash(self) -> None:
        """End the process. The files stay."""
        if self._files is not None:
            self._files.close()
        self._files = self._retention = None

    def cut_power(self) -> None:
        """Lose what was not synced."""
        self._disk.cut_power()

    def _on_lost(self, path: Path) -> None:
        """Note a stream that lost bytes. Blobs lose none."""
        files = BlobFiles(self._disk.root / "blobs")
        streams = {files.path(one.id): one.id for one in files.walk()}
        key = streams.get(path)
        if isinstance(key, StreamKey):
            name = identity.spelling(key.campaign, key.name)
            self._world.trace("bytes are lost", (name, key.attempt, key.stream))
            self._world.checker.blobs.torn[name, key.attempt, key.stream] = None

    # The contents, for the checker.

    def content(self, name: str) -> bytes | None:
        path = Path(self._disk.root, "blobs", name[:_FOLDER_CHARACTERS], name)
        return read_file(path) if path.exists() else None

    def names(self) -> list[str]:
        folders = Path(self._disk.root, "blobs").glob("[0-9a-f][0-9a-f]")
        return sorted(path.name for folder in folders for path in folder.iterdir())

    def _on_removed(self, name: str, used_ns: int) -> None:
        self._world.trace("a blob is removed", name)
        self._world.checker.blobs.on_removed(name, self._world.clock.wall_ns() - used_ns)
