"""Names, outputs and reasons on a real terminal are escaped by every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pty import openpty
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from taskyard.campaign.batches import encode_batch
from taskyard.campaign.task_spec import TaskSpec
from taskyard.cli import format as cli_format
from taskyard.client.internal import InternalClient
from tests.cli.yard import running
from tests.kit.cases import each_case
from tests.kit.processes import PATIENCE_SECONDS, environment, run_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.cli.yard import Yard

#: Control sequences that must never reach a terminal: window title, bell, clear screen, colour, a
#: C1 sequence, and right-to-left text.
ACTING = ("\x1b]0;pwned", "\x07", "\x1b[2J", "\x1b[5;35m", "\x9b7m", "\u202e", "\x7f")
HOSTILE = "x" + "y".join(ACTING) + "z"

#: Full task names in a campaign of that name.
DONE, FAILED = f"{HOSTILE}/{HOSTILE}", f"{HOSTILE}/failed{HOSTILE}"

#: The output of a task: control sequences, and bytes that are not UTF-8.
PRINTED = HOSTILE.encode() + b"\x9b8m\ttab\n"

#: Run commands one after the other, each after a line with its number.
SCRIPT = """
import json, sys
from taskyard.cli.entry import run, taskyard
for number, words in enumerate(json.loads(sys.argv[1])):
    sys.stdout.write(f"=== {number}\\n")
    sys.stdout.flush()
    run(taskyard, words)
    sys.stdout.flush()
