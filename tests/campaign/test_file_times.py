"""Inputs and outputs are compared by their times."""

import os
from pathlib import Path

import pytest

from taskyard.campaign.submitter import TaskFiles


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, at_ns in (("old", 1_000), ("new", 2_000), ("newer", 3_000), ("twin", 2_000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(at_ns, at_ns))
    return tmp_path


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ((), ("old",), ""),
        (("old",), ("new",), ""),
        (("old", "new"), ("newer",), ""),
        (("gone", "old"), ("new",), ""),
        (("old",), (), "it has no outputs"),
        (("old",), ("gone",), "gone is missing"),
        (("new",), ("old",), "new is newer than old"),
        (("old", "newer"), ("newer", "new"), "newer is newer than new"),
        (("new",), ("twin",), "new is as new as twin"),
    ],
)
def test_outputs_are_up_to_date_if_they_are_newer_than_all_inputs(
    directory: Path, inputs: tuple[str, ...], outputs: tuple[str, ...], reason: str
) -> None:
    assert TaskFiles(inputs, outputs, str(directory)).why_stale() == reason


def test_missing_files_and_changes_are_found(directory: Path) -> None:
    files = TaskFiles(["old", "new"], ["newer"], str(directory))
    assert (files.missing_input(), files.missing_output()) == ("", "")
    assert TaskFiles(["old", "x"], ["y"], str(directory)).missing_input() == "x"
    assert TaskFiles(["old", "x"], ["y"], str(directory)).missing_output() == "y"
    assert (files.input_since(1_999), files.input_since(2_000)) == ("new", "")
    whole = str(directory / "old")
    assert TaskFiles([whole], (), "/elsewhere").missing_input() == ""
    assert TaskFiles(["a\0b"]).missing_input() == "a\0b"
