"""The files in a state directory that name listeners and leaders."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskyard.process import state_files
from taskyard.process.state_files import ENDPOINT_FILE, OpenListener

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LISTENERS = [OpenListener("ping-pong", ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"))]


def test_file_is_there_while_a_broker_listens_elsewhere(tmp_path: Path) -> None:
    with state_files.listed(tmp_path, LISTENERS):
        assert (tmp_path / ENDPOINT_FILE).exists()
        assert state_files.open_listeners(tmp_path) == []  # no process has locked the state
    assert not (tmp_path / ENDPOINT_FILE).exists()


def test_stale_file_that_stays_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ENDPOINT_FILE).mkdir()
    with caplog.at_level(logging.WARNING), state_files.listed(tmp_path, []):
        pass
    assert caplog.messages[0] == f"{tmp_path / ENDPOINT_FILE}: can't remove: Is a directory"
