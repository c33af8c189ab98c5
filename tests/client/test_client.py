"""The client against a real broker: futures, looking, acting, and a broker that is killed."""

from __future__ import annotations

import concurrent.futures
import threading
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.task_spec import check_task
from taskyard.client import watches
from taskyard.client.futures import Future, as_completed, wait
from taskyard.client.internal import InternalClient
from taskyard.client.requests import scope_of
from taskyard.core.blobs import Blob, Result
from taskyard.core.model import Submission, Terms
from taskyard.core.states import TaskState
from taskyard.errors import (
    BytesDamaged,
    ClientClosed,
    NoBroker,
    Refused,
    TaskBlocked,
    TaskFailed,
    TimedOut,
    UserError,
)
from taskyard.journal.blob_files import BlobFiles
from taskyard.journal.blobs import name_of
from tests.cli.yard import Yard, running
from tests.kit.processes import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A service that no worker offers: its tasks wait.
UNSERVED = "unserved"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard") / "state", worker=False) as running_yard:
        yield running_yard.start_worker("--allow", "operator", "--allow", "builtins")


@pytest.fixture
def client(yard: Yard) -> Iterator[InternalClient]:
    with InternalClient(state=yard.state) as connected:
        yield connected


def value(future: Future) -> object:
    return future.result(PATIENCE_SECONDS)


def test_result_of_a_command_is_its_output(client: InternalClient) -> None:
    assert value(client.submit(["echo", "hi"])) == "hi\n"


def test_flipped_byte_in_a_long_result_is_an_error_that_names_the_task(
    yard: Yard, client: InternalClient
) -> None:
    value(client.submit(["head", "-c", "100000", "/dev/zero"], name="hurt"))
    path = BlobFiles(yard.state / "blobs").path(name_of(bytes(100_000)))
    path.write_bytes(bytes(50_000) + b"\1" + bytes(49_999))
    damaged = "task hurt: its output of 100,000 bytes is damaged"
    for read in (client.result, client.output):
        with pytest.raises(BytesDamaged, match=damaged):
            read("hurt")
    with pytest.raises(BytesDamaged, match=damaged):
        value(client.future("hurt"))
    needs_it = client.submit(["cat", "{result_file:hurt}"], name="reader")
    with pytest.raises(TaskFailed, match=f"result of hurt: {damaged}"):
        value(needs_it)


def test_binary_output_is_text_with_surrogates_and_exact_bytes(client: InternalClient) -> None:
    future = client.submit(["printf", r"\377a\303\244"])
    assert future.result(PATIENCE_SECONDS) == "\udcffa\u00e4"
    assert future.bytes() == client.output(future.name, "result") == b"\xffa\xc3\xa4"
    assert client.result(future.name) == "\udcffa\u00e4"
    assert client.submit("operator:add", args=["a", "b"]).bytes(20) == b'"ab"'


def test_long_output_is_the_result_as_a_whole(client: InternalClient) -> None:
    future = client.submit(["sh", "-c", "head -c 2100000 /dev/zero; printf '\\377'"])
    whole = bytes(2_100_000) + b"\xff"
    assert future.result() == whole.decode(errors="surrogateescape")
    assert future.bytes() == client.output(future.name, "result") == whole
    assert client.output(future.name) == whole
    some = {"offset": len(whole) - 2, "count": 9}
    assert client.output(future.name, "stdout", **some) == whole[-2:]
    assert client.output(future.name, "result", **some) == whole[-2:]
    assert client.output(future.name, "result", offset=5, count=1_500_000) == whole[5:1_500_005]
    assert client.results([future.name])[future.name].text == whole
    kept = client.kept_result(future.name)
    ends = whole[:8192] + whole[-8192:]
    assert kept == Result(Blob(sha256(whole).digest(), len(whole), ends))
    assert client.future(future.name).result() == future.result()


def test_result_of_a_call_is_its_return_value(client: InternalClient) -> None:
    assert value(client.submit("operator:add", args=[20, 22])) == 42
    assert value(client.submit("builtins:dict", kwargs={"a": [1, None]})) == {"a": [1, None]}


def test_name_is_made_up_unless_given(client: InternalClient) -> None:
    one, two = client.submit(["true"]), client.submit(["true"], campaign="c")
    assert one.name.startswith("task-")
    assert two.name.startswith("c-")
    assert (one.campaign, one.full_name) == ("", one.name)
    assert (two.campaign, two.full_name) == ("c", f"c/{two.name}")
    assert client.submit(["true"], name="own").name == "own"
    assert (value(one), value(two)) == ("", "")


