"""The broker of the tests of round-robin."""

import pytest

from tests.wire.round_robin.kit import Harness


@pytest.fixture
def harness() -> Harness:
    return Harness()
