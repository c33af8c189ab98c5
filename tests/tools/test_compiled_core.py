"""The build hook: compiles only if asked, and only modules that mypyc supports.

`tests/wheel` tests that other wheels are pure. `./yard check --long` compiles the modules and runs
the tests of the core (`tools/compiled_check.py`).
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import compiled_core

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("module", compiled_core.MODULES)
def test_compiled_module_defines_no_struct(module: str) -> None:
    # Because mypyc drops the options of a struct without a warning.
    name = module.removesuffix(".py").replace("/", ".")
    members = vars(importlib.import_module(name)).values()
    classes = [one for one in members if isinstance(one, type) and one.__module__ == name]
    assert [one for one in classes if issubclass(one, msgspec.Struct)] == []


def test_variable_turns_compiling_on(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {}
    for value in ("", "0", "1"):
        monkeypatch.setenv(compiled_core.VARIABLE, value)
        wanted[value] = compiled_core.is_wanted()
    assert wanted == {"": False, "0": False, "1": True}


def test_other_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled_core.VARIABLE, "yes")
    with pytest.raises(SystemExit, match="TASKYARD_COMPILE=yes: expected 0 or 1"):
        compiled_core.is_wanted()


def test_editable_install_is_refused(tmp_path: Path) -> None:
    build = "from hatchling.build import build_editable; build_editable(r'{}')"
    ended = subprocess.run(
        [sys.executable, "-c", build.format(tmp_path)],
        cwd=ROOT,
        env=os.environ | {compiled_core.VARIABLE: "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == "TASKYARD_COMPILE: can't compile an editable install (leave out -e)\n"
