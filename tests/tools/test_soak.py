"""The soak's audit finds every kind of problem, and its peers send the bytes of the pages."""

from __future__ import annotations

import json
import socket
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from soak_kit.audit import History, free_pairs, history_lines, read_history, read_ledger, unrun
from soak_kit.load import Promises
from soak_kit.peers import protobuf
from soak_kit.peers.effect import record
from soak_kit.proxy import DatabaseProxy
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


def a_history(*records: dict[str, Any]) -> History:
    history = History()
    for number, one in enumerate(records, start=1):
        history.add({"record": number, "at": float(number), **one})
    return history


def submitted(*names: str) -> dict[str, Any]:
    return {"kind": "submitted", "names": [*names]}


def leased(*names: str, worker: str = "w") -> dict[str, Any]:
    return {"kind": "leased", "names": [*names], "worker": worker}


def finished(*names: str, worker: str = "w") -> dict[str, Any]:
    return {"kind": "finished", "names": [*names], "worker": worker}


def wrong(history: History, promises: Promises, ledger: Counter[bytes]) -> dict[str, list[str]]:
    """Return the failing lines of the closing table."""
    return {
        line.what: line.wrong for line in history_lines(history, promises, ledger) if line.wrong
    }


def test_sound_story_has_nothing_wrong() -> None:
    history = a_history(submitted("a", "b"), leased("a"), finished("a"), leased("b"), finished("b"))
    promises = Promises(names={"a", "b"}, after={"b": "a"})
    assert wrong(history, promises, Counter([b"a", b"b"])) == {}


def test_task_that_never_ends_is_lost() -> None:
    history = a_history(submitted("a", "b"), leased("a"), finished("a"))
    assert wrong(history, Promises(), Counter([b"a"])) == {"nothing lost": ["b"]}


def test_acknowledged_task_that_the_broker_does_not_know_is_found() -> None:
    assert wrong(a_history(), Promises(names={"a"}), Counter()) == {"promises kept": ["a"]}


def test_second_completion_is_found() -> None:
    history = a_history(submitted("a"), leased("a"), finished("a"), finished("a"))
    assert wrong(history, Promises(), Counter()) == {"nothing completed twice": ["a: 2 times"]}


def test_failed_task_is_shown_with_its_reason() -> None:
    failed = {"kind": "failed", "names": ["a"], "reasons": ["lost 5 workers"]}
    history = a_history(submitted("a"), leased("a"), failed)
    assert wrong(history, Promises(), Counter()) == {
        "no innocent task failed": ["a: lost 5 workers"]
    }


def test_task_that_began_before_its_dependency_was_done_is_found() -> None:
    history = a_history(submitted("a", "b"), leased("a", "b"), finished("a", "b"))
    found = wrong(history, Promises(after={"b": "a"}), Counter())
    assert found == {"dependencies kept": ["b began before a was done"]}


def test_completion_of_a_task_that_never_ran_is_found() -> None:
    history = a_history(submitted("a"), leased("a"), finished("a"))
    assert unrun(history, Promises(names={"a"}), Counter()) == ["a: done by w, and never ran"]


def test_made_up_name_is_looked_for_in_the_ledger_of_a_plain_worker() -> None:
    done = finished("ping-pong-7", worker="dwork-1")
    history = a_history(submitted("ping-pong-7"), done)
    assert unrun(history, Promises(), Counter()) == ["ping-pong-7: done by dwork-1, and never ran"]
    assert unrun(history, Promises(), Counter([b"ping-pong-7"])) == []


def test_acknowledged_exec_may_have_run_where_its_text_is_not_seen_but_no_more_of_them() -> None:
    done = finished("round-robin-1", worker="tcp://127.0.0.1:1:worker-1")
    history = a_history(submitted("round-robin-1"), done)
    assert unrun(history, Promises(texts={b"a"}), Counter()) == []
    assert len(unrun(history, Promises(texts={b"a", b"b"}), Counter())) == 1


def test_record_that_is_printed_again_counts_once_and_a_missing_one_is_noted(
    tmp_path: Path,
) -> None:
    records = [{"record": 1, **submitted("a")}, {"record": 3, "at": 1.0, **finished("a")}]
    documents = [{"document": "watch", **one} for one in (*records, *records)]
    lines = [json.dumps(one, separators=(",", ":")) for one in documents]
    path = tmp_path / "watch.log"
    path.write_text("\n".join([f"no answer since 11:55{lines[0]}", *lines[1:], '{"cut off']))
    history = read_history(path)
    assert (history.submitted, history.finished) == (Counter("a"), Counter("a"))
    assert (history.last, history.missing) == (3, 1)


