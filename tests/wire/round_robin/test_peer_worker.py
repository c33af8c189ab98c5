"""The round-robin worker's half of the protocol, frame by frame. Without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from taskyard.core.limits import SECOND_NS
from taskyard.wire.round_robin.peer import (
    CONNECTION_NS,
    EXIT_NS_MAX,
    HEARTBEAT_NS,
    REGISTER_REPLY_NS,
    Print,
    Run,
    Send,
    Stop,
    Worker,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskyard.wire.round_robin.peer import Action

SRV, CLI = b"tcp://127.0.0.1:6714", b"tcp://127.0.0.1:6714:cli"
LMQ = b"LMQv100"

#: The header of a stream's message: state, packing, the length of the handle and the handle.
HEADER = b"%sR\x08" + bytes(8)


def block(offset: int, length: int) -> bytes:
    return offset.to_bytes(4, "little") + length.to_bytes(4, "little") + b"\x01" * length


class Stage:
    """A server that is played: delivers its messages, and collects the worker's."""

    endpoint = SRV.decode()

    def __init__(self, slots: int = 10, commands: Iterable[bytes] = ()) -> None:
        self.now_ns = SECOND_NS
        self.sent: list[list[bytes]] = []
        #: Messages stay unsent.
        self.is_blocked = False
        self.made = 1
        self.printed: list[str] = []
        self.programs: list[Run | Stop] = []
        self.worker = Worker(self.endpoint, "w", self.now_ns, slots=slots, commands=commands)
        self._run(self.worker.taken())

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.append(action.frames)
            elif isinstance(action, Print):
                self.printed.append(action.text)
            else:
                self.programs.append(action)

    def sent_messages(self) -> list[list[bytes]]:
        """Return the worker's new messages: the frames after address, empty frame and version."""
        sent, self.sent = self.sent, []
        assert all(frames[0] == SRV for frames in sent)
        return [frames[1:] for frames in sent]

    def reply_to(self, *frames: bytes) -> list[list[bytes]]:
        """Return the worker's reply to a message of the server."""
        self._run(self.worker.take([SRV, *frames], self.now_ns))
        return self.later(0)

    def later(self, ns: int) -> list[list[bytes]]:
        self.now_ns += ns
        due_ns = self.worker.connection_due_ns
        if due_ns is not None and self.now_ns >= due_ns:
            self._run(self.worker.check_reconnected(self.now_ns, self.made))
        self._run(self.worker.time_passed(self.now_ns, is_blocked=self.is_blocked))
        return self.sent_messages()

    def register(self) -> None:
        self._run(self.worker.register(self.now_ns))

    def finish(self, number: int, result: bytes = b"", failure: str = "") -> list[list[bytes]]:
        """End a program, and return the worker's messages."""
        self._run(self.worker.finish(number, result, failure))
        return self.sent_messages()

    def deregister(self) -> None:
        self._run(self.worker.deregister(self.now_ns))

    def registered(self) -> Stage:
        self.sent_messages()
        self.register()
        ((*_, number, _key, _slots, _),) = self.sent_messages()
        assert self.reply_to(*lmq(6, number)) == []
        assert self.worker.is_registered
        return self


def lmq(command: int, number: bytes, *arguments: bytes) -> list[bytes]:
    return [b"", LMQ, bytes([command]), number, *arguments, b""]


def test_worker_connects_and_registers() -> None:
    stage = Stage()
    assert stage.sent_messages() == [lmq(1, b"1")]
    stage.register()
    assert stage.sent_messages() == [lmq(4, b"2", b"\x08", b"10")]
    assert stage.worker.is_waiting
    stage.reply_to(*lmq(6, b"2"))
    assert stage.worker.is_registered
    assert not stage.worker.is_waiting


def test_refused_registration_is_printed() -> None:
    stage = Stage()
    stage.register()
    stage.reply_to(*lmq(6, b"2", b"ERROR no room"))
    assert not stage.worker.is_registered
    assert stage.printed == ["w can't register: no room"]


def test_missing_server_is_printed_once_and_retried() -> None:
    stage = Stage()
    stage.register()
    stage.sent_messages()
    goodbye = lmq(3, b"WORKER", b"\x09")
    assert stage.later(REGISTER_REPLY_NS) == [goodbye, lmq(4, b"3", b"\x08", b"10")]
    assert not stage.worker.is_waiting
    assert stage.later(REGISTER_REPLY_NS) == [goodbye, lmq(4, b"4", b"\x08", b"10")]
    assert stage.printed == [f"no server answers at {stage.endpoint}"]
    stage.reply_to(*lmq(6, b"4"))
    assert stage.worker.is_registered


def test_worker_registers_again_on_another_connection() -> None:
    stage = Stage().registered()
    assert stage.later(CONNECTION_NS) == []
    stage.made += 1
    assert stage.worker.wake_at_ns() == stage.now_ns + CONNECTION_NS
    goodbye, register = lmq(3, b"WORKER", b"\x09"), lmq(4, b"3", b"\x08", b"10")
    assert stage.later(CONNECTION_NS) == [goodbye, register]
    stage.reply_to(*lmq(6, b"3"))
    assert stage.worker.is_registered
    assert stage.later(CONNECTION_NS) == []


