"""Submissions as columns: values, shared terms, and the limits of batches."""

from datetime import UTC, datetime
from typing import Any

import pytest

from taskyard.calls.payloads import encode_call, encode_command
from taskyard.campaign.batches import encode_batch, encode_batches
from taskyard.campaign.task_spec import InvalidTask, TaskSpec, check_task, service_of
from taskyard.core.limits import AFTER_A_MESSAGE_MAX, SECOND_NS
from taskyard.core.model import Submission, Terms
from taskyard.core.shape import check_shape

NOW_NS = 1_000 * SECOND_NS


def specs(*raws: dict[str, Any]) -> list[TaskSpec]:
    return [check_task(raw) for raw in raws]


def test_plain_tasks_of_one_kind_share_everything() -> None:
    tasks = specs({"name": "a", "payload": ""}, {"name": "é", "payload": ""})
    assert encode_batch(tasks, b"c", NOW_NS) == Submission(
        names=[b"a", "é".encode()], payloads=[b""], terms=[Terms(campaign=b"c")]
    )


def test_columns_have_the_values_of_the_tasks() -> None:
    tasks = specs(
        {"name": "a", "argv": ["x"], "env": {"A": "1"}, "cwd": "d"},
        {"name": "b", "call": "m:f", "args": [1], "kwargs": {"k": None}, "after": ["a", "z"]},
        {"name": "c", "payload": "é", "lane": "l", "priority": 5},
        {"name": "d", "argv": ["y"], "service": "own", "slots": 3, "time_limit": "5s"},
        {"name": "e", "argv": ["z"]},
    )
    submission = encode_batch(tasks, b"c", NOW_NS)
    check_shape(submission)
    assert submission == Submission(
        names=[b"a", b"b", b"c", b"d", b"e"],
        payloads=[
            encode_command(["x"], {"A": "1"}, "d"),
            encode_call("m:f", [1], {"k": None}),
            "é".encode(),
            encode_command(["y"]),
            encode_command(["z"]),
        ],
        terms=[
            Terms(campaign=b"c", service=b"exec"),
            Terms(campaign=b"c", service=b"call"),
            Terms(campaign=b"c", service=b"default", priority=5),
            Terms(campaign=b"c", service=b"own", slots=3, time_limit_ns=5 * SECOND_NS),
        ],
        terms_at=[0, 1, 2, 3, 0],
        lanes=[b"", b"", b"l", b"", b""],
        after=[[], [b"a", b"z"], [], [], []],
    )
    services = [submission.terms_of(index).service.decode() for index in range(5)]
    assert [service_of(task) for task in tasks] == services


def test_times_are_counted_from_now_or_taken_as_they_are() -> None:
    (terms,) = encode_batch(
        specs({"name": "a", "argv": ["x"], "due": "10s", "expiry": "1m"}), b"", NOW_NS
    ).terms
    assert (terms.due_ns, terms.expires_hard_ns) == (1_010 * SECOND_NS, 1_060 * SECOND_NS)
    moment = datetime.fromtimestamp(5, tz=UTC)
    (terms,) = encode_batch(
        specs({"name": "a", "argv": ["x"], "due": moment, "expiry": "10s"}), b"", NOW_NS
    ).terms
    assert (terms.due_ns, terms.expires_hard_ns) == (5 * SECOND_NS, 1_010 * SECOND_NS)
    assert terms.expires_ns == 0


@pytest.mark.parametrize(
    ("keys", "delays_ns"),
    [
        ({}, None),
        ({"retries": 0}, ()),
        ({"retries": 2}, (SECOND_NS, SECOND_NS)),
        ({"retries": 2, "backoff": "3s"}, (3 * SECOND_NS, 3 * SECOND_NS)),
        ({"retries": [0, 1, 2.5], "backoff": "2s"}, (0, 2 * SECOND_NS, 5 * SECOND_NS)),
    ],
)
def test_retries_become_delays(keys: dict[str, Any], delays_ns: tuple[int, ...] | None) -> None:
    (terms,) = encode_batch(specs({"name": "a", "argv": ["x"]} | keys), b"", NOW_NS).terms
    assert terms.retry_delays_ns == delays_ns


@pytest.mark.parametrize(
    "keys",
    [
        {"service": "own"},
        {"priority": 1},
        {"due": "1s"},
        {"expiry": "1s"},
        {"retries": 1},
        {"retries": 0, "backoff": "2s"},
        {"time_limit": 1},
        {"slots": 2},
        {"cpus": 2},
        {"memory": "1G"},
        {"gpus": 0.5},
        {"resources": {"license": 1}},
    ],
)
def test_tasks_that_differ_do_not_share_their_terms(keys: dict[str, Any]) -> None:
    tasks = specs(
        {"name": "a", "argv": ["x"]},
        {"name": "b", "argv": ["x"]} | keys,
        {"name": "c", "argv": ["x"]} | keys,
    )
    assert encode_batch(tasks, b"", NOW_NS).terms_at == [0, 1, 1]


def test_value_without_a_json_form_is_reported_with_its_task() -> None:
    task = TaskSpec(name="a", call="m:f", args=[b"bytes"])
    with pytest.raises(InvalidTask, match="task 'a': "):
        encode_batch([task], b"", NOW_NS)


def test_batches_are_limited_by_tasks_and_keep_the_order() -> None:
    tasks = specs(*({"name": str(number), "argv": ["x"]} for number in range(5)))
    batches = list(encode_batches(iter(tasks), b"c", NOW_NS, tasks_max=2))
    assert [batch.names for batch in batches] == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert list(encode_batches([], b"c", NOW_NS)) == []


def test_batches_are_limited_by_bytes_or_have_one_task() -> None:
    sizes = (300, 400, 500, 1100, 100, 200)
    tasks = specs(*({"name": str(size), "payload": "x" * size} for size in sizes))
    batches = list(encode_batches(tasks, b"c", NOW_NS, bytes_max=1000))
    assert [batch.names for batch in batches] == [
        [b"300", b"400"],
        [b"500"],
        [b"1100"],
        [b"100", b"200"],
    ]
    assert all(len(batch.names) == len(batch.payloads) for batch in batches)


def test_batches_are_limited_by_dependencies() -> None:
    after = [f"t{number}" for number in range(2_000)]
    tasks = specs(*({"name": f"n{number}", "payload": "", "after": after} for number in range(200)))
    batches = list(encode_batches(tasks, b"c", NOW_NS))
    edges = [sum(map(len, batch.after or ())) for batch in batches]
    assert sum(edges) == 400_000
    assert max(edges) <= AFTER_A_MESSAGE_MAX
    assert len(batches) < 6
