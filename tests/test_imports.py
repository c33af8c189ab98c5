"""What importing the core loads: the standard library's quiet parts, msgspec, and nothing else."""

import json
import subprocess
import sys

import pytest

import taskyard

#: Prints what importing the core and all its modules adds to an interpreter.
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
    # What msgspec loads for itself (typing_extensions, where it finds it) is msgspec's affair.
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


def test_what_programs_import_is_there_when_it_is_used() -> None:
    code = (
        "import json, taskyard;"
        "print(json.dumps([getattr(taskyard, name).__name__ for name in taskyard.__all__]))"
    )
    assert modules_loaded_by(code) == taskyard.__all__
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        taskyard.Clinet  # noqa: B018
