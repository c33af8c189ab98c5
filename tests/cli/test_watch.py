"""`taskyard watch`: a line per task, a document per record, without gaps or repetitions."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from taskyard.cli.task_list import RECORD_LABELS, lines_of
from taskyard.wire.record_views import AnyRecordDocument
from tests.cli.yard import Caller, Yard, running
from tests.kit.processes import Running

if TYPE_CHECKING:
    from pathlib import Path


def watched(text: str) -> list[tuple[str, ...]]:
    """Return the events and their tasks."""
    return [tuple(line.split()[1:3]) for line in text.splitlines()]


def documents(text: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in text.splitlines()]


def test_events_are_printed_a_line_per_task(call: Caller) -> None:
    call.submit("good", campaign="one")
    call.submit("bad", "sh", "-c", "echo trouble >&2; exit 4", campaign="one")
    call("wait", "--campaign", "one")
    outcome = call("watch", "--campaign", "one", "--since", "0", "--until-settled")
    assert outcome.code == 1
    message = watched(outcome.out)
    assert [what for what, name in message if name == "one/good"] == ["submitted", "leased", "done"]
    assert [what for what, name in message if name == "one/bad"] == [
        "submitted",
        "leased",
        "failed",
    ]
    (failed,) = [line for line in outcome.out.splitlines() if " failed " in line]
    assert "  one/bad  attempt 1  worker " in failed
    assert failed.endswith(": exit status 4: trouble")


def test_json_has_a_document_per_line(call: Caller) -> None:
    call.submit("a", campaign="two")
    call("wait", "a")
    outcome = call("watch", "--campaign", "two", "--since", "0", "--until-settled", "--json")
    message = documents(outcome.out)
    assert outcome.code == 0
    assert {(one["version"], one["document"]) for one in message} == {(1, "watch")}
    assert [one["kind"] for one in message if one["kind"] != "progressed"] == [
        *("submitted", "leased", "finished")
    ]
    numbers = [one["record"] for one in message]
    assert numbers == sorted(set(numbers))
    last = str(message[-2]["record"])
    rest = call("watch", "--campaign", "two", "--since", last, "--until-settled", "--json")
    assert documents(rest.out) == message[-1:]


def test_only_matching_tasks_are_printed(call: Caller) -> None:
    call.submit("fit-1", campaign="three", lane="l")
    call.submit("fit-2", campaign="three")
    call.submit("other", campaign="four")
    call("wait", "fit-1", "fit-2", "other")
    message = watched(call("watch", "--since", "0", "--campaign", "three", "--until-settled").out)
    assert {name for _, name in message} == {"three/fit-1", "three/fit-2"}


def test_payloads_results_and_output_are_never_printed(call: Caller) -> None:
    call.submit("secret", "sh", "-c", "echo hidden-result; echo hidden-output >&2", campaign="s")
    call("wait", "secret")
    outcome = call("watch", "--campaign", "s", "--since", "0", "--until-settled", "--json")
    assert "secret" in outcome.out
    assert "hidden" not in outcome.out


def test_record_that_is_not_there_yet_is_refused(call: Caller) -> None:
    outcome = call("watch", "--since", "999999", "--until-settled")
    assert outcome.code == 2
    assert "start again" in outcome.err


def test_interrupted_watch_exits_130(yard: Yard, call: Caller) -> None:
    call.submit("signal", campaign="signals")
    with Running(yard.directory, "watch", "--campaign", "signals", "--since", "0") as watch:
        assert watch.line().endswith(" signals/signal")
        code, _, err = watch.send(signal.SIGINT).end()
    assert (code, err.strip()) == (130, "taskyard: interrupted; the tasks continue")


def test_watch_survives_a_killed_broker_without_gaps_or_repetitions(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path, worker=False) as yard:
        call = Caller(yard.state, capsysbinary)
        call.submit("begin")
        with Running(yard.directory, "watch", "--since", "0", "--json") as watch:
            message = documents(watch.line())
            for life in range(3):
                for number in range(5):
                    call.submit(f"t-{life}-{number}")
                    message += documents(watch.line()) if number % 2 else []
                yard.kill_broker()
                yard.start_broker()
            call.submit("end")
            while message[-1]["names"] != ["end"]:
                message += documents(watch.line())
            watch.send(signal.SIGINT).end()
    names = [name for one in message for name in one["names"]]
    assert names == [
        "begin",
        *(f"t-{life}-{number}" for life in range(3) for number in range(5)),
        "end",
    ]
    assert [one["record"] for one in message] == [*range(1, len(message) + 1)]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"kind": "paused", "service": "", "lane": None}, "paused all services"),
        ({"kind": "resumed", "service": "s", "lane": "l"}, "resumed service s lane l"),
        ({"kind": "numbered", "campaign": "c", "path": "/f"}, "numbered campaign c /f"),
        (
            {"kind": "worker_joined", "worker": "w", "services": ["a", "b"]},
            "worker joined worker w a, b",
        ),
        (
            {"kind": "worker_left", "worker": "w", "reason": "silent"},
            "worker left worker w: silent",
        ),
        (
            {
                "kind": "returned",
                "worker": "w",
                "names": ["\x1b"],
                "attempts": [2],
                "reason": "left",
            },
            r"returned \x1b attempt 2 worker w: left",
        ),
        (
            {"kind": "progressed", "worker": "w", "names": ["a"], "attempts": [1], "percents": [7]},
            "progress a attempt 1 worker w 7 %",
        ),
        ({"kind": "came_due", "names": ["a"]}, "due a"),
        ({"kind": "aged", "names": ["a"], "reason": "old", "requested": False}, "expired a"),
        (
            {"kind": "aged", "names": ["a"], "reason": "on request", "requested": True},
            "expired a: on request",
        ),
        (
            {"kind": "moved", "names": ["a"], "service": "s", "lane": ""},
            "moved a to service s to lane -",
        ),
        ({"kind": "moved", "names": ["a"], "service": None, "lane": "l"}, "moved a to lane l"),
        (
            {
                "kind": "edited",
                "names": ["a"],
                "priority": 5,
                "time_limit": 0.0,
                "retry_delays": [1.0, 2.0],
                "expires_hard": None,
            },
            "edited a priority 5 time limit none retries 2",
        ),
        ({"kind": "reported", "names": ["a"]}, "late a"),
        ({"kind": "released", "names": ["a"]}, "released a"),
    ],
)
def test_record_reads_as_a_line(record: dict[str, Any], line: str) -> None:
    (message,) = lines_of({"at": 1.5, **record})
    time, *words = message.split()
    assert time.endswith(".500")
    assert " ".join(words) == line


def test_every_kind_of_record_has_a_word() -> None:
    kinds = [kind.__struct_config__.tag for kind in get_args(AnyRecordDocument)]
    assert [*RECORD_LABELS] == kinds
