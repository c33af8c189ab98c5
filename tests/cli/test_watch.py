"""`watch`: a line a task, a document a record, nothing missed and nothing twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from taskyard.cli.watch import RECORD_LABELS, lines_of
from taskyard.wire.record_views import AnyRecordDocument
from tests.cli.yard import Caller, Yard, running
from tests.kit.processes import Running

if TYPE_CHECKING:
    from pathlib import Path


def watched(text: str) -> list[tuple[str, ...]]:
    """What happened to which task."""
    return [tuple(line.split()[1:3]) for line in text.splitlines()]


def documents(text: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in text.splitlines()]


def test_what_happened_is_told_a_line_a_task(call: Caller) -> None:
    call.submit("good", campaign="one")
    call.submit("bad", "sh", "-c", "echo trouble >&2; exit 4", campaign="one")
    call("wait", "--campaign", "one")
    said = call("watch", "--campaign", "one", "--since", "0", "--until-settled")
    assert said.code == 1
    told = watched(said.out)
    assert [what for what, name in told if name == "one/good"] == ["submitted", "leased", "done"]
    assert [what for what, name in told if name == "one/bad"] == ["submitted", "leased", "failed"]
    (failed,) = [line for line in said.out.splitlines() if " failed " in line]
    assert "  one/bad  attempt 1  worker " in failed
    assert failed.endswith(": exit status 4: trouble")


def test_document_a_line_is_told_to_programs(call: Caller) -> None:
    call.submit("a", campaign="two")
    call("wait", "a")
    said = call("watch", "--campaign", "two", "--since", "0", "--until-settled", "--json")
    told = documents(said.out)
    assert said.code == 0
    assert {(one["version"], one["document"]) for one in told} == {(2, "watch")}
    assert [one["kind"] for one in told if one["kind"] != "progressed"] == [
        *("submitted", "leased", "finished")
    ]
    numbers = [one["record"] for one in told]
    assert numbers == sorted(set(numbers))
    last = str(told[-2]["record"])
    rest = call("watch", "--campaign", "two", "--since", last, "--until-settled", "--json")
    assert documents(rest.out) == told[-1:]


def test_only_what_fits_is_told(call: Caller) -> None:
    call.submit("fit-1", campaign="three", lane="l")
    call.submit("fit-2", campaign="three")
    call.submit("other", campaign="four")
    call("wait", "fit-1", "fit-2", "other")
    told = watched(call("watch", "--since", "0", "--campaign", "three", "--until-settled").out)
    assert {name for _, name in told} == {"three/fit-1", "three/fit-2"}


def test_payloads_results_and_output_are_never_told(call: Caller) -> None:
    call.submit("secret", "sh", "-c", "echo hidden-result; echo hidden-output >&2", campaign="s")
    call("wait", "secret")
    said = call("watch", "--campaign", "s", "--since", "0", "--until-settled", "--json")
    assert "secret" in said.out
    assert "hidden" not in said.out


@pytest.mark.parametrize("words", [("--service", "s"), ("--match", "m"), ("--lane", "l")])
def test_end_of_a_part_of_a_campaign_is_not_waited_for(
    call: Caller, words: tuple[str, ...]
) -> None:
    said = call("watch", "--until-settled", *words)
    assert said.code == 2
    assert "--until-settled excludes --service" in said.err


def test_record_that_is_not_there_yet_is_refused(call: Caller) -> None:
    said = call("watch", "--since", "999999", "--until-settled")
    assert said.code == 2
    assert "begin anew" in said.err


def test_interrupted_watch_exits_130(yard: Yard, call: Caller) -> None:
    call.submit("signal")
    with Running(yard.directory, "watch", "--match", "signal", "--since", "0") as watch:
        assert watch.line().endswith(" signal")
        code, _, err = watch.send(signal.SIGINT).end()
    assert (code, err.strip()) == (130, "taskyard: interrupted; the tasks continue")


def test_watch_goes_on_over_a_killed_broker_without_a_gap_or_a_double(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with running(tmp_path, worker=False) as yard:
        call = Caller(yard.state, capsysbinary)
        call.submit("begin")
        with Running(yard.directory, "watch", "--since", "0", "--json") as watch:
            told = documents(watch.line())
            for life in range(3):
                for number in range(5):
                    call.submit(f"t-{life}-{number}")
                    told += documents(watch.line()) if number % 2 else []
                yard.kill_broker()
                yard.start_broker()
            call.submit("end")
            while told[-1]["names"] != ["end"]:
                told += documents(watch.line())
            watch.send(signal.SIGINT).end()
    names = [name for one in told for name in one["names"]]
    assert names == [
        "begin",
        *(f"t-{life}-{number}" for life in range(3) for number in range(5)),
        "end",
    ]
    assert [one["record"] for one in told] == [*range(1, len(told) + 1)]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"kind": "paused", "service": "", "lane": None}, "paused everything"),
        ({"kind": "resumed", "service": "s", "lane": "l"}, "resumed service s lane l"),
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
        ({"kind": "aged", "names": ["a"], "reason": "too old"}, "too old a"),
        ({"kind": "aged", "names": ["a"], "reason": "on request"}, "too old a: on request"),
        (
            {"kind": "moved", "names": ["a"], "service": "s", "lane": ""},
            "moved a to service s to lane -",
        ),
        ({"kind": "moved", "names": ["a"], "service": None, "lane": "l"}, "moved a to lane l"),
        ({"kind": "reported", "names": ["a"]}, "late a"),
        ({"kind": "released", "names": ["a"]}, "let go a"),
    ],
)
def test_record_reads_as_a_line(record: dict[str, Any], line: str) -> None:
    (told,) = lines_of({"at": 1.5, **record})
    time, *words = told.split()
    assert time.endswith(".500")
    assert " ".join(words) == line


def test_every_kind_of_record_has_a_word() -> None:
    kinds = [kind.__struct_config__.tag for kind in get_args(AnyRecordDocument)]
    assert [*RECORD_LABELS] == kinds
