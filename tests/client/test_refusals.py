"""Refusals in Python: their codes, their names, and how many messages they take."""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import ExitStack

import pytest

from taskyard import testing
from taskyard.client import task_buffer
from taskyard.core.model import Submission, Terms
from taskyard.errors import NameLost, Refused
from taskyard.wire.native import peer
from tests.kit.clients import internal
from tests.kit.processes import PATIENCE_SECONDS


@pytest.mark.parametrize("kind", [Refused, NameLost])
def test_refusals_can_be_pickled(kind: type[Refused]) -> None:
    """They cross processes: Spark's executors and the process pool raise them."""
    copy = pickle.loads(pickle.dumps(kind("no", "conflict", ("c/a", "c/b"))))  # noqa: S301  # own
    assert type(copy) is kind
    assert (str(copy), copy.code, copy.names) == ("no", "conflict", ("c/a", "c/b"))


def test_lost_name_has_a_code() -> None:
    assert (NameLost("gone").code, NameLost("gone").names) == ("name-lost", ())


def test_refused_batch_raises_its_code_and_the_names_at_fault() -> None:
    batch = Submission([b"a", b"b"], [b"1", b"2"], [Terms(campaign=b"c")])
    with testing.broker() as broker, internal(broker.client()) as client:
        assert client.create(batch, check_only=True) == 2
        assert client.existing(["c/a", "c/b"]) == {}
        assert client.create(batch) == 2
        batch.payloads = [b"other", b"2"]
        for check_only in (True, False):
            with pytest.raises(Refused, match="another payload") as caught:
                client.create(batch, check_only=check_only)
            assert (caught.value.code, caught.value.names) == ("conflict", ("c/a",))


def test_other_refusals_have_codes_and_no_names() -> None:
    with testing.broker() as broker, internal(broker.client()) as client:
        with pytest.raises(Refused) as caught:
            client.pause(lane="without a service")
        assert (caught.value.code, caught.value.names) == ("malformed", ())
        with pytest.raises(Refused) as caught:
            client.create(Submission([b"a"]), after_campaigns=["nobody"])
        assert (caught.value.code, caught.value.names) == ("unknown", ())


def test_three_bad_tasks_among_two_thousand_take_one_further_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    created = peer.create

    def create(number: int, submission: Submission, *rest: object, **more: object) -> bytes:
        sent.append(len(submission.names))
        return created(number, submission, *rest, **more)  # type: ignore[arg-type]

    gathered = threading.Event()
    send = task_buffer.TaskBuffer.send

    def send_when_gathered(self: task_buffer.TaskBuffer) -> None:
        if gathered.is_set():
            send(self)

    with testing.broker() as broker, internal(broker.client()) as client, ExitStack() as stack:
        stack.callback(gathered.set)  # else a failed test would wait for ever
        client.create(Submission([b"taken", b"gone"]))
        client.cancel(["gone"])
        monkeypatch.setattr(peer, "create", create)
        monkeypatch.setattr(task_buffer.TaskBuffer, "send", send_when_gathered)
        futures = [client.submit(b"", name=f"t-{n}", lane="") for n in range(1000)]
        bad = [
            client.submit(b"other", name="taken", lane=""),
            client.submit(b"", name="orphan", lane="", after=["nobody"]),
            client.submit(b"", name="late", lane="", after=["gone"]),
        ]
        futures += [client.submit(b"", name=f"t-{n}", lane="") for n in range(1000, 1997)]
        gathered.set()
        client.status()  # wakes the session
        refused = [future.exception(PATIENCE_SECONDS) for future in bad]
        ends = time.monotonic() + PATIENCE_SECONDS
        while client.status()["counts"]["ready"] != 1998:
            assert time.monotonic() < ends, client.status()["counts"]
        assert not any(future.done() for future in futures)
    assert sent == [2000, 1997]
    assert [(type(one), one.code, one.names) for one in refused if isinstance(one, Refused)] == [
        (Refused, "conflict", ("taken",)),
        (Refused, "unknown", ("orphan",)),
        (Refused, "cancelled", ("late",)),
    ]