def test_failure_is_raised_with_its_reason(client: InternalClient) -> None:
    future = client.submit(["sh", "-c", "echo why >&2; exit 3"], name="fails")
    with pytest.raises(TaskFailed, match=r"^task fails failed: exit status 3: why$"):
        value(future)
    assert future.state == "failed"
    assert future.why() == "it failed after 1 attempt: exit status 3: why"


def test_task_behind_a_failure_is_settled_too(client: InternalClient) -> None:
    client.submit(["false"], name="root")
    with pytest.raises(
        TaskBlocked, match="behind-root: blocked, because task root failed: exit status 1"
    ):
        value(client.submit(["true"], name="behind-root", after=["root"]))


def test_order_of_submission_is_kept_for_dependencies(client: InternalClient) -> None:
    futures = [client.submit(["true"], name="chain-0")]
    futures += [
        client.submit(["true"], name=f"chain-{n}", after=[f"chain-{n - 1}"]) for n in range(1, 50)
    ]
    assert [value(future) for future in futures] == [""] * 50
    assert value(client.submit(["echo", "hi"], after=[futures[-1], "chain-1"])) == "hi\n"


def test_map_submits_a_task_per_item(client: InternalClient) -> None:
    squares = client.map("operator:neg", range(20))
    assert [value(future) for future in squares] == [-number for number in range(20)]
    sums = client.map("operator:add", [1, 2, 3], iter([4, 5]), campaign="sums", retries=1)
    assert {value(future) for future in as_completed(sums)} == {5, 7}


def test_wait_and_as_completed_are_those_of_the_standard_library(client: InternalClient) -> None:
    futures = client.map("operator:neg", range(5))
    done, not_done = wait(futures, PATIENCE_SECONDS)
    assert (len(done), len(not_done)) == (5, 0)
    late = client.submit(b"", service=UNSERVED)
    with pytest.raises(concurrent.futures.TimeoutError):
        list(as_completed([late], timeout=0.01))
    assert late.cancel()


def test_cancelled_task_cancels_its_future_and_those_behind_it(client: InternalClient) -> None:
    one = client.submit(b"", name="one", service=UNSERVED)
    two = client.submit(["true"], name="two", after=["one"])
    assert one.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        value(two)
    done = client.submit(["true"])
    value(done)
    assert not done.cancel()


