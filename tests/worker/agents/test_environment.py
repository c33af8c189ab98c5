"""The environment of agents."""

import pytest

from taskyard.errors import UserError
from taskyard.worker.agents.runner import clean_environment, read_variables


def test_only_basic_variables_are_inherited() -> None:
    needed = {"PATH": "/bin", "HOME": "/", "LANG": "C", "LC_ALL": "C", "TZ": "UTC", "USER": "me"}
    others = {"TASKYARD_KEY": "secret", "AWS_SECRET": "secret", "PYTHONPATH": "x", "LCX": "x"}
    assert clean_environment(needed | {"TMPDIR": "/t"} | others) == needed | {"TMPDIR": "/t"}


def test_variable_has_a_given_value_or_that_of_the_worker() -> None:
    given = ["A=1", "B=", "C", "D=x=y"]
    assert read_variables(given, {"C": "3"}) == {"A": "1", "B": "", "C": "3", "D": "x=y"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("=x", "must be NAME=VALUE or NAME"),
        ("", "must be NAME=VALUE or NAME"),
        ("A=\0", "must be NAME=VALUE or NAME"),
        ("MISSING", "not set in the worker's environment"),
        ("TASKYARD_KEY=x", "variables are the worker's"),
    ],
)
def test_invalid_variable_is_refused(given: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_variables([given], {})
