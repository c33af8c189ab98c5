"""A full disk stops programs with long output. Their tasks wait for room, uncharged."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from taskyard.client.client import Client
from taskyard.errors import Refused
from taskyard.journal.store import DISK_RESERVE_BYTES
from tests.kit.disks import small_disk
from tests.kit.processes import AT_THE_GATE, PATIENCE_SECONDS, Worker, until
from tests.system import value_calls
from tests.system.kit import Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskyard.client.futures import Future

MEBIBYTE = 1 << 20

#: Fits the disk, unless it has the ballast too.
OUTPUT_BYTES = 8 * MEBIBYTE
DISK_BYTES = DISK_RESERVE_BYTES + 24 * MEBIBYTE

SHORT = f"echo begun; {AT_THE_GATE}; echo done"
LONG = f"echo >> starts; {AT_THE_GATE.replace('gate', 'other')}; head -c {OUTPUT_BYTES} /dev/zero"


class Yard(NamedTuple):
    client: Client
    #: Where commands run.
    directory: Path
    ballast: Path

    def submit(self, name: str, script: str) -> Future[str]:
        return self.client.submit(["sh", "-c", script], name=name, cwd=str(self.directory))

    def starts(self) -> int:
        path = self.directory / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(params=["state", "shared"])
def yard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Yard]:
    """Run on a small disk, which has the state or a shared directory of blobs."""
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(DISK_BYTES))
        if request.param == "state":
            broker = stack.enter_context(Broker(disk))
        else:
            blobs = disk / "blobs"
            (tmp_path / "taskyard.toml").write_text(f'[blobs]\ndirectory = "{blobs}"\n')
            broker = stack.enter_context(Broker(tmp_path))
        client = stack.enter_context(Client(broker.endpoint))
        directory = tmp_path / "work"
        directory.mkdir()
        options = ("--broker", broker.endpoint, "--slots", "3", "--allow-pickle")
        stack.enter_context(Worker(directory, *options))
        yield Yard(client, directory, disk / "ballast")


@pytest.mark.slow  # it is due again after ten seconds
def test_program_without_room_for_its_output_waits_for_room_and_is_not_charged(yard: Yard) -> None:
    client = yard.client
    short, long = yard.submit("short", SHORT), yard.submit("long", LONG)
    gate = str(yard.directory / "other")
    call = client.submit(value_calls.bytes_at_the_gate, gate, OUTPUT_BYTES, name="call")
    until(lambda: yard.starts() == 1 and call.state == "leased", "all run")
    yard.ballast.write_bytes(bytes(DISK_BYTES - DISK_RESERVE_BYTES))
    until(lambda: not client.status()["accepting"], "the disk is full")
    (yard.directory / "other").touch()
    until(lambda: long.state == call.state == "delayed", "program and call are stopped")
    assert "nearly full" in client.why("call")
    assert "the broker can't write its output: the disk is nearly full" in client.why("long")
    with pytest.raises(Refused) as refused:
        yard.submit("new", "true").result(PATIENCE_SECONDS)
    assert refused.value.code == "full"
    (yard.directory / "gate").touch()
    assert short.result(PATIENCE_SECONDS) == "begun\ndone\n"
    text = "it is due when the broker's disk has room again: "
    until(lambda: client.why("long").startswith(text), "it waits for room alone")
    assert yard.starts() == 1
    yard.ballast.unlink()
    assert len(long.result(PATIENCE_SECONDS)) == OUTPUT_BYTES
    assert call.result(PATIENCE_SECONDS) == bytes(OUTPUT_BYTES)
    assert yard.starts() == 2
    assert [client.show(name)["failures"] for name in ("long", "call")] == [0, 0]
