"""Environments of submissions: the format, the variables of a command, and other hosts."""

import json

import pytest

from taskyard.calls.environments import (
    Environment,
    decode_environment,
    encode_environment,
    merged_variables,
    without_variables,
)
from taskyard.errors import PeerError

OWN = {"PATH": "/w", "VIRTUAL_ENV": "/venv", "LC_ALL": "C", "PWD": "/w", "TOKEN": "worker"}


@pytest.mark.parametrize(
    "environment",
    [
        Environment("h", "/a"),
        Environment("h", "/a", {}),
        Environment("h", "/caf\udce9", {"A": "\udcff", "B": "ä€"}, is_whole=True),
    ],
)
def test_environment_comes_back_as_it_was(environment: Environment) -> None:
    assert decode_environment(encode_environment(environment)) == environment


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"cwd":"/"}',
        b'{"host":"h","cwd":"relative"}',
        b'{"host":"h","cwd":"/","shell":"sh"}',
        b'{"host":"h","cwd":"/a\\u0000b"}',
        b'{"host":"h","cwd":"/","env":[]}',
        b'{"host":"h","cwd":"/","env":{"A":1}}',
        b'{"host":"h","cwd":"/","env":{"":"x"}}',
        b'{"host":"h","cwd":"/","env":{"A=B":"x"}}',
        b'{"host":"h","cwd":"/","env":{"A":"\\u0000"}}',
    ],
)
def test_invalid_environment_is_an_error(raw: bytes) -> None:
    with pytest.raises(PeerError, match=r"^environment: "):
        decode_environment(raw)


def test_variables_of_the_submitter_replace_those_of_the_worker() -> None:
    given = Environment("h", "/a", {"PATH": "/s", "EXTRA": "1"})
    # The worker's VIRTUAL_ENV and LC_ALL do not fit the submitter, its PWD not the directory.
    assert merged_variables(given, OWN) == {"PATH": "/s", "EXTRA": "1", "TOKEN": "worker"}
    assert merged_variables(Environment("h", "/a"), OWN) == OWN
    whole = Environment("h", "/a", {"A": "1"}, is_whole=True)
    assert merged_variables(whole, OWN) == {"A": "1"}


def test_other_hosts_get_no_variables() -> None:
    raw = encode_environment(Environment("h", "/a", {"SECRET": "x"}, is_whole=True))
    assert without_variables(raw, b"h") is raw
    assert json.loads(without_variables(raw, b"other")) == {"host": "h", "cwd": "/a"}
    assert json.loads(without_variables(raw, b"")) == {"host": "h", "cwd": "/a"}
