"""The lines between a host and its agents: fields, reports, what makes no sense, and hunger."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.core.events import Outcome
from taskyard.core.limits import PAYLOAD_BYTES_MAX, SECOND_NS
from taskyard.errors import IllegalTransition
from taskyard.wire.hungry import frames as hungry_frames
from taskyard.wire.hungry.frames import (
    AGENT_TRANSITIONS,
    LINE_BYTES_MAX,
    AgentCause,
    AgentSession,
    AgentState,
    Comment,
    Hungry,
    Lines,
    MalformedLine,
    Report,
    decode,
    escape,
    key_of,
    task_id,
    task_line,
    unescape,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

A = (b"a", 1)
B = (b"b", 2)


def fed(*keys: tuple[bytes, int], overfeed: int = 0) -> AgentSession:
    """An agent that has asked for these tasks, and got them."""
    conversation = AgentSession(overfeed)
    for key in keys:
        conversation.receive(b"#hungry\n")
        conversation.feed(key, b"", b"x")
    return conversation


# Fields.


def test_four_bytes_are_escaped_and_no_other() -> None:
    assert escape(b"a\tb\nc\rd\\e\0\xff #") == rb"a\tb\nc\rd\\e" + b"\0\xff #"


@given(st.binary(max_size=50))
def test_what_was_escaped_comes_back_and_fits_a_field(field: bytes) -> None:
    encoded = escape(field)
    assert unescape(encoded) == field
    assert not any(byte in encoded for byte in b"\t\n\r")


@given(st.binary(min_size=1, max_size=50), st.integers(0, 2**62))
def test_id_is_the_tasks_name_and_attempt_and_never_looks_like_a_comment(
    name: bytes, attempt: int
) -> None:
    encoded = task_id(name, attempt)
    assert key_of(encoded) == (name, attempt)
    assert not encoded.startswith(b"#")


def test_backslash_before_anything_else_stands_for_itself() -> None:
    assert unescape(rb"C:\dir\\x\q" + b"\\") == rb"C:\dir\x\q" + b"\\"


def test_task_is_a_line_of_three_fields() -> None:
    assert task_line(b"a/b", 3, b"disk\t1", b"x\ny") == b"a/b/3\tdisk\\t1\tx\\ny\n"


def test_task_without_a_payload_is_its_name() -> None:
    assert task_line(b"a", 1, b"", b"") == b"a/1\t\ta\n"


@pytest.mark.parametrize("name", [b"#hungry", b"# x", b"#idle"])
def test_task_that_is_called_like_a_control_word_is_told_from_it(name: bytes) -> None:
    line = task_line(name, 1, b"", b"x")
    assert line == b"\\" + name + b"/1\t\tx\n"
    encoded = line.split(b"\t")[0]
    assert decode(encoded + b"\tdone\tok") == Report((name, 1), Outcome.DONE, b"done")


# What an agent says.


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        (b"#hungry", Hungry()),
        (b"#hungry  ", Hungry()),
        (b"# half of it", Comment(b"half of it")),
        (b"#hungry now", Comment(b"hungry now")),
        (b"#", Comment(b"")),
        (b"", Comment(b"")),
        (b" \t ", Comment(b"")),
        (b"a/1\tresult\tok", Report(A, Outcome.DONE, b"result")),
        (b"a/1\t\tok2 250 accepted", Report(A, Outcome.DONE, b"", b"250 accepted")),
        (b"a/1\tx\\ty\tok3", Report(A, Outcome.DONE, b"x\ty")),
        (b"a/1\t\terror 550 nobody", Report(A, Outcome.FAILED_FINAL, b"", b"550 nobody")),
        (b"a/1\t\terror2", Report(A, Outcome.FAILED_FINAL)),
        (b"a/1\tlog\tdeferred busy", Report(A, Outcome.FAILED, b"log", b"busy")),
        (b"a/1\t\tdeferall down", Report(A, Outcome.DEFER_ALL, b"", b"down")),
        (b"a/1\t\tdeferback", Report(A, Outcome.DEFER_BACK)),
        (
            b"a/1\t\tretryat +90 greylisted\ttwice",
            Report(
                A, Outcome.RETRY_AT, b"", b"greylisted\ttwice", 90 * SECOND_NS, is_from_now=True
            ),
        ),
        (
            b"a/1\t\tretryat 2000000000",
            Report(A, Outcome.RETRY_AT, retry_ns=2_000_000_000 * SECOND_NS),
        ),
        (b"a/b\\n/c/7\t\tok", Report((b"a/b\n/c", 7), Outcome.DONE)),
    ],
)
def test_line_means(line: bytes, heard: hungry_frames.AgentMessage) -> None:
    assert decode(line) == heard


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello", "'hello' is neither a report nor a comment"),
        (b"\tx\tok", "is neither a report nor a comment"),
        (b"/1\tx\tok", "is neither a report nor a comment"),
        (b"a/one\tx\tok", "is neither a report nor a comment"),
        (b"a/-1\tx\tok", "is neither a report nor a comment"),
        (b"a/" + b"1" * 5000 + b"\tx\tok", "is neither a report nor a comment"),
        (b"n" * 1025 + b"/1\tx\tok", "is neither a report nor a comment"),
        (b"a/\xd9\xa1\tx\tok", "is neither a report nor a comment"),
        (b"a/1", "the agent's report is not ID, DETAIL and STATUS, with a tab between"),
        (b"a/1\tok", "the agent's report is not ID, DETAIL and STATUS, with a tab between"),
        (b"a/1\tx\t", "the agent reported '', which is no status"),
        (b"a/1\tx\tOK", "the agent reported 'OK', which is no status"),
        (b"a/1\tx\ty\tok", "the agent reported 'y', which is no status"),
        (b"a/1\tx\t\xff", "the agent reported '\\\\xff', which is no status"),
        (b"a/1\tx\tretryat", "the agent reported retryat '', which is no time"),
        (b"a/1\tx\tretryat soon", "the agent reported retryat 'soon', which is no time"),
        (b"a/1\tx\tretryat -5", "the agent reported retryat '-5', which is no time"),
        (b"a/1\tx\tretryat ++5", "the agent reported retryat '++5', which is no time"),
        (b"a/1\tx\tretryat 99999999999", "retryat '99999999999', which is no time"),
        (b"a/1\tx\tretryat " + b"9" * 5000, "which is no time"),
    ],
)
def test_line_without_a_sense_is_told_with_what_is_wrong(line: bytes, reason: str) -> None:
    heard = decode(line)
    assert isinstance(heard, MalformedLine)
    assert reason in heard.reason
    assert len(heard.reason) < 1000


# Lines out of bytes.


def test_lines_come_whole_however_they_are_cut() -> None:
    stream = b"one\ntwo\r\n\nthree\rfour\nhalf"
    for size in range(1, len(stream) + 1):
        lines = Lines()
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        found = [line for chunk in chunks for line in lines.add(chunk)]
        assert found == [b"one", b"two", b"", b"three\rfour"]


def test_line_of_the_very_limit_is_heard_and_a_longer_one_is_not() -> None:
    for extra, heard in ((0, True), (1, False)):
        lines = Lines(100)
        assert lines.add(b"first\n" + b"x" * 60) == [b"first"]
        found = lines.add(b"y" * (40 + extra) + b"\nafter\n")
        assert bool(found) is heard
        assert lines.is_overfull is not heard


def test_nothing_is_kept_of_a_line_without_an_end() -> None:
    lines, chunk = Lines(), b"x" * 65536
    tracemalloc.start()
    for _ in range(10_000):
        assert lines.add(chunk) == []
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines.is_overfull
    assert (kept_bytes < 10_000, peak_bytes < 4 * LINE_BYTES_MAX) == (True, True)
    assert lines.add(b"\na/1\t\tok\n") == []


# The machine.


def test_every_state_has_its_line_in_the_table_and_an_agent_may_always_ask() -> None:
    assert list(AGENT_TRANSITIONS) == list(AgentState)
    assert all(AgentCause.ASKED in causes for causes in AGENT_TRANSITIONS.values())


def test_agent_goes_from_larva_through_its_tasks_to_the_idle_pool_and_leaves() -> None:
    conversation = AgentSession()
    seen = [conversation.state]
    assert conversation.receive(b"#hungry\n") == [Hungry()]
    seen.append(conversation.state)
    assert conversation.feed(A, b"", b"x") == b"a/1\t\tx\n"
    assert conversation.run_out() == b""
    seen.append(conversation.state)
    assert conversation.receive(b"a/1\tr\tok\n#hungry\n") == [
        Report(A, Outcome.DONE, b"r"),
        Hungry(),
    ]
    assert conversation.run_out() == b"#idle\n"
    seen.append(conversation.state)
    assert conversation.run_out() == b""  # it is told once
    assert conversation.dismiss() == b"\n"
    assert conversation.dismiss() == b""
    seen.append(conversation.state)
    assert seen == list(AgentState)


def test_idle_does_not_use_up_the_hunger() -> None:
    conversation = AgentSession()
    conversation.receive(b"#hungry\n")
    conversation.run_out()
    assert conversation.can_eat()
    assert conversation.feed(B, b"lane", b"x") == b"b/2\tlane\tx\n"
    assert conversation.state is AgentState.STUFFING


def test_larva_is_not_fed() -> None:
    conversation = AgentSession()
    assert not conversation.can_eat()
    with pytest.raises(IllegalTransition, match="an agent that is LARVA can't be FED"):
        conversation.feed(A, b"", b"x")


def test_each_hunger_is_good_for_one_task() -> None:
    conversation = fed(A)
    conversation.receive(b"a/1\t\tok\n")
    assert not conversation.can_eat()
    conversation.receive(b"#hungry\n")
    assert conversation.can_eat()


def test_hunger_ahead_waits_for_the_report() -> None:
    conversation = fed(A)
    conversation.receive(b"#hungry\n#hungry\n#hungry\n")
    assert not conversation.can_eat()
    conversation.receive(b"a/1\t\tok\n")
    assert conversation.can_eat()
    conversation.feed(B, b"", b"x")
    conversation.receive(b"b/2\t\tok\n")
    assert not conversation.can_eat()  # it was not saved up


def test_overfed_agent_holds_more_and_reports_in_any_order() -> None:
    conversation = fed(A, B, overfeed=1)
    conversation.receive(b"#hungry\n")
    assert not conversation.can_eat()
    assert list(conversation.held) == [A, B]
    assert conversation.receive(b"b/2\t\tok\n") == [Report(B, Outcome.DONE)]
    assert list(conversation.held) == [A]
    assert conversation.can_eat()


@pytest.mark.parametrize("line", [b"b/2\t\tok\n", b"a/2\t\tok\n", b"a/1\t\tok\na/1\t\tok\n"])
def test_report_on_what_it_does_not_hold_is_garbage(line: bytes) -> None:
    conversation = fed(A)
    last = conversation.receive(line)[-1]
    assert isinstance(last, MalformedLine)
    assert "which it has not" in last.reason


@pytest.mark.parametrize("line", [b"a/1\n", b"a/1\tok\n", b"a/1\t\tgood\n", b"a/1\t\tretryat x\n"])
def test_report_without_a_sense_on_a_task_that_it_holds_is_a_failed_attempt(line: bytes) -> None:
    conversation = fed(A)
    (heard,) = conversation.receive(line)
    assert isinstance(heard, Report)
    assert (heard.key, heard.outcome) == (A, Outcome.FAILED)
    assert heard.text.startswith(b"the agent")
    assert not conversation.held


def test_last_line_without_an_end_is_not_heard() -> None:
    conversation = fed(A)
    assert conversation.receive(b"a/1\t\tok") == []
    assert list(conversation.held) == [A]


def test_leaving_agent_gets_nothing_and_may_still_report() -> None:
    conversation = fed(A)
    conversation.dismiss()
    assert conversation.receive(b"#hungry\na/1\tr\tok\n") == [
        Hungry(),
        Report(A, Outcome.DONE, b"r"),
    ]
    assert not conversation.can_eat()


# Noise.

SEEDS = [b"#hungry", b"a/1\tresult\tok", b"a/1\t\tretryat +5 later", b"b/2\tx\tdeferall", b"# so"]


def spoilt(count: int, seed: int) -> Iterator[bytes]:
    """Lines with bytes flipped, cut off, put in and doubled; and plain noise."""
    random_bits = random.Random(seed)
    for _ in range(count):
        line = bytearray(random_bits.choice(SEEDS))
        for _ in range(random_bits.randrange(1, 4)):
            at, way = random_bits.randrange(len(line) + 1), random_bits.randrange(5)
            if way == 0 and at < len(line):
                line[at] ^= 1 << random_bits.randrange(8)
            elif way == 1:
                del line[at:]
            elif way == 2:
                line[at:at] = random_bits.choice(
                    [b"\t", b"\\", b"/", b"#", b"\0", b"\r", b"\n", b"+"]
                )
            elif way == 3:
                line[at:at] = line[: random_bits.randrange(20)]
            else:
                line[:] = random_bits.randbytes(random_bits.randrange(60))
        yield bytes(line)


def test_whatever_is_said_is_heard_and_nothing_is_half_taken() -> None:
    conversation = fed((b"held", 1), (b"held", 2), overfeed=1)
    for line in spoilt(5000, seed=1):
        for heard in conversation.receive(line + b"\n"):
            # None of it names a task that it holds: nothing may be settled by accident.
            assert isinstance(heard, Hungry | Comment | MalformedLine), line
    assert list(conversation.held) == [(b"held", 1), (b"held", 2)]
    assert conversation.receive(b"held/2\t\tok\nheld/1\tr\terror no\n") == [
        Report((b"held", 2), Outcome.DONE),
        Report((b"held", 1), Outcome.FAILED_FINAL, b"r", b"no"),
    ]


@pytest.mark.parametrize(
    "stream",
    [
        b"\n" * 10_000,
        b"\t" * 10_000 + b"\n",
        b"\\" * 10_001 + b"\n",
        b"/" * 10_000 + b"\t\tok\n",
        b"[" * 100_000 + b"\n",
        bytes(range(256)) * 40 + b"\n",
        b"#" * 100_000 + b"\n",
        "\N{ARABIC-INDIC DIGIT ONE}\N{ZERO WIDTH SPACE}/1\t\tok\n".encode() * 100,
    ],
)
def test_nasty_input_changes_nothing(stream: bytes) -> None:
    conversation = fed(A)
    conversation.receive(stream)
    assert (list(conversation.held), conversation.is_overfull) == ([A], False)


# The page.

PAGE = (Path(__file__).parents[3] / "docs" / "dialects" / "hungry.md").read_text()


def test_dialogue_of_the_page_is_understood() -> None:
    dialogue = PAGE.partition("## A dialogue")[2].split("```")[1].strip("\n").splitlines()
    conversation = AgentSession()
    heard: list[hungry_frames.AgentMessage] = []
    for line in dialogue:
        way, text = line[0], line[2:].replace("⇥", "\t").encode()
        if way == "←":
            heard += conversation.receive(text + b"\n")
        elif text == b"#idle":
            assert conversation.run_out() == text + b"\n"
        elif text:
            encoded, lane, payload = text.split(b"\t")
            key = key_of(encoded)
            assert key is not None
            assert conversation.can_eat()
            assert conversation.feed(key, unescape(lane), unescape(payload)) == text + b"\n"
        else:
            assert conversation.dismiss() == b"\n"
    assert conversation.state is AgentState.LEAVING
    assert [one.outcome for one in heard if isinstance(one, Report)] == [
        Outcome.DONE,
        Outcome.RETRY_AT,
        Outcome.FAILED_FINAL,
    ]
    assert not any(isinstance(one, MalformedLine) for one in heard)


def test_page_names_every_status_and_every_state() -> None:
    statuses = PAGE.partition("## Reports")[2].partition("\n11.")[0]
    assert [name for name in hungry_frames.STATUSES if f"`{name.decode()}" not in statuses] == []
    assert [state.name for state in AgentState if f"| {state.name} |" not in PAGE] == []


@pytest.mark.parametrize(
    "text",
    [
        f"has at most {LINE_BYTES_MAX >> 20} MiB",
        f"a payload, {PAYLOAD_BYTES_MAX >> 20} MiB",
    ],
)
def test_figures_of_the_page_are_those_of_the_code(text: str) -> None:
    assert text in PAGE
