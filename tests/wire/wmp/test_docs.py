"""The docs of WMP: their figures match the code, and their dialogue is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from taskyard.core import limits
from taskyard.core.limits import SECOND_NS
from taskyard.net.options import FRAMES_MAX
from taskyard.wire.wmp import frames as wmp_frames
from taskyard.wire.wmp import peer as wmp_peer
from taskyard.wire.wmp import server as wmp
from taskyard.wire.wmp.frames import Side

#: The first column of the manager's side of the dialogue.
ABOUT = 51

PAGE = (Path(__file__).parents[3] / "docs" / "dialects" / "wmp.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        f"after {wmp_peer.READY_NS_MIN // SECOND_NS} s, 2 s, 4 s and so",
        f"up to every {wmp_peer.READY_NS_MAX // SECOND_NS} s.",
        f"in order of arrival, for up to {wmp_peer.WAKE_NS // SECOND_NS} s",
        f"So does a timeout of {wmp_peer.LOCK_NS // SECOND_NS} s",
        f"sends a report again after {wmp_peer.REPORT_NS // SECOND_NS} s",
        f"at most {wmp_peer.REPORTS_MAX} times",
        f"up to {wmp_peer.REPORTS_KEPT_MAX:,} reports for a manager",
        f"does not GIVE within {limits.WAKE_NS_MAX // SECOND_NS} s is skipped",
        f"After {wmp.SILENCE_NS // SECOND_NS} s without a message",
        {2: "two"}[limits.HEARTBEATS_UNLISTED_MAX] + " of its heartbeats",
        f"({wmp.PING_NS // SECOND_NS} s each by default)",
        f"to a worker after {wmp.PING_NS // SECOND_NS} s of silence",
        f"At most {wmp_frames.PATH_MAX} relays in a row",
        f"| relays in a row | {wmp_frames.PATH_MAX} |",
        f"| headers | {wmp_frames.HEADER_BYTES_MAX // 1024} KiB, ",
        f" KiB, {wmp_frames.HEADER_DEPTH_MAX} deep |",
        f"| frames of a message | {FRAMES_MAX}, with identities |",
        f"| a worker's id | {wmp_frames.WORKER_BYTES_MAX} bytes |",
        f"| slots of a worker | {wmp_frames.SLOTS_MAX:,} |",
        f"1 to {limits.SERVICES_MAX:,} |",
        f"a manager keeps | {wmp.PEERS_MAX:,} |",
    ],
)
def test_figures_match_the_code(text: str) -> None:
    assert text in " ".join(PAGE.split())


def test_messages_of_the_dialogue_are_valid() -> None:
    block = PAGE.partition("## A dialogue")[2].split("```")[1]
    # A text beside a message is a comment.
    block = "\n".join(line[:ABOUT] for line in block.splitlines())
    found = re.findall(r'([→←]) "" WMP01 (..) ({[^}]*})', block)
    assert len(found) == 9
    for arrow, command, headers in found:
        side = Side.WORKER if arrow == "→" else Side.MANAGER
        message = [b"", b"WMP01", bytes.fromhex(command), headers.encode()]
        wmp_frames.decode(message, side)
