"""The lines between a host and its agents: fields, reports, malformed lines, and hunger."""

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
from taskyard.wire import hungry as hungry_frames
from taskyard.wire.hungry import (
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
    """Return the session of an agent that has requested and got these tasks."""
    session = AgentSession(overfeed)
    for key in keys:
        session.receive(b"#hungry\n")
        session.feed(key, b"", b"x")
    return session


# Fields.


def test_only_four_bytes_are_escaped() -> None:
    assert escape(b"a\tb\nc\rd\\e\0\xff #") == rb"a\tb\nc\rd\\e" + b"\0\xff #"


@given(st.binary(max_size=50))
def test_escaped_field_is_restored_and_fits_a_line(field: bytes) -> None:
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
def test_task_named_like_a_control_word_is_distinguished_from_it(name: bytes) -> None:
    line = task_line(name, 1, b"", b"x")
    assert line == b"\\" + name + b"/1\t\tx\n"
    encoded = line.split(b"\t")[0]
    assert decode(encoded + b"\tdone\tok") == Report((name, 1), Outcome.DONE, b"done")


# Messages of an agent.


@pytest.mark.parametrize(
    ("line", "message"),
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
        (b"a/1\t\terror 550 no user", Report(A, Outcome.FAILED_FINAL, b"", b"550 no user")),
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
def test_line_is_decoded(line: bytes, message: hungry_frames.AgentMessage) -> None:
    assert decode(line) == message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello", "'hello': neither a report nor a comment"),
        (b"\tx\tok", "neither a report nor a comment"),
        (b"/1\tx\tok", "neither a report nor a comment"),
        (b"a/one\tx\tok", "neither a report nor a comment"),
        (b"a/-1\tx\tok", "neither a report nor a comment"),
        (b"a/" + b"1" * 5000 + b"\tx\tok", "neither a report nor a comment"),
        (b"n" * 1025 + b"/1\tx\tok", "neither a report nor a comment"),
        (b"a/\xd9\xa1\tx\tok", "neither a report nor a comment"),
        (b"a/1", "agent's report: not ID, DETAIL and STATUS separated by tabs"),
        (b"a/1\tok", "agent's report: not ID, DETAIL and STATUS separated by tabs"),
        (b"a/1\tx\t", "agent's report: unknown status ''"),
        (b"a/1\tx\tOK", "agent's report: unknown status 'OK'"),
        (b"a/1\tx\ty\tok", "agent's report: unknown status 'y'"),
        (b"a/1\tx\t\xff", "agent's report: unknown status '\\\\xff'"),
        (b"a/1\tx\tretryat", "invalid time '' of retryat"),
        (b"a/1\tx\tretryat soon", "invalid time 'soon' of retryat"),
        (b"a/1\tx\tretryat -5", "invalid time '-5' of retryat"),
        (b"a/1\tx\tretryat ++5", "invalid time '++5' of retryat"),
        (b"a/1\tx\tretryat 99999999999", "invalid time '99999999999' of retryat"),
        (b"a/1\tx\tretryat " + b"9" * 5000, "invalid time"),
    ],
)
def test_malformed_line_has_a_reason(line: bytes, reason: str) -> None:
    message = decode(line)
    assert isinstance(message, MalformedLine)
    assert reason in message.reason
    assert len(message.reason) < 1000


# Bytes to lines.


def test_lines_are_complete_however_they_are_cut() -> None:
    stream = b"one\ntwo\r\n\nthree\rfour\nhalf"
    for size in range(1, len(stream) + 1):
        lines = Lines()
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        found = [line for chunk in chunks for line in lines.add(chunk)]
        assert found == [b"one", b"two", b"", b"three\rfour"]


def test_line_at_the_limit_is_accepted_and_a_longer_one_is_not() -> None:
    for extra, message in ((0, True), (1, False)):
        lines = Lines(100)
        assert lines.add(b"first\n" + b"x" * 60) == [b"first"]
        found = lines.add(b"y" * (40 + extra) + b"\nafter\n")
        assert bool(found) is message
        assert lines.is_overfull is not message


def test_nothing_is_kept_of_an_endless_line() -> None:
    lines, chunk = Lines(), b"x" * 65536
    tracemalloc.start()
    for _ in range(10_000):
        assert lines.add(chunk) == []
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines.is_overfull
    assert (kept_bytes < 10_000, peak_bytes < 4 * LINE_BYTES_MAX) == (True, True)
    assert lines.add(b"\na/1\t\tok\n") == []


# The state machine.


def test_every_state_is_in_the_table_and_allows_hungry() -> None:
    assert list(AGENT_TRANSITIONS) == list(AgentState)
    assert all(AgentCause.ASKED in causes for causes in AGENT_TRANSITIONS.values())


def test_agent_passes_from_larva_through_tasks_to_idle_and_exit() -> None:
    session = AgentSession()
    seen = [session.state]
    assert session.receive(b"#hungry\n") == [Hungry()]
    seen.append(session.state)
    assert session.feed(A, b"", b"x") == b"a/1\t\tx\n"
    assert session.run_out() == b""
    seen.append(session.state)
    assert session.receive(b"a/1\tr\tok\n#hungry\n") == [
        Report(A, Outcome.DONE, b"r"),
        Hungry(),
    ]
    assert session.run_out() == b"#idle\n"
    seen.append(session.state)
    assert session.run_out() == b""  # sent once
    assert session.dismiss() == b"\n"
    assert session.dismiss() == b""
    seen.append(session.state)
    assert seen == list(AgentState)