"""

READING: tuple[Sequence[str], ...] = (
    ("list",),
    ("list", "--failed"),
    ("list", "--match", HOSTILE),
    ("show", DONE),
    ("show", FAILED),
    ("results", DONE),
    ("log", DONE),
    ("why", DONE, FAILED),
    ("why", "--service", HOSTILE),
    ("status",),
    ("workers",),
    ("services",),
    ("lanes",),
    ("watch", "--since", "0", "--until-settled", "--campaign", HOSTILE),
    ("wait", DONE, FAILED),
    ("wait", "--campaign", HOSTILE),
)

#: Commands whose messages contain the name.
ACTING_VERBS: tuple[Sequence[str], ...] = (
    ("status", "--campaign", HOSTILE),
    ("show", f"unknown{HOSTILE}"),
    ("why", f"unknown{HOSTILE}"),
    ("status", "--campaign", f"unknown{HOSTILE}"),
    ("cancel", f"unknown{HOSTILE}"),
    ("submit", "--name", DONE, "--", "other"),
    ("submit", "--name", f"new{HOSTILE}", "--service", HOSTILE, "--", "true"),
    ("submit", "--wait", "--", "printf", "%b", r"\033]0;pwned\007"),
    ("pause", "--service", HOSTILE),
    ("pause",),
    ("resume", "--service", HOSTILE),
    ("config",),
    ("list", "--limit", f"{HOSTILE}"),
    (HOSTILE,),
)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """Run a broker with hostile names of tasks, campaign, lane, service and worker."""
    with running(tmp_path_factory.mktemp("yard"), worker=False) as yard:
        (yard.directory / "printed").write_bytes(PRINTED)
        with InternalClient(yard.broker.endpoint) as client:
            _submit(client, "", ["cat", str(yard.directory / "printed")])
            _submit(client, "failed", [f"no-program{HOSTILE}"])
            _submit(client, "waits", ["true"], service=HOSTILE)
            yard.start_worker("--name", f"worker{HOSTILE}")
            states = client.wait_names([DONE, FAILED])
        assert [state.name for state in states.values()] == ["DONE", "FAILED"]
        yield yard


def _submit(client: InternalClient, first: str, argv: list[str], **more: str) -> None:
    """Submit a task as a foreign client could, without checks of names."""
    spec = TaskSpec(name=f"{first}{HOSTILE}", argv=argv, lane=HOSTILE, **more)  # type: ignore[arg-type]
    assert client.create(encode_batch([spec], b"" if more else HOSTILE.encode(), 0)) == 1


def on_terminal(yard: Yard, verbs: Sequence[Sequence[str]], *options: str) -> list[str]:
    """Run commands on a real terminal. Return the output of each."""
    given = [[*words[:1], *options, *words[1:]] for words in verbs]
    reader, writer = openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(given)],
        stdin=writer,
        stdout=writer,
        stderr=writer,
        cwd=yard.directory,
        env=environment(TERM="xterm", COLUMNS="400", LINES="50"),
    ) as process:
        os.close(writer)
        written = b""
        with suppress(OSError):  # so ends a terminal that nothing writes to any more
            while part := os.read(reader, 65_536):
                written += part
        os.close(reader)
        assert process.wait(PATIENCE_SECONDS) == 0
    texts = written.decode(errors="surrogateescape").replace("\r\n", "\n").split("=== ")[1:]
    assert len(texts) == len(verbs)
    return [text.partition("\n")[2] for text in texts]


def acting_in(text: str) -> list[str]:
    return [part for part in (*ACTING, "\udc9b") if part in text]


def test_no_verb_that_reads_passes_control_characters_on_to_a_terminal(yard: Yard) -> None:
    for words, text in zip(READING, on_terminal(yard, READING), strict=True):
        assert acting_in(text) == [], words
        assert r"\x1b" in text, (words, text)


def test_no_refusal_and_no_other_verb_passes_control_characters_on(yard: Yard) -> None:
    for words, text in zip(ACTING_VERBS, on_terminal(yard, ACTING_VERBS), strict=True):
        assert acting_in(text) == [], words
        assert text, words


def test_output_of_a_task_is_escaped_on_a_terminal_but_for_tabs_and_newlines(yard: Yard) -> None:
    expected = cli_format.escape_control(HOSTILE) + r"\x9b8m" + "   tab\n"
    for text in on_terminal(yard, [("log", HOSTILE), ("results", HOSTILE)]):
        assert text.replace("\t", "   ") == expected


def test_pipe_gets_every_byte(yard: Yard) -> None:
    for verb in ("log", "result"):
        done = subprocess.run(
            [sys.executable, "-m", "taskyard.cli", verb, HOSTILE],
            cwd=yard.directory,
            env=environment(),
            capture_output=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.stdout == PRINTED


def test_json_has_no_control_characters_and_the_same_values(yard: Yard) -> None:
    for words, text in zip(READING, on_terminal(yard, READING, "--json"), strict=True):
        assert acting_in(text) == [], words
        has_names = words[0] not in ("wait", "results", "log")  # counts alone, or bytes in base64
        assert not has_names or r"\u001b" in text, words
    code, out, _ = run_here(yard.directory, "show", "--json", HOSTILE)
    assert code == 0
    assert acting_in(out) == []
    assert r"\u202e" in out
    assert r"\u009b" in out
    assert msgspec.json.decode(out)["task"]["name"] == HOSTILE


#: Invisible characters without effect: spaces, joiners, unassigned ones.
SPACES = (
    *range(0x2000, 0x200E),
    *range(0x2028, 0x202A),
    *range(0x202F, 0x2066),
    *range(0x206A, 0x2070),
    0x10FFFF,
)


@each_case("code", [*range(0xA0), 0x61C, *range(0x2000, 0x2070), 0xFF, 0x10FFFF])
def test_both_escapes_cover_the_same_characters(code: int) -> None:
    character = chr(code)
    is_acting = not character.isprintable() and character not in "\t\n" and code not in SPACES
    assert (cli_format.escape_control(character) != character) is is_acting
    document = cli_format.escape_control_json(msgspec.json.encode(character))
    assert msgspec.json.decode(document) == character
    assert not is_acting or document.isascii()


def test_stream_that_is_no_terminal_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert cli_format.raw_stream(file) is file
        before: Any = sys.stdout
        sys.stdout = file
        try:
            with cli_format.escaping_output():
                assert sys.stdout is file
        finally:
            sys.stdout = before


def test_progress_above_a_bar_is_escaped(yard: Yard) -> None:
    words = ("map", "--lines", "lines", "--", "no-program{}")
    (yard.directory / "lines").write_text(f"{HOSTILE}\n")
    (text,) = on_terminal(yard, [words])
    assert acting_in(text) == []
    assert "failed" in text
