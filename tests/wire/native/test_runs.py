"""Measurements of attempts: columns and single tasks agree, and malformed ones are refused."""

import pytest
from msgspec import structs

from taskyard.core.model import Submission, WorkerFacts
from taskyard.core.records import Finished
from taskyard.core.runs import RunColumns
from taskyard.wire import dwork_pb2 as pb
from taskyard.wire.native import peer
from tests.wire.kit import WALL_NS, Counter

SECOND_NS = 1_000_000_000
NAMES = [b"a", b"b", b"c"]
WHO = peer.worker_message(WorkerFacts((b"default",), 3, 15 * SECOND_NS, 1))

MEASURED = RunColumns(
    host=b"machine",
    started_ns=[WALL_NS, 0, WALL_NS + 1],
    run_ns=[SECOND_NS, 0, 5],
    statuses=[0, None, -9],
    cpu_ns=[7, 0, 8],
    memory_max_bytes=[0, 0, 1 << 40],
)
NOTED = structs.replace(MEASURED, notes=[b"up to date", b"", b""])


@pytest.fixture
def counter() -> Counter:
    """Return a broker where worker w has held a, b and c for ten seconds."""
    counter = Counter()
    counter.ask(peer.create(1, Submission(NAMES)))
    assert peer.Reply(counter.ask(peer.steal(2, b"w", WHO, 3))).names == NAMES
    counter.pass_time(10 * SECOND_NS)
    counter.scheduler.take_records()
    return counter


def finished(counter: Counter) -> list[RunColumns | None]:
    records = counter.scheduler.take_records()
    return [record.runs for record in records if isinstance(record, Finished)]


def test_columns_are_decoded_as_sent(counter: Counter) -> None:
    reports = peer.ReportColumns(NAMES, [1, 1, 1], runs=NOTED)
    assert peer.Reply(counter.ask(peer.complete(3, b"w", reports))).kind == peer.OK
    assert finished(counter) == [NOTED]


@pytest.mark.parametrize("notes", [[b"one"], [b"x" * 513, b"", b""]])
def test_malformed_notes_are_refused(counter: Counter, notes: list[bytes]) -> None:
    runs = structs.replace(MEASURED, notes=notes)
    reports = peer.ReportColumns(NAMES, [1, 1, 1], runs=runs)
    assert peer.Reply(counter.ask(peer.complete(3, b"w", reports))).code == "malformed"
    assert finished(counter) == []


def test_single_tasks_carry_the_same_measurements(counter: Counter) -> None:
    def task(index: int) -> bytes:
        assert MEASURED.cpu_ns
        assert MEASURED.memory_max_bytes
        return pb.TaskMsg(
            name=NAMES[index],
            origin=b"",
            attempt=1,
            started_ns=MEASURED.started_ns[index],
            run_ns=MEASURED.run_ns[index],
            exit=(1, 0, -9)[index],
            cpu_ns=MEASURED.cpu_ns[index],
            memory_max_bytes=MEASURED.memory_max_bytes[index],
        ).SerializeToString()

    query = pb.QueryMsg(type=pb.QueryMsg.Complete, request=3, location=b"w", host=b"machine")
    query.task.extend(map(task, range(3)))
    assert peer.Reply(counter.ask(query.SerializeToString())).kind == peer.OK
    assert finished(counter) == [MEASURED]


def test_log_of_a_plain_worker_has_start_and_end(counter: Counter) -> None:
    def task(name: bytes, *times: tuple[pb.TaskMsg.State, int]) -> bytes:
        message = pb.TaskMsg(name=name, origin=b"")
        for state, time in times:
            message.log.append(pb.TaskMsg.LogMsg(state=state, time=time).SerializeToString())
        return message.SerializeToString()

    begin_us, started, done = WALL_NS // 1000, pb.TaskMsg.Started, pb.TaskMsg.Done
    query = pb.QueryMsg(type=pb.QueryMsg.Complete, location=b"w")
    query.task.append(task(b"a", (started, begin_us + 10), (done, begin_us + 30)))
    query.task.append(task(b"b", (done, begin_us)))
    query.task.append(task(b"c", (started, begin_us + 5), (done, begin_us)))
    assert counter.ask(query.SerializeToString()).hex() == "0806"
    assert finished(counter) == [RunColumns(b"", [WALL_NS + 10_000, 0, 0], [20_000, 0, 0])]


def test_report_without_measurements_keeps_none(counter: Counter) -> None:
    counter.ask(peer.complete(3, b"w", peer.ReportColumns(NAMES, [1, 1, 1])))
    assert finished(counter) == [None]


@pytest.mark.parametrize(
    "columns",
    [
        {"started_ns": [1, 2], "run_ns": [1, 2, 3]},
        {"started_ns": [1, 2, 3]},
        {"run_ns": [1, 2, 3]},
        {"started_ns": [1, 2, 3], "run_ns": [1, -2, 3]},
        {"started_ns": [-1, 2, 3], "run_ns": [1, 2, 3]},
        {"started_ns": [1, 2, 3], "run_ns": [1, 2, 3], "exit": [257, 0, 0]},
        {"started_ns": [1, 2, 3], "run_ns": [1, 2, 3], "exit": [-256, 0, 0]},
        {"started_ns": [1, 2, 3], "run_ns": [1, 2, 3], "cpu_ns": [1]},
        {"started_ns": [1, 2, 3], "run_ns": [1, 2, 3], "memory_max_bytes": [1, 2, -3]},
    ],
    ids=str,
)
def test_malformed_measurements_are_refused_whole(
    counter: Counter, columns: dict[str, list[int]]
) -> None:
    query = pb.QueryMsg(type=pb.QueryMsg.Complete, request=3, location=b"w")
    query.batch.name.extend(NAMES)
    for name, values in columns.items():
        getattr(query.batch, name).extend(values)
    assert peer.Reply(counter.ask(query.SerializeToString())).kind == peer.ERROR
    assert counter.scheduler.take_records() == []


@pytest.mark.parametrize("host", [b"\xff", b"x" * 2000], ids=["not UTF-8", "too long"])
def test_invalid_host_is_refused(counter: Counter, host: bytes) -> None:
    measured = RunColumns(host, [WALL_NS] * 3, [1] * 3)
    body = peer.complete(3, b"w", peer.ReportColumns(NAMES, [1, 1, 1], runs=measured))
    assert peer.Reply(counter.ask(body)).kind == peer.ERROR
    assert counter.scheduler.take_records() == []