def test_register_that_was_lost_with_its_connection_is_repeated_at_once() -> None:
    stage = Stage()
    stage.register()
    stage.later(CONNECTION_NS)
    stage.sent_messages()
    stage.made += 1
    goodbye, register = lmq(3, b"WORKER", b"\x09"), lmq(4, b"3", b"\x08", b"10")
    assert stage.later(CONNECTION_NS) == [goodbye, register]
    stage.reply_to(*lmq(6, b"2"))  # the first one was answered on the old connection
    assert not stage.worker.is_registered
    stage.reply_to(*lmq(6, b"3"))
    assert stage.worker.is_registered


@pytest.mark.parametrize(
    ("message", "result"),
    [
        ([b"\x01"], []),
        ([b"\x01", b"echo"], [b"echo"]),
        ([b"\x0a", b"stream", b"4"], [HEADER % b"2" + block(0, 4)]),
        ([b"\x0a", b"stream", b"0"], [HEADER % b"2"]),
        ([b"\x0a", b"stream"], [b"ERROR STREAM: needs an id and a size of at most 7 digits"]),
        (
            [b"\x0a", b"s", b"99999999"],
            [b"ERROR STREAM: needs an id and a size of at most 7 digits"],
        ),
        ([b"other"], [b"ERROR unknown message: this worker handles PING and STREAM"]),
        ([], [b"ERROR unknown message: this worker handles PING and STREAM"]),
    ],
)
def test_tracked_message_is_answered_by_its_way_and_its_slot_is_free_then(
    message: list[bytes], result: list[bytes]
) -> None:
    stage = Stage().registered()
    assert stage.reply_to(*lmq(4, b"id", *message), CLI) == [
        [CLI, *lmq(6, b"id", *result)],
        lmq(3, b"3", b"\x07"),
    ]


def test_task_of_another_dialect_is_answered_to_the_server_itself() -> None:
    stage = Stage().registered()
    sent_messages = stage.reply_to(*lmq(4, b"1/task", b"\x01"))
    assert sent_messages == [lmq(6, b"1/task"), lmq(3, b"3", b"\x07")]


def test_message_that_wants_no_answer_gets_none() -> None:
    stage = Stage().registered()
    assert stage.reply_to(*lmq(3, b"id", b"\x01"), CLI) == [lmq(3, b"3", b"\x07")]
    assert stage.worker.messages == 1


def test_ping_is_answered_registered_or_not() -> None:
    assert Stage().reply_to(*lmq(1, b"there?"))[1:] == [lmq(2, b"there?")]


def test_deregister_is_followed_by_a_ping_and_waits_for_the_pong() -> None:
    stage = Stage().registered()
    stage.deregister()
    assert stage.sent_messages() == [lmq(3, b"WORKER", b"\x09"), lmq(1, b"3")]
    assert stage.worker.is_waiting
    assert stage.reply_to(*lmq(4, b"id", b"\x01"), CLI) == []  # it belongs to another worker by now
    stage.reply_to(*lmq(2, b"3"))
    assert not stage.worker.is_waiting


def test_deregister_times_out_without_a_server() -> None:
    stage = Stage().registered()
    stage.deregister()
    stage.later(EXIT_NS_MAX)
    assert not stage.worker.is_waiting


def test_dropped_worker_registers_again() -> None:
    stage = Stage().registered()
    assert stage.later(HEARTBEAT_NS) == [lmq(4, b"3", b"ongoing")]
    assert stage.reply_to(*lmq(6, b"3")) == []
    assert stage.later(HEARTBEAT_NS) == [lmq(4, b"4", b"ongoing")]
    goodbye = lmq(3, b"WORKER", b"\x09")
    answer = lmq(6, b"4", b"ERROR register first")
    assert stage.reply_to(*answer) == [goodbye, lmq(4, b"5", b"\x08", b"10")]
    assert stage.reply_to(*answer) == []


def test_worker_registers_again_when_the_server_has_restarted() -> None:
    stage = Stage().registered()
    goodbye, register = lmq(3, b"WORKER", b"\x09"), lmq(4, b"3", b"\x08", b"10")
    assert stage.reply_to(*lmq(1, b"RESTARTED")) == [lmq(2, b"RESTARTED"), goodbye, register]
    assert stage.reply_to(*lmq(4, b"id", b"\x01"), CLI) == []  # DEREGISTER has returned it
    assert stage.reply_to(*lmq(1, b"RESTARTED")) == [lmq(2, b"RESTARTED")]  # in flight
    assert stage.reply_to(*lmq(6, b"3")) == []
    assert stage.worker.is_registered