def test_ledger_counts_texts_and_has_the_last_time_of_each_worker(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    record(str(path), "w", b"a")
    record(str(path), "w", b"a\tb")
    texts, served_at = read_ledger(path)
    assert texts == Counter([b"a", b"a\tb"])
    assert [*served_at] == ["w"]


# Work conservation.


def task(name: str, state: str, lane: str = "", service: str = "s") -> dict[str, Any]:
    return {"name": name, "state": state, "lane": lane, "service": service}


def worker(**more: Any) -> dict[str, Any]:
    usual = {
        "slots": 2,
        "slots_used": 1,
        "last_seen_ago": 0.1,
        "state": "parked",
        "services": ["s"],
    }
    return {"name": "w", **usual, **more}


def test_ready_task_beside_a_free_slot_is_found() -> None:
    assert [*free_pairs([task("a", "ready")], [worker()])] == [("a", "w")]


@pytest.mark.parametrize(
    "less",
    [{"slots_used": 2}, {"last_seen_ago": 20.0}, {"state": "draining"}, {"services": ["other"]}],
    ids=str,
)
def test_worker_without_a_free_slot_for_it_does_not_count(less: dict[str, Any]) -> None:
    assert [*free_pairs([task("a", "ready")], [worker(**less)])] == []


def test_task_of_a_serial_lane_waits_while_another_one_is_out() -> None:
    tasks = [task("a", "leased", "lane"), task("b", "ready", "lane"), task("c", "ready", "other")]
    assert [*free_pairs(tasks, [worker()])] == [("c", "w")]


# The bytes of the plain dialect's page.


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        (protobuf.query(protobuf.OK), "0806"),
        (protobuf.query(protobuf.CREATE, protobuf.task(b"A", b"cli")), "080012080a01411203636c69"),
        (
            protobuf.query(protobuf.CREATE, protobuf.task(b"B", b"cli", b"A")),
            "0800120d0a01421203636c6922030a0141",
        ),
        (protobuf.query(protobuf.STEAL, location=b"w1"), "080132027731"),
        (
            protobuf.query(protobuf.COMPLETE, protobuf.task(b"A", b"cli"), location=b"w1"),
            "080212080a01411203636c6932027731",
        ),
    ],
    ids=["status", "create", "create after", "steal", "complete"],
)
def test_plain_peer_sends_the_bytes_of_the_page(message: bytes, encoded: str) -> None:
    assert message.hex() == encoded


def test_plain_peer_reads_what_it_writes() -> None:
    long = b"n" * 300
    message = protobuf.query(protobuf.TRANSFER, protobuf.task(long, b"o"), protobuf.task(b"b", b""))
    assert protobuf.type_of(message) == protobuf.TRANSFER
    assert protobuf.tasks_of(message) == [(long, b"o"), (b"b", b"")]


@pytest.mark.parametrize("silently", [False, True])
def test_cut_proxy_forwards_nothing_until_it_is_repaired(tmp_path: Path, silently: bool) -> None:  # noqa: FBT001
    place = tmp_path / "socket"
    with socket.create_server(str(place), family=socket.AF_UNIX) as server:
        server.settimeout(PATIENCE_SECONDS)
        with closing(DatabaseProxy(place)) as proxy:
            address = ("127.0.0.1", proxy.port)
            with socket.create_connection(address, PATIENCE_SECONDS) as one:
                one.sendall(b"a")
                above = server.accept()[0]
                assert above.recv(1) == b"a"
                proxy.cut(silently=silently)
                if silently:
                    one.sendall(b"kept")
                    above.settimeout(0.1)
                    with pytest.raises(TimeoutError):
                        above.recv(1)
                    above.settimeout(PATIENCE_SECONDS)
                else:
                    assert above.recv(1) == b""
                    with socket.create_connection(address, PATIENCE_SECONDS) as refused:
                        assert refused.recv(1) == b""
                proxy.repair()
                if silently:
                    assert above.recv(4) == b"kept"
                above.close()
            with socket.create_connection(address, PATIENCE_SECONDS) as again:
                again.sendall(b"b")
                with server.accept()[0] as above:
                    assert above.recv(1) == b"b"
