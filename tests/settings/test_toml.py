"""Documents that the standard library's parser would take hours for are refused at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from taskyard.errors import UserError
from taskyard.net.keys import read_peer_key
from taskyard.settings.files import (
    FILE_BYTES_MAX,
    KEY_PARTS_MAX,
    LINES_MAX,
    InvalidSettings,
    TooDeep,
    check_depth,
    parse_toml,
    read,
)
from taskyard.settings.loader import problems

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The time limit of a refusal, twenty times the measured time.
CPU_SECONDS_MAX = 1.0

PARTS = 100_000

DEEP = {
    "bare": "a" + ".a" * PARTS + " = 1\n",
    "spaced": "a" + " \t. a" * PARTS + " = 1\n",
    "quoted": '"a"' + '."a.b"' * PARTS + " = 1\n",
    "literal": "'a'" + ".'a'" * PARTS + " = 1\n",
    "header": "[a" + ".a" * PARTS + "]\n",
    "inline": "x = {a" + ".a" * PARTS + " = 1}\n",
    "later": 'x = "#"\n[y]\nz' + ".a" * PARTS + " = 1\n",
    "lists": "a = " + "[" * PARTS,
    "lines": "[[x]]\n" * (LINES_MAX + 1),
}

#: Hard cases for the scanner, at the largest size of a file.
NOISE = ("a", '"', "'", '\\"', "\"'", ".", "a ", '"""', '"""a', "'''\\", "#", '"a\\', "a.", "\\")


def refused_quickly(parse: Callable[[], object]) -> str:
    began = time.process_time()
    with pytest.raises((UserError, ValueError)) as refused:
        parse()
    assert time.process_time() - began < CPU_SECONDS_MAX
    return str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEEP)
def test_deep_document_is_refused_quickly_with_its_place(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "taskyard.toml"
    file.write_text(DEEP[kind])
    message = refused_quickly(lambda: read(file))
    line = {"later": ":3", "lists": "", "lines": ""}.get(kind, ":1")
    assert message.startswith(f"{file}{line}: ")
    assert "invalid TOML" not in message


def test_config_check_names_the_key_that_is_too_deep(tmp_path: Path) -> None:
    file = tmp_path / "taskyard.toml"
    file.write_text(DEEP["bare"])
    began = time.process_time()
    assert problems(file) == ([f"{file}:1: a key has more than {KEY_PARTS_MAX} parts"], None)
    assert time.process_time() - began < CPU_SECONDS_MAX


def test_key_file_of_a_deep_key_is_refused_quickly(tmp_path: Path) -> None:
    file = tmp_path / "some.key"
    file.write_text(DEEP["bare"][:4000])
    file.chmod(0o600)
    assert "not a valid key file" in refused_quickly(lambda: read_peer_key(file))


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISE)
def test_scan_takes_linear_time(noise: str) -> None:
    text = noise * (FILE_BYTES_MAX // len(noise))
    began = time.process_time()
    try:
        check_depth(text)
    except TooDeep:
        assert noise == "a."
    assert time.process_time() - began < 5 * CPU_SECONDS_MAX


@pytest.mark.parametrize(
    "text",
    [
        '"' + "a." * 100 + '" = 1',
        "x = '" + "a." * 100 + "'",
        'x = """\n' + "a." * 100 + '\n"""',
        "x = '''" + "a." * 100 + "'''",
        "# " + "a." * 100,
        "x = [" + "1.5, " * 100 + "]",
        ".".join("a" * KEY_PARTS_MAX) + " = 1.5",
        "[" + ".".join("a" * KEY_PARTS_MAX) + "] # " + "a." * 100,
        'x = "\\"" # ' + "a." * 100,
    ],
)
def test_dots_that_join_no_key_are_no_parts(text: str) -> None:
    assert parse_toml(text) is not None


def test_number_of_too_many_digits_is_no_mistake_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "taskyard.toml"
    file.write_text("a = " + "9" * 5000)
    with pytest.raises(InvalidSettings, match="invalid TOML"):
        read(file)