def test_idle_does_not_use_up_the_hunger() -> None:
    session = AgentSession()
    session.receive(b"#hungry\n")
    session.run_out()
    assert session.can_eat()
    assert session.feed(B, b"lane", b"x") == b"b/2\tlane\tx\n"
    assert session.state is AgentState.STUFFING


def test_larva_gets_no_task() -> None:
    session = AgentSession()
    assert not session.can_eat()
    with pytest.raises(IllegalTransition, match="agent in state LARVA: FED is not allowed"):
        session.feed(A, b"", b"x")


def test_each_hungry_is_good_for_one_task() -> None:
    session = fed(A)
    session.receive(b"a/1\t\tok\n")
    assert not session.can_eat()
    session.receive(b"#hungry\n")
    assert session.can_eat()


def test_early_hungry_waits_for_the_report() -> None:
    session = fed(A)
    session.receive(b"#hungry\n#hungry\n#hungry\n")
    assert not session.can_eat()
    session.receive(b"a/1\t\tok\n")
    assert session.can_eat()
    session.feed(B, b"", b"x")
    session.receive(b"b/2\t\tok\n")
    assert not session.can_eat()  # the third was not counted


def test_overfed_agent_holds_more_and_reports_in_any_order() -> None:
    session = fed(A, B, overfeed=1)
    session.receive(b"#hungry\n")
    assert not session.can_eat()
    assert list(session.held) == [A, B]
    assert session.receive(b"b/2\t\tok\n") == [Report(B, Outcome.DONE)]
    assert list(session.held) == [A]
    assert session.can_eat()


@pytest.mark.parametrize("line", [b"b/2\t\tok\n", b"a/2\t\tok\n", b"a/1\t\tok\na/1\t\tok\n"])
def test_report_on_a_task_not_held_is_malformed(line: bytes) -> None:
    session = fed(A)
    last = session.receive(line)[-1]
    assert isinstance(last, MalformedLine)
    assert "which the agent does not hold" in last.reason


@pytest.mark.parametrize("line", [b"a/1\n", b"a/1\tok\n", b"a/1\t\tgood\n", b"a/1\t\tretryat x\n"])
def test_malformed_report_on_a_held_task_is_a_failed_attempt(line: bytes) -> None:
    session = fed(A)
    (message,) = session.receive(line)
    assert isinstance(message, Report)
    assert (message.key, message.outcome) == (A, Outcome.FAILED)
    assert message.text.startswith(b"agent's report: ")
    assert not session.held


def test_last_line_without_an_end_is_ignored() -> None:
    session = fed(A)
    assert session.receive(b"a/1\t\tok") == []
    assert list(session.held) == [A]


def test_leaving_agent_gets_nothing_and_may_still_report() -> None:
    session = fed(A)
    session.dismiss()
    assert session.receive(b"#hungry\na/1\tr\tok\n") == [
        Hungry(),
        Report(A, Outcome.DONE, b"r"),
    ]
    assert not session.can_eat()


# Malformed lines.

SEEDS = [b"#hungry", b"a/1\tresult\tok", b"a/1\t\tretryat +5 later", b"b/2\tx\tdeferall", b"# so"]


def spoilt(count: int, seed: int) -> Iterator[bytes]:
    """Yield lines with bytes flipped, cut, inserted and doubled, and random bytes."""
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


def test_any_lines_are_decoded_and_settle_nothing_by_accident() -> None:
    session = fed((b"held", 1), (b"held", 2), overfeed=1)
    for line in spoilt(5000, seed=1):
        for message in session.receive(line + b"\n"):
            # None of them names a held task, so none may be settled.
            assert isinstance(message, Hungry | Comment | MalformedLine), line
    assert list(session.held) == [(b"held", 1), (b"held", 2)]
    assert session.receive(b"held/2\t\tok\nheld/1\tr\terror no\n") == [
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
    session = fed(A)
    session.receive(stream)
    assert (list(session.held), session.is_overfull) == ([A], False)


# The docs.

PAGE = (Path(__file__).parents[3] / "docs" / "dialects" / "hungry.md").read_text()


def test_dialogue_of_the_docs_is_valid() -> None:
    dialogue = PAGE.partition("## A dialogue")[2].split("```")[1].strip("\n").splitlines()
    session = AgentSession()
    message: list[hungry_frames.AgentMessage] = []
    for line in dialogue:
        way, text = line[0], line[2:].replace("⇥", "\t").encode()
        if way == "←":
            message += session.receive(text + b"\n")
        elif text == b"#idle":
            assert session.run_out() == text + b"\n"
        elif text:
            encoded, lane, payload = text.split(b"\t")
            key = key_of(encoded)
            assert key is not None
            assert session.can_eat()
            assert session.feed(key, unescape(lane), unescape(payload)) == text + b"\n"
        else:
            assert session.dismiss() == b"\n"
    assert session.state is AgentState.LEAVING
    assert [one.outcome for one in message if isinstance(one, Report)] == [
        Outcome.DONE,
        Outcome.RETRY_AT,
        Outcome.FAILED_FINAL,
    ]
    assert not any(isinstance(one, MalformedLine) for one in message)


def test_docs_name_every_status_and_every_state() -> None:
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
def test_figures_of_the_docs_match_the_code(text: str) -> None:
    assert text in " ".join(PAGE.split())
