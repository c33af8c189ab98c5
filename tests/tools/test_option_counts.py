"""The command line fits in a head: its size may only fall."""

from __future__ import annotations

from option_counts import option_counts


def test_command_line_does_not_grow() -> None:
    counts = option_counts()
    assert (counts.commands, counts.options, counts.listed) == (52, 263, 20)
