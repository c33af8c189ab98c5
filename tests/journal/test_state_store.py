"""A store in PostgreSQL without its extra: one error, which names what to install."""

import sys
from pathlib import Path

import pytest

from taskyard.errors import NotInstalled
from taskyard.journal import schema, state_store


def test_store_without_its_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / schema.DATABASE_NAME).write_text("postgresql://db/yard")
    for name in [name for name in sys.modules if name.startswith("taskyard.postgresql")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(NotInstalled, match=r"needs psycopg \(`pip install 'taskyard\[postgres\]'`"):
        state_store.open_blobs(tmp_path)
