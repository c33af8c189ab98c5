"""A state directory written by the first version: journal format 3, global names.

Campaign `nightly` was run from `TASKS` and compacted: `join` failed. After that came a bundle
`news` of two, `deploy` in the campaign `week/7`, and `outside` without a campaign.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).with_name("old_state.tar.gz")

#: The tasks in `nightly.jsonl`.
TASKS: list[dict[str, Any]] = [
    {"name": "fetch/a", "argv": ["echo", "a"]},
    {"name": "fetch/b", "argv": ["echo", "b"], "after": ["fetch/a"]},
    {"name": "join", "argv": ["sh", "-c", "test -e mended"], "after": ["fetch/b"]},
    {"name": "last", "argv": ["echo", "last"], "after": ["join"]},
]


def unpack_old_state(directory: Path) -> Path:
    """Unpack the state and its campaign's file. Return the state directory."""
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4
            archive.extractall(directory, filter="data")
        else:
            archive.extractall(directory)  # noqa: S202  # our own
    state = directory / "state"
    for path in (state, *state.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    file = directory / "nightly.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return state