def test_cancelled_running_task_is_stopped(client: InternalClient, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    future = client.submit(["sh", "-c", f"touch {ready}; exec sleep 600"])
    while not ready.exists():
        assert not future.done()
    assert future.cancel()
    while any(worker["tasks"] for worker in client.workers()):
        pass  # the worker learns of it with the next heartbeat


def test_refused_task_is_found_inside_a_batch(client: InternalClient) -> None:
    value(client.submit(["true"], name="taken"))
    futures = [client.submit(["echo", str(n)], name=f"batch-{n}") for n in range(500)]
    bad = client.submit(["false"], name="taken")
    orphan = client.submit(["true"], after=["no-such"])
    futures += [client.submit(["echo", str(n)], name=f"batch-{n}") for n in range(500, 600)]
    with pytest.raises(Refused, match="task taken was refused: task taken is known with another"):
        value(bad)
    with pytest.raises(Refused, match="unknown predecessor no-such"):
        value(orphan)
    assert [value(future) for future in futures] == [f"{n}\n" for n in range(600)]


def test_invalid_arguments_raise_at_once(client: InternalClient) -> None:
    with pytest.raises(UserError):
        client.submit(["true"], retries="many")
    with pytest.raises(UserError):
        client.submit(["true"], args=[1])
    with pytest.raises(UserError, match="args and kwargs: only for a function"):
        client.submit(b"", kwargs={"a": 1}, retries=1)
    with pytest.raises(UserError):
        client.submit(["true"], name="")
    with pytest.raises(UserError, match="neither 'module:function' nor a list"):
        client.submit("echo hi")
    wrong: Any  # what people type
    for wrong in (2, None, object()):
        with pytest.raises(UserError, match=r"neither a function, .*give a function without call"):
            client.submit(wrong)
    for wrong in (["head", "-n", 5], ["{result:a}", Path("a")]):
        with pytest.raises(UserError, match="must be a list of strings"):
            client.submit(wrong)
    for wrong in (4.5, Path(".taskyard")):
        with pytest.raises(UserError, match=r"^broker .*a directory is given by state="):
            InternalClient(wrong)


def test_same_task_again_is_the_same_task(client: InternalClient) -> None:
    first = client.submit(["sh", "-c", "date +%N"], name="same")
    second = client.submit(["sh", "-c", "date +%N"], name="same")
    assert value(first) == value(second)
    assert value(client.future("same")) == value(first)


def test_submissions_of_a_loop_are_batched(client: InternalClient) -> None:
    before = client.status()["records"]
    futures = [client.submit(b"", name=f"loop-{n}", service=UNSERVED) for n in range(5_000)]
    assert client.status()["records"] - before < 500
    assert client.cancel(service=UNSERVED) == 5_000
    assert len(wait(futures, PATIENCE_SECONDS).done) == 5_000


def test_request_is_answered_after_earlier_submissions(client: InternalClient) -> None:
    client.submit(["false"], name="blamed")
    client.submit(["true"], name="blamed")  # its batch is refused and taken apart
    client.submit(b"", name="asked-for", service=UNSERVED)
    assert client.show("asked-for")["state"] == "ready"
    assert client.cancel(["asked-for"]) == 1


def test_create_accepts_all_or_nothing(client: InternalClient) -> None:
    def batch(*names: str) -> Submission:
        specs = [check_task({"name": name, "payload": "", "service": UNSERVED}) for name in names]
        return encode_batch(specs, b"batches", 0)

    assert client.create(batch("c1", "c2")) == 2
    assert client.create(batch("c2", "c3")) == 1
    clash = encode_batch([check_task({"name": "c1", "payload": "x"})], b"batches", 0)
    with pytest.raises(Refused, match="task batches/c1 is known with another payload"):
        client.create(clash)
    assert [view["name"] for view in client.tasks(scope_of(campaign="batches"))] == [
        "c1",
        "c2",
        "c3",
    ]


def test_tasks_are_listed_page_by_page(client: InternalClient) -> None:
    names = [f"page-{n:04}".encode() for n in range(2_500)]
    client.create(Submission(names, [b""], [Terms(campaign=b"pages", service=b"unserved")]))
    views = list(client.tasks(scope_of(campaign="pages")))
    assert [view["name"].encode() for view in views] == names
    assert [view["name"] for view in client.tasks(match="page-249")] == [
        f"page-249{n}" for n in range(10)
    ]
    assert client.cancel(campaign="pages") == 2_500


def test_encoded_task_returns_bytes_or_its_acceptance(client: InternalClient) -> None:
    terms = Terms(service=b"exec")
    assert value(client.submit_encoded("raw", b'{"argv":["printf","\\\\377"]}', terms)) == b"\xff"
    taken = client.submit_encoded("raw-2", b'{"argv":["sleep","600"]}', terms, watch=False)
    assert value(taken) is None
    client.cancel(["raw-2"])


def test_waiting_for_names_and_campaigns(client: InternalClient) -> None:
    client.submit(["true"], name="w1", campaign="w")
    client.submit(["false"], name="w2", campaign="w")
    client.wait_campaign("w", PATIENCE_SECONDS)
    assert client.wait_names(["w/w1", "w/w2"]) == {
        "w/w1": TaskState.DONE,
        "w/w2": TaskState.FAILED,
    }
    client.submit(b"", name="w3", campaign="w", service=UNSERVED)
    with pytest.raises(TimedOut, match=r"1 not settled after 0.05 s"):
        client.wait_names(["w/w1", "w/w3"], 0.05)
    with pytest.raises(TimedOut):
        client.wait_campaign("w", 0.05)
    client.cancel(["w/w3"])


def test_unknown_names_raise(client: InternalClient) -> None:
    for look in (client.show, client.output, client.future):
        with pytest.raises(UserError, match="unknown task 'no-such' "):
            look("no-such")
    client.submit(["true"], name="known")
    with pytest.raises(UserError, match="unknown task 'no-such' and 1 more"):
        client.futures(["known", "no-such", "nor-this"])
    assert client.explain("no-such")["reason"] == "unknown"


def test_futures_of_other_clients_tasks_are_settled(yard: Yard, client: InternalClient) -> None:
    with InternalClient(state=yard.state) as other:
        names = [other.submit(["echo", str(n)], name=f"other-{n}").name for n in range(30)]
    assert [value(future) for future in client.futures(names)] == [f"{n}\n" for n in range(30)]


def test_repeated_name_has_a_future_each_time(client: InternalClient) -> None:
    value(client.submit(["echo", "hi"], name="twice"))
    one, two = client.futures(["twice", "twice"])
    assert value(one) == value(two) == "hi\n"


def test_many_names_are_split_over_requests(
    client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskyard.client.requests.NAMES_PER_REQUEST", 3)
    names = [f"portion-{number}" for number in range(8)]
    for name in names:
        client.submit(b"", name=name, service=UNSERVED)
    with pytest.raises(TimedOut, match=r"8 tasks: 8 not settled"):
        client.wait_names(names, 0.05)
    assert client.cancel(names) == 8
    assert client.wait_names(names) == dict.fromkeys(names, TaskState.CANCELLED)
    assert client.wait_names([]) == {}
    assert client.cancel([]) == 0


def test_client_may_be_used_by_several_threads(client: InternalClient) -> None:
    def submit_some(who: int) -> list[object]:
        return [
            value(f)
            for f in client.map("operator:add", []) or [client.submit("operator:neg", args=[who])]
        ]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(submit_some, range(40))) == [[-who] for who in range(40)]


def test_trickle_of_many_tasks_is_watched(
    client: InternalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More submissions than there may be watches: the later ones are asked after together."""
    monkeypatch.setattr(watches, "STREAMS_MAX", 3)
    waiting = []
    for number in range(8):
        waiting.append(client.submit(b"", name=f"trickle-{number}", service=UNSERVED))
        client.status()  # acknowledged, so that the next one leaves alone
    late = client.submit("operator:neg", args=[1])
    assert value(late) == -1
    again = client.submit(b"", name="trickle-7", service=UNSERVED)
    client.cancel([f"trickle-{number}" for number in range(8)])
    for future in (*waiting, again):
        with pytest.raises(concurrent.futures.CancelledError):
            value(future)


def test_missing_broker_raises_within_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(NoBroker, match=r"broker at ipc://.*: no answer within 0.2 s .*taskyard up"):
        InternalClient(state=tmp_path / "state", timeout=0.2)


def test_closed_client_fails_its_futures_and_refuses_calls(yard: Yard) -> None:
    client = InternalClient(state=yard.state)
    future = client.submit(b"", name="left", service=UNSERVED)
    client.close()
    with pytest.raises(ClientClosed):
        future.result(0)
    with pytest.raises(ClientClosed):
        client.submit(["true"])
    with pytest.raises(ClientClosed):
        client.status()
    with InternalClient(state=yard.state) as other:  # closing waited until it was taken
        assert other.cancel(["left"]) == 1


def test_interrupted_client_does_not_wait_for_a_dead_broker(tmp_path: Path) -> None:
    with running(tmp_path / "state", worker=False) as yard:
        client = InternalClient(state=yard.state)
        yard.kill_broker()
    future = client.submit(["true"])
    client.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert "taskyard-client" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ClientClosed):
        future.result(0)


def test_call_with_a_timeout_does_not_wait_for_a_dead_broker(tmp_path: Path) -> None:
    with running(tmp_path / "state", worker=False) as yard:
        client = InternalClient(state=yard.state)
        yard.kill_broker()
    looks = (client.status, client.workers, partial(client.show, "t"), partial(client.why, "t"))
    for look in looks:
        with pytest.raises(TimedOut, match=r"the broker did not answer within 0.05 s"):
            look(timeout=0.05)
    client.close(0)


def test_broker_killed_during_submissions_loses_and_doubles_no_task(tmp_path: Path) -> None:
    count = 10_000
    with (
        running(tmp_path / "state", worker=False) as yard,
        InternalClient(state=yard.state) as client,
    ):
        futures: list[Future] = []
        half_way = threading.Event()

        def submit_all() -> None:
            for number in range(count):
                futures.append(client.submit(b"", name=f"t-{number}", service=UNSERVED))
                if number == count // 2:
                    half_way.set()

        submitter = threading.Thread(target=submit_all)
        submitter.start()
        half_way.wait(PATIENCE_SECONDS)
        yard.kill_broker()
        yard.start_broker()
        submitter.join(PATIENCE_SECONDS)
        counts = client.status()["counts"]
        assert counts["ready"] == sum(counts.values()) == count
        yard.kill_broker()
        yard.start_broker()
        assert client.cancel(service=UNSERVED) == count
        wait(futures, PATIENCE_SECONDS)
        assert all(future.cancelled() for future in futures)


def test_one_name_in_place_of_a_list_is_refused(yard: Yard) -> None:
    with InternalClient(state=yard.state) as client:
        for wrong in (client.cancel, client.retry, client.wait_names, client.views):
            with pytest.raises(UserError, match="'abc': expected a list of names"):
                wrong("abc")


def test_future_in_place_of_its_name_is_an_error_with_the_name(client: InternalClient) -> None:
    future: Any = client.submit(["true"], name="a", campaign="c")
    value(future)
    for one in (client.why, client.show, client.result, client.output, client.future):
        with pytest.raises(UserError, match=r"as text \(its \.full_name is 'c/a'\)"):
            one(future)
    for several in (client.cancel, client.retry, client.results, client.futures):
        with pytest.raises(UserError, match=r"expected a list of names \(its \.full_name is one\)"):
            several(future)
        with pytest.raises(UserError, match=r"as text \(its \.full_name is 'c/a'\)"):
            several([future])
    campaign: Any = client.campaign("c")
    with pytest.raises(UserError, match=r"as text \(its \.name is 'c'\)"):
        client.submit(["true"], campaign=campaign)


def test_edit_refuses_text_for_seconds_and_unknown_arguments(client: InternalClient) -> None:
    wrong: Any = "5m"
    for change in ({"time_limit": wrong}, {"expires": wrong}, {"retry_delays": [wrong]}):
        with pytest.raises(UserError, match="'5m': expected seconds, as a number"):
            client.edit(["a"], **change)
    with pytest.raises(UserError, match="unexpected argument 'retries'"):
        client.edit(["a"], retries=3)


# Names belong to campaigns.


def test_same_name_in_two_campaigns_is_two_tasks(client: InternalClient) -> None:
    mon = client.submit(["echo", "mon"], name="a/b", campaign="mon")
    tue = client.submit(["echo", "tue"], name="a/b", campaign="tue")
    assert (value(mon), value(tue)) == ("mon\n", "tue\n")
    assert (mon.name, mon.campaign, mon.full_name) == ("a/b", "mon", "mon/a/b")
    assert client.result("tue/a/b") == "tue\n"
    view = client.show("tue/a/b")
    assert (view["name"], view["campaign"]) == ("a/b", "tue")
    assert [future.full_name for future in client.futures(campaign="tue")] == ["tue/a/b"]
    assert value(client.future("mon/a/b")) == "mon\n"


def test_futures_to_wait_for_may_be_of_other_campaigns(client: InternalClient) -> None:
    outside = client.submit(b"", name="after-outside", service=UNSERVED)
    own = client.submit(b"", name="first", campaign="after-own", service=UNSERVED)
    other = client.submit(b"", name="first", campaign="after-other", service=UNSERVED)
    after = [outside, own, other]
    last = client.submit(b"", name="last", campaign="after-own", service=UNSERVED, after=after)
    names = sorted(client.explain(last.full_name)["after"])
    assert names == ["after-other/first", "after-outside", "after-own/first"]
    assert client.cancel([outside.full_name, own.full_name, other.full_name]) == 4


def test_unknown_name_suggests_campaigns_that_have_it(client: InternalClient) -> None:
    for campaign in ("hint-1", "hint-2"):
        client.submit(b"", name="hinted", campaign=campaign, service=UNSERVED)
    hint = r"unknown task 'hinted' \(did you mean hint-2/hinted or hint-1/hinted\?\)"
    for look in (client.show, client.output, client.future):
        with pytest.raises(UserError, match=hint):
            look("hinted")
    client.cancel(["hint-1/hinted", "hint-2/hinted"])


def test_full_name_of_another_task_is_refused(client: InternalClient) -> None:
    client.submit(b"", name="b", campaign="taken", service=UNSERVED)
    with pytest.raises(Refused, match="the name is that of task b of campaign taken"):
        value(client.submit(b"", name="taken/b", service=UNSERVED))
    with pytest.raises(Refused, match="a campaign's name must not contain /"):
        value(client.submit(b"", name="b", campaign="a/b", service=UNSERVED))
    client.cancel(["taken/b"])
