"""ZMailer's lines: what is written for tasks, and what an agent's lines mean for them."""

from __future__ import annotations

import pytest

from taskyard.core.events import Outcome
from taskyard.core.limits import SECOND_NS
from taskyard.settings.keys import DEFAULTS, service_keys
from taskyard.wire.hungry import (
    HUNGRY_LINES,
    SESSIONS,
    AgentState,
    Comment,
    Hungry,
    MalformedLine,
    PassedOver,
    Report,
    ZmailerSession,
)

A, B, C = (b"mail/12/93", 1), (b"12/153", 2), (b"mail/12/213", 1)
LINE = b"12\ta.example"


def fed(*keys: tuple[bytes, int], line: bytes = LINE) -> ZmailerSession:
    session = ZmailerSession()
    assert session.receive(b"#hungry\n") == [Hungry()]
    assert session.can_eat()
    assert session.feed(keys[0], b"smtp/a.example", line, *keys[1:]) == line + b"\n"
    assert not session.can_eat()
    return session


def test_tasks_share_a_line_and_each_has_its_report() -> None:
    session = fed(A, B, C)
    received = session.receive(
        b"12/213\t\tok3 Ok\n"
        b"# a comment\n"
        b"12/93\tuser\1failed\1\terror2 no \\t such user\n"
        b"12/153\tuser\1delayed\tretryat +60 try later\n"
        b"#hungry\n"
    )
    assert received == [
        Report(C, Outcome.DONE, b"Ok"),
        Comment(b"a comment"),
        Report(A, Outcome.FAILED_FINAL, b"user\1failed\1", b"no \\t such user"),
        Report(
            B, Outcome.RETRY_AT, b"user\1delayed", b"try later", 60 * SECOND_NS, is_from_now=True
        ),
        Hungry(),
    ]
    assert not session.held
    assert session.can_eat()


def test_tasks_without_a_report_are_passed_over_when_the_agent_is_hungry() -> None:
    session = fed(A, B)
    assert session.receive(b"12/93\t\tdeferred busy\n#hungry\n") == [
        Report(A, Outcome.FAILED, b"", b"busy"),
        PassedOver((B,)),
    ]
    assert not session.held
    assert session.can_eat()


def test_resync_passes_over_the_tasks_of_its_file_only() -> None:
    session = fed(A, B)
    assert session.receive(b"#resync 13\n") == [Comment(b"resync 13")]
    assert session.receive(b"#resync 12\n#hungry\n") == [PassedOver((A, B)), Hungry()]
    assert not session.held


def test_answer_to_idle_is_not_that_to_the_next_line() -> None:
    session = ZmailerSession()
    session.receive(b"#hungry\n")
    assert session.run_out() == b"#idle\n"
    assert session.can_eat()
    session.feed(A, b"", LINE)
    assert session.receive(b"#hungry\n") == [Hungry()]  # to `#idle`, written before the line
    assert list(session.held) == [A]
    assert not session.can_eat()
    assert session.receive(b"12/93\t\tok\n#hungry\n") == [Report(A, Outcome.DONE), Hungry()]
    assert session.state is AgentState.STUFFING
    assert session.can_eat()


def test_line_of_a_recipient_that_is_not_held_is_a_comment() -> None:
    session = fed(A)
    assert session.receive(b"12/153\t\tok Ok\n2/93\t\tok\n") == [
        Comment(b"not held: 12/153\t\tok Ok"),
        Comment(b"not held: 2/93\t\tok"),
    ]
    assert list(session.held) == [A]


@pytest.mark.parametrize("line", [b"12 / 93\t\tok", b"panic!", b"mail/12/93\t\tok"])
def test_any_other_line_is_malformed(line: bytes) -> None:
    (message,) = fed(A).receive(line + b"\n")
    assert isinstance(message, MalformedLine)
    assert message.key is None


@pytest.mark.parametrize("line", [b"12/93", b"12/93\tok", b"12/93\t\tsoso", b"12/93\t\tretryat x"])
def test_damaged_report_is_a_failed_attempt(line: bytes) -> None:
    (message,) = fed(A).receive(line + b"\n")
    assert isinstance(message, Report)
    assert (message.key, message.outcome) == (A, Outcome.FAILED)


@pytest.mark.parametrize("line", [b"12", b"A/B/12-3", b"12\ta b", b"12\t-"])
def test_payload_is_a_path_and_perhaps_a_host(line: bytes) -> None:
    assert not ZmailerSession.problem_of(line)


@pytest.mark.parametrize("line", [b"", b"#idle", b"12\n13", b"12\t", b"12\ta\tb", b"12\0", b" 1"])
def test_payload_that_is_another_line_is_refused(line: bytes) -> None:
    assert ZmailerSession.problem_of(line).startswith("payload: ")


def test_settings_have_the_names_of_all_lines() -> None:
    (key,) = [one for one in service_keys(DEFAULTS) if one.name == "lines"]
    assert [key.kind.read(name) for name in SESSIONS] == [*SESSIONS]
    assert key.unset == HUNGRY_LINES
