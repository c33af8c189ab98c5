"""Fixtures: a broker with a worker per file, and a caller of commands per test."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from docs import error_texts
from tests.cli.yard import Caller, Yard, running

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Parsing the whole source takes seconds.
_COLLECT: Final = cache(error_texts.collect)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard")) as running_yard:
        yield running_yard


@pytest.fixture
def call(yard: Yard, capsysbinary: pytest.CaptureFixture[bytes]) -> Caller:
    return Caller(yard.state, capsysbinary)


@pytest.fixture
def collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect the texts of all errors once."""
    monkeypatch.setattr(error_texts, "collect", _COLLECT)
