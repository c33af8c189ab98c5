"""The import contracts hold, and a violation planted in a copy of the package is refused.

A contract that is never broken proves nothing, so each is broken here on purpose.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import style

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"

LAYERS = "A package imports only packages below it"
PURE = "core is pure: no clock, socket, thread, random numbers or disk"
ONE_PACKAGE = "msgspec is core's one third-party package"
SOCKETS = "zmq is net's alone"
SPARK = "Spark is the pipeline's alone"
ARROW = "pyarrow is for extras"


@pytest.fixture
def copied_root(tmp_path: Path) -> Path:
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "taskyard", tmp_path / "taskyard", ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(copied_root: Path, path: str, code: str) -> None:
    planted = copied_root / "taskyard" / path
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(f'"""Planted."""\n\n{code}\n')


def broken_contracts(copied_root: Path) -> list[str]:
    """Return the names of the contracts that the copy breaks. The exit code must agree."""
    environment = {**os.environ, "PYTHONPATH": str(copied_root), "COLUMNS": "200", "NO_COLOR": "1"}
    command = [str(LINT_IMPORTS), "--config", "pyproject.toml", "--no-cache"]
    done = subprocess.run(
        command, cwd=copied_root, env=environment, capture_output=True, text=True, check=False
    )
    verdicts = [
        line.strip() for line in done.stdout.splitlines() if line.endswith((" KEPT", "BROKEN"))
    ]
    assert len(verdicts) == 6, done.stdout + done.stderr
    broken = [verdict.removesuffix(" BROKEN") for verdict in verdicts if "BROKEN" in verdict]
    assert done.returncode == (1 if broken else 0)
    return broken


def test_package_keeps_every_contract(copied_root: Path) -> None:
    assert broken_contracts(copied_root) == []


@pytest.mark.parametrize(
    ("path", "code", "contract"),
    [
        ("core/planted.py", "import taskyard.journal", LAYERS),
        ("core/planted.py", "from taskyard import cli", LAYERS),
        ("errors.py", "import taskyard.core", LAYERS),
        ("wire/planted.py", "import taskyard.journal", LAYERS),
        ("journal/planted.py", "from taskyard import wire", LAYERS),
        ("broker/planted.py", "import taskyard.worker", LAYERS),
        ("relay/planted.py", "import taskyard.client", LAYERS),
        ("process/planted.py", "import taskyard.pipeline", LAYERS),
        ("net/planted.py", "import taskyard.broker", LAYERS),
        ("stowaway/__init__.py", "PLACE = None", LAYERS),
        ("core/planted.py", "import time", PURE),
        ("core/planted.py", "from random import Random", PURE),
        ("core/planted.py", "def late() -> None:\n    import socket", PURE),
        ("core/planted.py", "import os.path", PURE),
        ("core/planted.py", "import threading", PURE),
        ("core/planted.py", "import asyncio", PURE),
        ("core/planted.py", "import subprocess", PURE),
        ("core/planted.py", "import pyarrow", ONE_PACKAGE),
        ("journal/planted.py", "import zmq", SOCKETS),
        ("broker/planted.py", "from zmq import Poller", SOCKETS),
        ("client/planted.py", "import pyspark", SPARK),
        ("broker/planted.py", "import pyarrow.parquet", ARROW),
    ],
)
def test_planted_violation_is_refused(
    copied_root: Path, path: str, code: str, contract: str
) -> None:
    plant(copied_root, path, code)
    assert contract in broken_contracts(copied_root)


def test_sockets_may_be_had_through_net(copied_root: Path) -> None:
    plant(copied_root, "net/planted.py", "import zmq")
    plant(copied_root, "broker/planted.py", "import taskyard.net.planted")
    assert broken_contracts(copied_root) == []


@pytest.mark.parametrize(
    ("importers", "packages"),
    [
        ("src", ("bench", "docs", "simulator", "soak_kit", "style", "tests")),
        ("tools/simulator", ("zmq", "pyspark")),
        ("tools/bench", ("zmq",)),
    ],
)
def test_product_and_tools_import_nothing_above_them(
    importers: str, packages: tuple[str, ...]
) -> None:
    assert [
        f"{path}: {name}"
        for path in sorted((ROOT / importers).rglob("*.py"))
        for name in style.imported_names(path)
        if name.partition(".")[0] in packages
    ] == []


def test_every_dependency_but_msgspec_is_forbidden_to_core() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [forbidden] = [each["forbidden_modules"] for each in contracts if each["name"] == ONE_PACKAGE]
    extras = settings["project"]["optional-dependencies"]
    wanted = settings["project"]["dependencies"] + [
        requirement for extra in extras if extra != "dev" for requirement in extras[extra]
    ]
    allowed = [
        requirement
        for requirement in wanted
        if not any(module in forbidden for module in modules_of(requirement))
    ]
    assert [requirement.split(">")[0] for requirement in allowed] == ["msgspec"]


def modules_of(requirement: str) -> list[str]:
    """Return the top-level modules of a requirement such as `rich>=13`."""
    return [
        module
        for module, distributions in packages_distributions().items()
        if any(requirement.startswith(name) for name in distributions)
    ]
