"""Fixtures: a broker with a worker per file, and a caller of commands per test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.yard import Caller, Yard, running

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with running(tmp_path_factory.mktemp("yard")) as running_yard:
        yield running_yard


@pytest.fixture
def call(yard: Yard, capsysbinary: pytest.CaptureFixture[bytes]) -> Caller:
    return Caller(yard.state, capsysbinary)
