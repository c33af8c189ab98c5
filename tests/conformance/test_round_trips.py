"""Tasks, payloads and results pass from every dialect to every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.raw_sockets import unique
from tests.conformance.scenario import (
    await_answer,
    each_client,
    each_worker,
    mixed_workers,
    pairs,
    success,
    take_task,
    taken,
)

if TYPE_CHECKING:
    from tests.conformance.yard import Yard

#: Payloads that would be a line, a frame or a word in some dialect.
BYTES = (
    b"\x00",
    b"a\x00b\x00\x00",
    b"two\nlines\r\n",
    b"\ttabs\tand\\n escapes\\",
    b"\xff\xfe not UTF-8 \x80",
    bytes(range(256)),
    b"\n",
    b" ",
)
WORDS = (
    *(b"READY", b"PING", b"DISCONNECT", b"ERROR", b"FULL", b"#hungry", b"#idle", b"# comment"),
    *(b"LMQv100", b"WMP01", b"\x01", b"\x07", b"\x08", b"\x09", b"\x0806", b"ongoing", b"{}"),
)
#: These equal ping-pong's own words: see its page.
WORDS_OF_PING_PONG = (b"PONG", b"EXIT")


@pairs()
def test_task_is_done_and_its_result_comes_back(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(unique("payload"))
    job = take_task(worker)
    if "bytes" not in worker.cannot:
        assert job.payload == submitted.payload
    worker.done(job, b"the result")
    assert await_answer(client, submitted) == success(client, worker, b"the result")
    assert yard.control.unsettled() == []


@pairs(client=("bytes",), worker=("bytes", "results"))
def test_bytes_of_every_kind_cross_both_ways(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    is_ping_pong = "ping-pong" in (client_kind, worker_kind)
    words = WORDS if is_ping_pong else (*WORDS, *WORDS_OF_PING_PONG)
    for payload in (*BYTES, *words):
        submitted = client.submit(payload)
        job = take_task(worker)
        assert job.payload == payload
        result = b"=" + payload if payload in words else payload
        worker.done(job, result)
        assert await_answer(client, submitted).text == result


@pairs(client=("bytes",), worker=("bytes", "results"))
def test_megabyte_crosses_both_ways(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    payload = bytes(range(256)) * 4096
    submitted = client.submit(payload)
    job = take_task(worker)
    assert job.payload == payload
    worker.done(job, payload[::-1])
    assert await_answer(client, submitted).text == payload[::-1]


@pairs(client=("bytes",), worker=("bytes", "results"))
def test_empty_payload_is_nothing_or_the_name_and_an_empty_result_is_empty(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    submitted = client.submit(b"")
    (name,) = taken(yard)
    job = take_task(worker)
    assert job.payload in (b"", name.encode())
    worker.done(job, b"")
    assert await_answer(client, submitted).text == b""


@each_worker()
def test_task_without_a_payload_arrives_as_its_name(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    assert client_kind
    client, worker = yard.client("dwork-plain"), yard.worker(worker_kind)
    name = unique("Gleis-Größe").replace(b"-", "ß".encode())
    submitted = client.submit(name)
    job = take_task(worker)
    assert job.payload == name
    worker.done(job, b"")
    assert await_answer(client, submitted).is_done


@pairs(client=("dependencies",))
def test_task_waits_for_its_dependencies(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    first, second = unique("first"), unique("second")
    client.submit(first, name=first)
    submitted = client.submit(second, name=second, after=(first,))
    job = take_task(worker)
    assert job.payload == first
    assert yard.control.show(second.decode())["state"] == "blocked"
    worker.done(job, b"")
    job = take_task(worker)
    assert job.payload == second
    worker.done(job, b"")
    assert await_answer(client, submitted).is_done


@each_client("batches")
def test_batch_is_accepted_whole_or_as_far_as_the_dialect_allows(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    client, worker = yard.client(client_kind), yard.worker(worker_kind)
    one, two, three = (unique(word) for word in ("one", "two", "three"))
    submit_all = client.submit_all  # type: ignore[attr-defined]
    assert not submit_all((one, ()), (two, (three,)), (three, (two,)))  # a cycle
    taken = [task["name"].encode() for task in yard.control.unsettled()]
    if client_kind == "dwork-plain":  # its loaders never read the Error: sound tasks are accepted
        assert taken == [one]
        worker.done(take_task(worker), b"")
    else:
        assert taken == []
    assert submit_all((one, ()), (two, (one,)), (three, (one, two)))
    for name in (one, two, three):
        job = take_task(worker)
        assert job.payload == name
        worker.done(job, b"")


@each_client("names")
def test_task_submitted_twice_is_done_once(yard: Yard, client_kind: str, worker_kind: str) -> None:
    client = yard.client(client_kind)
    name = unique("once")
    done = yard.control.counts()["done"]
    submitted = client.submit(name, name=name)
    client.submit(name, name=name)
    worker = yard.worker(worker_kind)
    worker.done(take_task(worker), b"")
    assert await_answer(client, submitted).is_done
    client.again(submitted)
    assert yard.control.unsettled() == []
    assert yard.control.counts()["done"] == done + 1


@each_client("results")
def test_results_reach_their_clients(yard: Yard, client_kind: str, worker_kind: str) -> None:
    clients = [yard.client(client_kind) for _ in range(3)]
    submitted = [(client, client.submit(unique())) for client in clients for _ in range(4)]
    taken(yard, 12)
    workers = [yard.worker(worker_kind) for _ in range(4)]
    for _ in range(3):
        for worker, job in [(worker, take_task(worker)) for worker in workers][::-1]:
            worker.done(job, b"result of " + job.payload)
    for client, one in submitted[::-1]:
        assert await_answer(client, one).text == b"result of " + one.payload


@each_client()
def test_task_of_a_client_that_went_away_is_done_all_the_same(
    yard: Yard, client_kind: str, worker_kind: str
) -> None:
    gone, client = yard.client(client_kind), yard.client(client_kind)
    payload = unique()
    gone.submit(payload)
    (name,) = taken(yard)
    gone.close()
    worker = yard.worker(worker_kind)
    job = take_task(worker)
    assert job.payload == payload
    worker.done(job, b"unwanted")
    assert yard.control.show(name)["state"] == "done"
    submitted = client.submit(unique())
    worker.done(take_task(worker), b"for you")
    assert await_answer(client, submitted) == success(client, worker, b"for you")


@mixed_workers()
def test_workers_of_two_dialects_share_the_load(yard: Yard, one: str, other: str) -> None:
    client = yard.client("dwork-extended")
    # Hungry first: it starts a process, in which time the lease of the other would expire.
    workers = [yard.worker(kind) for kind in sorted((one, other), key="hungry".__ne__)]
    submitted = [client.submit(unique()) for _ in range(2)]
    jobs = [take_task(worker) for worker in workers]
    for worker, job in zip(workers, jobs, strict=True):
        worker.done(job, b"result")
    assert all(await_answer(client, task).is_done for task in submitted)


def test_untracked_message_is_handled_by_any_worker(yard: Yard) -> None:
    """Only round-robin has untracked messages. Their clients get no result."""
    client = yard.client("round-robin")
    for kind in ("round-robin", "wmp", "dwork-extended"):
        worker = yard.worker(kind)
        payload = unique()
        client.submit_untracked(payload)  # type: ignore[attr-defined]
        job = take_task(worker)
        assert job.payload == payload
        (name,) = taken(yard)
        worker.done(job, b"unwanted")
        worker.send_heartbeat()
        assert yard.control.show(name)["state"] == "done"
        worker.leave()


@pytest.mark.parametrize("word", WORDS_OF_PING_PONG)
def test_protocol_word_is_refused_as_a_job_and_delays_no_other(yard: Yard, word: bytes) -> None:
    client, native = yard.client("ping-pong"), yard.client("dwork-extended")
    submitted = client.submit(word)
    assert not await_answer(client, submitted).is_done
    untellable = native.submit(word)
    worker = yard.worker("ping-pong")
    payload = unique()
    native.submit(payload)
    job = take_task(worker)
    assert job.payload == payload
    worker.done(job, b"")
    other = yard.worker("wmp")
    job = take_task(other)
    assert job.payload == word
    other.done(job, b"taken")
    assert await_answer(native, untellable).text == b"taken"
