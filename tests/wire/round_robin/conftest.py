"""The broker of the tests of round-robin."""

import pytest

from tests.wire.round_robin.kit import Hall


@pytest.fixture
def hall() -> Hall:
    return Hall()
