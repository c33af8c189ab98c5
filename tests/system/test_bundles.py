"""A megabyte for thousands of recipients is stored once, whatever happens to the broker."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from taskyard import bundle_part
from taskyard.client.internal import InternalClient
from taskyard.client.submit import bundle_spec
from tests.kit.processes import run_here, until
from tests.system.kit import Broker
from tests.system.peers import InstantRunner, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from taskyard.worker.jobs import Job

RECIPIENTS = 2_000
#: With --whole. Each of them is sent the megabyte.
RECIPIENTS_WHOLE = 10_000
MEGABYTE = 1024 * 1024
BODY = "x" * MEGABYTE

#: Names, lanes, and the payload perhaps in SQLite's log and in its file.
DISK_BYTES_MAX = 5 * MEGABYTE

#: Tasks and lanes of all recipients, and some copies of the message during submission.
MEMORY_BYTES_MAX = 50 * MEGABYTE

#: One in this many tasks is decoded: a megabyte of JSON takes a while.
READ_EVERY = 200


class Mailer(InstantRunner):
    """Decodes a sample of its tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[object] = []

    def start(self, job: Job) -> None:
        if not self.count % READ_EVERY:
            part = bundle_part(job.name.decode(), job.payload)
            if part != ("news", part.offset, BODY, job.lane.decode()):
                self.wrong.append(part.recipient)
        super().start(job)


def test_bundle_is_kept_once_by_a_broker_that_is_killed(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> None:
    recipients = RECIPIENTS_WHOLE if pytestconfig.getoption("--whole") else RECIPIENTS
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(tmp_path))
        before = memory_of(broker)
        assert submit(broker, recipients) == recipients
        grown, written = memory_of(broker) - before, bytes_of(tmp_path, "journal.sqlite*")
        record_property("bundle memory bytes", grown)
        record_property("bundle journal bytes", written)
        assert (grown < MEMORY_BYTES_MAX, written < DISK_BYTES_MAX) == (True, True)
        with working(broker.endpoint):
            pause_after(broker, recipients // 20, recipients)
            broker.kill()
            broker = stack.enter_context(Broker(tmp_path))
            assert memory_of(broker) - before < MEMORY_BYTES_MAX  # from the rows
            assert submit(broker, recipients) == 0
        assert broker.terminate()[0] == 0
    assert run_here(tmp_path, "journal", "compact")[0] == 0
    assert (
        bytes_of(tmp_path, "snapshots/*")
        < MEGABYTE
        < bytes_of(tmp_path, "blobs/*/*")
        < DISK_BYTES_MAX
    )
    with Broker(tmp_path) as broker:
        assert memory_of(broker) - before < MEMORY_BYTES_MAX  # from the snapshot
        assert submit(broker, recipients) == 0
        with working(broker.endpoint), InternalClient(broker.endpoint) as client:
            client.resume("load")
            client.wait_campaign("news")
            assert client.counts("news")["done"] == recipients
        assert submit(broker, recipients) == 0
        assert broker.terminate()[0] == 0


def submit(broker: Broker, recipients: int) -> int:
    """Submit the bundle. Return the number of new tasks."""
    names = [f"recipient-{number}" for number in range(recipients)]
    bundle = bundle_spec(BODY, names, "news", None, {"service": "load"})
    with InternalClient(broker.endpoint) as client:
        return client.create_bundle(bundle)


@contextmanager
def working(endpoint: str) -> Iterator[None]:
    runner = Mailer()
    worker = Worker(endpoint, b"mailer", slots=200)
    worker.runner = runner
    worker.start()
    try:
        yield
    finally:
        worker.finish()
    assert (runner.count > 0, runner.wrong) == (True, [])


def pause_after(broker: Broker, tasks: int, recipients: int) -> None:
    """Wait until part of the bundle is done."""
    with InternalClient(broker.endpoint) as client:
        until(lambda: client.counts("news")["done"] >= tasks, "some of it done")
        client.pause("load")
        assert client.counts("news")["done"] < recipients


def bytes_of(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in (directory / ".taskyard").glob(pattern))


def memory_of(broker: Broker) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{broker.pid}/status").read_text()
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kilobytes) * 1024