def test_worker_repeats_register_until_a_restarted_server_answers() -> None:
    stage = Stage().registered()
    stage.reply_to(*lmq(1, b"RESTARTED"))
    goodbye = lmq(3, b"WORKER", b"\x09")
    assert stage.later(REGISTER_REPLY_NS) == [goodbye, lmq(4, b"4", b"\x08", b"10")]
    stage.reply_to(*lmq(6, b"3"))  # the answer before DEREGISTER
    assert stage.reply_to(*lmq(4, b"id", b"\x01"), CLI) == []
    stage.reply_to(*lmq(6, b"4"))
    assert stage.worker.is_registered
    assert "no server answers" not in " ".join(stage.printed)


def test_worker_without_a_server_registers_again_once() -> None:
    stage = Stage().registered()
    stage.is_blocked = True
    assert stage.reply_to(*lmq(1, b"RESTARTED")) == [
        *(lmq(2, b"RESTARTED"), lmq(3, b"WORKER", b"\x09")),
        lmq(4, b"3", b"\x08", b"10"),
    ]
    assert stage.later(REGISTER_REPLY_NS) == []
    assert stage.later(REGISTER_REPLY_NS) == []
    stage.is_blocked = False
    assert stage.later(0) == []


def test_worker_that_has_left_does_not_register_when_the_server_restarts() -> None:
    stage = Stage().registered()
    stage.deregister()
    stage.sent_messages()
    assert stage.reply_to(*lmq(1, b"RESTARTED")) == [lmq(2, b"RESTARTED")]


def test_junk_is_ignored() -> None:
    stage = Stage().registered()
    for frames in ([], [b""] * 63, [b"x"], [b"", b"LMQv200", b"\x04", b"id", b""]):
        assert stage.reply_to(*frames) == []


# Installed commands.


def test_worker_registers_with_its_slots() -> None:
    stage = Stage(slots=3)
    stage.register()
    assert stage.sent_messages()[-1] == lmq(4, b"2", b"\x08", b"3")
    stage.reply_to(*lmq(6, b"2"))
    assert stage.printed == ["w is registered with 3 slots"]


def test_programs_run_at_once_and_answer_as_they_end() -> None:
    stage = Stage(commands=[b"count"]).registered()
    assert stage.reply_to(*lmq(4, b"a", b"count", b"one"), CLI) == []
    assert stage.reply_to(*lmq(4, b"b", b"count", b"1", b"2"), CLI) == []
    assert stage.reply_to(*lmq(4, b"c", b"count"), CLI) == []
    assert stage.programs == [
        Run(1, b"count", b"one"),
        Run(2, b"count", b"\x92\xc4\x011\xc4\x012"),  # a MessagePack array
        Run(3, b"count", b""),
    ]
    assert stage.finish(2, b"2\n") == [[CLI, *lmq(6, b"b", b"2\n")], lmq(3, b"3", b"\x07")]
    assert stage.finish(1, b"") == [[CLI, *lmq(6, b"a", b"")], lmq(3, b"4", b"\x07")]
    assert stage.finish(3, b"half", "exit status 1") == [
        [CLI, *lmq(6, b"c", b"ERROR exit status 1")],
        lmq(3, b"5", b"\x07"),
    ]
    assert stage.finish(3, b"again") == []


def test_failed_program_of_a_message_without_an_answer_is_printed() -> None:
    stage = Stage(commands=[b"count"]).registered()
    stage.reply_to(*lmq(3, b"a", b"count", b"one"), CLI)
    assert stage.finish(1, b"", "exit status 1") == [lmq(3, b"3", b"\x07")]
    assert stage.printed[-1] == "w: count failed: exit status 1"


def test_unknown_key_names_the_installed_commands() -> None:
    stage = Stage(commands=[b"count", b"sort"]).registered()
    (answer, _) = stage.reply_to(*lmq(4, b"a", b"other"), CLI)
    known = b"this worker handles PING and STREAM, and count, sort"
    assert answer[-2] == b"ERROR unknown message: " + known


def test_renewed_connection_is_noticed_before_programs_start_after_a_restart() -> None:
    stage = Stage(commands=[b"count"]).registered()
    stage.later(CONNECTION_NS)
    stage.made += 1
    stage.reply_to(*lmq(1, b"RESTARTED"))
    assert [one.rpartition(": ")[0] for one in stage.printed[-2:]] == [
        "the server has restarted",
        "the connection was renewed",
    ]
    assert stage.later(CONNECTION_NS) == []


def test_programs_are_stopped_when_their_messages_go_to_other_workers() -> None:
    """An INCREMENT of a former registration would free the slot of another message."""
    stage = Stage(commands=[b"count"]).registered()
    stage.reply_to(*lmq(4, b"a", b"count", b"one"), CLI)
    stage.reply_to(*lmq(1, b"RESTARTED"))
    assert stage.programs[1:] == [Stop(1)]
    assert stage.finish(1, b"late") == []
    assert "w has stopped 1 program" in stage.printed
