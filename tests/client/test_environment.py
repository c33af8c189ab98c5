"""The environment that a client sends: which variables, which directory, and when."""

import os
import socket
from pathlib import Path

import pytest

from taskyard.calls.environments import decode_environment
from taskyard.client.discovery import Variables, submitter_environment
from taskyard.errors import UserError

LOCAL = "ipc:///some/broker.sock"
USUAL = {"PATH": "/bin", "HOME": "/me", "LC_ALL": "C", "CONDA_PREFIX": "/c", "TZ": "UTC"}
OWN = {**USUAL, "TOKEN": "secret", "LCX": "no"}


@pytest.mark.parametrize(
    ("variables", "env"),
    [
        (None, USUAL),
        (["TOKEN"], {**USUAL, "TOKEN": "secret"}),
        (True, OWN),
        (False, None),
        ({"ONLY": "this"}, {"ONLY": "this"}),
    ],
)
def test_chosen_variables_are_sent_with_host_and_directory(
    variables: Variables, env: dict[str, str] | None
) -> None:
    found = decode_environment(submitter_environment(LOCAL, variables, OWN))
    assert (found.host, found.cwd, found.env) == (socket.gethostname(), os.getcwd(), env)  # noqa: PTH109
    assert found.is_whole is (variables is True)


def test_nothing_is_sent_over_tcp() -> None:
    assert submitter_environment("tcp://127.0.0.1:1", None, OWN) == b""
    assert submitter_environment("tcp://127.0.0.1:1", variables=False, own=OWN) == b""
    for variables in (["TOKEN"], True):
        with pytest.raises(UserError, match="can't be passed on over TCP"):
            submitter_environment("tcp://127.0.0.1:1", variables, OWN)


def test_variable_that_is_not_set_is_an_error() -> None:
    with pytest.raises(UserError, match=r"variable NONE: not set \(give NONE=VALUE\)"):
        submitter_environment(LOCAL, ["NONE"], OWN)


def test_too_many_variables_are_an_error() -> None:
    with pytest.raises(UserError, match="limit is 262,144"):
        submitter_environment(LOCAL, {"LONG": "x" * 300_000}, OWN)


def test_deleted_directory_is_named_by_pwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert decode_environment(submitter_environment(LOCAL, own={"PWD": "/gone"})).cwd == "/gone"
    assert decode_environment(submitter_environment(LOCAL, own={})).cwd == "/"
