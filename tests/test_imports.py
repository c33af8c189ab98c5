"""Importing the core loads msgspec and pure parts of the standard library, nothing else."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import taskyard

ROOT = Path(__file__).parent.parent

#: Prints the modules that importing the core adds to an interpreter.
IMPORT_CORE = """
import importlib, json, pkgutil, sys
before = list(sys.modules)
import taskyard.core
for module in pkgutil.walk_packages(taskyard.core.__path__, "taskyard.core."):
    importlib.import_module(module.name)
print(json.dumps([name for name in sys.modules if name not in before]))
"""


def modules_loaded_by(code: str) -> list[str]:
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    return [str(name) for name in json.loads(output)]


def top_levels(modules: list[str]) -> list[str]:
    return sorted({module.partition(".")[0] for module in modules})


def test_core_loads_msgspec_and_no_other_third_party_package() -> None:
    loaded = top_levels(modules_loaded_by(IMPORT_CORE))
    # msgspec may load packages of its own, such as typing_extensions.
    beyond_msgspec = top_levels(modules_loaded_by("import msgspec" + IMPORT_CORE))
    assert "msgspec" in loaded
    assert [name for name in beyond_msgspec if name not in sys.stdlib_module_names] == ["taskyard"]


def test_core_loads_nothing_that_touches_the_world() -> None:
    loaded = top_levels(modules_loaded_by(IMPORT_CORE))
    worldly = ["asyncio", "pyarrow", "pyspark", "socket", "sqlite3", "subprocess", "zmq"]
    assert [name for name in worldly if name in loaded] == []


def test_taskyard_itself_loads_nothing() -> None:
    code = (
        "import json, sys; before = list(sys.modules); import taskyard;"
        "print(json.dumps([name for name in sys.modules if name not in before]))"
    )
    assert modules_loaded_by(code) == ["taskyard"]


def test_command_line_loads_no_heavy_package_before_a_verb_asks_for_it() -> None:
    code = "import json, sys; import taskyard.cli; print(json.dumps(list(sys.modules)))"
    loaded = top_levels(modules_loaded_by(code))
    assert [name for name in ["msgspec", "pyarrow", "rich", "sqlite3"] if name in loaded] == []


def test_public_names_are_loaded_on_use() -> None:
    code = (
        "import json, taskyard;"
        "print(json.dumps([getattr(taskyard, name).__name__ for name in taskyard.__all__]))"
    )
    assert modules_loaded_by(code) == taskyard.__all__
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        taskyard.Clinet  # type: ignore[attr-defined]  # noqa: B018


#: The limit for `taskyard --help` on an idle machine.
HELP_SECONDS_MAX = 0.3

#: Direct dependencies of an install without extras.
DEPENDENCIES_MAX = 8


def test_help_starts_quickly() -> None:
    # CPU time, and the best of several, because other tests run beside it.
    code = (
        "import json, time, taskyard.cli.entry as entry\n"
        "code = entry.run(entry.taskyard, ['--help'])\n"
        "print(json.dumps([time.process_time()]).rjust(40))"
    )
    took = min(
        float(json.loads(subprocess.check_output([sys.executable, "-c", code]).splitlines()[-1])[0])
        for _ in range(5)
    )
    assert took < HELP_SECONDS_MAX


def test_core_install_is_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert 0 < len(project["dependencies"]) <= DEPENDENCIES_MAX
    assert not any(one.startswith("pyarrow") for one in project["dependencies"])
