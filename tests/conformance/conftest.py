"""One broker for many scenarios. Each scenario finds it empty."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

from tests.conformance.yard import Yard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


#: If this variable is set, the whole suite runs over CURVE.
WITH_KEYS: Final = "CONFORMANCE_WITH_KEYS"


class Holder:
    """The yard of this process. One that could not be emptied is replaced."""

    def __init__(self, directories: pytest.TempPathFactory, *, secure: bool = False) -> None:
        self._directories = directories
        self._secure = secure
        self._yard: Yard | None = None

    def get(self) -> Yard:
        if self._yard is None:
            self._yard = Yard(self._directories.mktemp("yard"), secure=self._secure)
        return self._yard

    def drop(self) -> None:
        if self._yard is not None:
            with self._yard:
                self._yard = None


@pytest.fixture(scope="session")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holder]:
    holder = Holder(tmp_path_factory, secure=WITH_KEYS in os.environ)
    yield holder
    holder.drop()


@pytest.fixture(scope="session")
def secure_holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holder]:
    holder = Holder(tmp_path_factory, secure=True)
    yield holder
    holder.drop()


@pytest.fixture
def yard(holder: Holder) -> Iterator[Yard]:
    yield from _swept(holder)


@pytest.fixture
def secure_yard(secure_holder: Holder) -> Iterator[Yard]:
    """Yield the yard whose broker requires keys."""
    yield from _swept(secure_holder)


def _swept(holder: Holder) -> Iterator[Yard]:
    yard = holder.get()
    yield yard
    try:
        yard.sweep()
    except BaseException:
        holder.drop()
        raise


@pytest.fixture
def own_yard(tmp_path: Path) -> Iterator[Yard]:
    """Yield a separate yard for a scenario that stops its broker."""
    with Yard(tmp_path, secure=WITH_KEYS in os.environ) as yard:
        yield yard
