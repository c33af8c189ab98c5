"""The import contracts hold, and a violation planted in a copy of the package is refused.

A contract that is never broken proves nothing, so each is broken here on purpose.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from itertools import chain
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


#: Planted files, each with one import that is not allowed, and the line of the report about it.
PLANTED_INSIDE = [
    ("core/planted_1.py", "import taskyard.journal", "core.planted_1 -> taskyard.journal"),
    ("core/planted_2.py", "from taskyard import cli", "core.planted_2 -> taskyard.cli"),
    ("errors.py", "import taskyard.core", "errors -> taskyard.core"),
    ("wire/planted.py", "import taskyard.journal", "wire.planted -> taskyard.journal"),
    ("journal/planted.py", "from taskyard import wire", "journal.planted -> taskyard.wire"),
    ("broker/planted.py", "import taskyard.worker", "broker.planted -> taskyard.worker"),
    ("relay/planted.py", "import taskyard.client", "relay.planted -> taskyard.client"),
    ("process/planted.py", "import taskyard.pipeline", "process.planted -> taskyard.pipeline"),
    ("net/planted.py", "import taskyard.broker", "net.planted -> taskyard.broker"),
    ("stowaway/__init__.py", "PLACE = None", "stowaway"),
]
#: The same for imports from outside of the package, by contract.
PLANTED_OUTSIDE = {
    PURE: [
        ("core/planted_1.py", "import time", "core.planted_1 -> time"),
        ("core/planted_2.py", "from random import Random", "core.planted_2 -> random"),
        ("core/planted_3.py", "def late() -> None: import socket", "core.planted_3 -> socket"),
        ("core/planted_4.py", "import os.path", "core.planted_4 -> os"),
        ("core/planted_5.py", "import threading", "core.planted_5 -> threading"),
        ("core/planted_6.py", "import asyncio", "core.planted_6 -> asyncio"),
        ("core/planted_7.py", "import subprocess", "core.planted_7 -> subprocess"),
    ],
    ONE_PACKAGE: [("core/planted_8.py", "import pyarrow", "core.planted_8 -> pyarrow")],
    SOCKETS: [
        ("journal/planted.py", "import zmq", "journal.planted -> zmq"),
        ("broker/planted_1.py", "from zmq import Poller", "broker.planted_1 -> zmq"),
    ],
    SPARK: [
        ("client/planted.py", "import pyspark", "client.planted -> pyspark"),
        ("pipeline/fold/planted.py", "import pyspark", "pipeline.fold.planted -> pyspark"),
    ],
    ARROW: [
        ("broker/planted_2.py", "import pyarrow.parquet", "broker.planted_2 -> pyarrow"),
        ("core/planted_8.py", "import pyarrow", "core.planted_8 -> pyarrow"),
    ],
}


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


def violations(copied_root: Path) -> dict[str, list[str]]:
    """Return the violations in the copy by broken contract. The exit code must agree."""
    environment = {**os.environ, "PYTHONPATH": str(copied_root), "COLUMNS": "200", "NO_COLOR": "1"}
    command = [str(LINT_IMPORTS), "--config", "pyproject.toml", "--no-cache"]
    done = subprocess.run(
        command, cwd=copied_root, env=environment, capture_output=True, text=True, check=False
    )
    verdicts = re.findall(r"^(.+) (KEPT|BROKEN)$", done.stdout, re.MULTILINE)
    assert len(verdicts) == 6, done.stdout + done.stderr
    broken = [contract for contract, verdict in verdicts if verdict == "BROKEN"]
    assert done.returncode == (1 if broken else 0)
    entry = re.compile(r"^- +taskyard\.(.+?)(?: \(l\.\d+\))?$", re.MULTILINE)
    found, rest = {}, done.stdout
    for name in reversed(broken):
        rest, _, part = rest.rpartition(f"\n{name}\n{'-' * len(name)}\n")
        found[name] = sorted(entry.findall(part))
    return found


def test_each_import_of_a_package_above_is_refused(copied_root: Path) -> None:
    for path, code, _ in PLANTED_INSIDE:
        plant(copied_root, path, code)
    assert violations(copied_root)[LAYERS] == sorted(line for _, _, line in PLANTED_INSIDE)


def test_each_forbidden_import_from_outside_is_refused(copied_root: Path) -> None:
    for path, code, _ in chain.from_iterable(PLANTED_OUTSIDE.values()):
        plant(copied_root, path, code)
    assert violations(copied_root) == {
        contract: sorted(line for _, _, line in planted)
        for contract, planted in PLANTED_OUTSIDE.items()
    }


def test_package_keeps_every_contract_and_sockets_may_be_had_through_net(
    copied_root: Path,
) -> None:
    plant(copied_root, "net/planted.py", "import zmq")
    plant(copied_root, "broker/planted.py", "import taskyard.net.planted")
    assert violations(copied_root) == {}


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
    # Parsing takes long, so parse only files with such words. Ruff allows one import per line.
    words = re.compile(rf"^\s*(?:import|from)\s+(?:{'|'.join(packages)})\b", re.MULTILINE)
    assert [
        f"{path}: {name}"
        for path in sorted((ROOT / importers).rglob("*.py"))
        if words.search(path.read_text())
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
    installed = packages_distributions()
    allowed = [
        requirement
        for requirement in wanted
        if not any(module in forbidden for module in modules_of(requirement, installed))
    ]
    assert [requirement.split(">")[0] for requirement in allowed] == ["msgspec"]


def _plain(name: str) -> str:
    """Return a distribution's name in one spelling: some wheels write `_` for `-`."""
    return name.lower().replace("_", "-")


def modules_of(requirement: str, installed: Mapping[str, list[str]]) -> list[str]:
    """Return the top-level modules of a requirement such as `rich>=13`."""
    return [
        module
        for module, distributions in installed.items()
        if any(_plain(requirement).startswith(_plain(name)) for name in distributions)
    ]
