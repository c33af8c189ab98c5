"""The wheel: pure, installed into a fresh environment of every Python found, and typed.

Pythons are found on the PATH, among uv's and among pyenv's. Dependencies have the versions of
constraints.txt, and come from uv's cache or an index. `./yard test` takes the Python of the
checkout alone, and checks the types without an installation: each takes 20 s of CPU.
`./yard check --long` takes all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import pytest

from tests.kit.processes import PATIENCE_SECONDS, environment
from tests.kit.requirements import need, skip

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
UV: Final = Path(sys.executable).parent / "uv"
#: The supported versions. The first is that of pyproject.toml.
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
OWN_VERSION: Final = "{}.{}".format(*sys.version_info)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel, as pip does."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (made,) = directory.iterdir()
    return made


def test_wheel_is_pure(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [archive.read(name) for name in names if name.endswith(".dist-info/WHEEL")]
    assert b"Root-Is-Purelib: true" in about
    assert [name for name in names if name.endswith(".so")] == []
    assert {"taskyard/core/scheduler.py", "taskyard/py.typed"} <= set(names)


@pytest.mark.parametrize(
    "version",
    [pytest.param(one, marks=[] if one == OWN_VERSION else pytest.mark.whole) for one in VERSIONS],
)
def test_program_runs_with_the_installed_wheel(version: str, wheel: Path, tmp_path: Path) -> None:
    python = installed(need(f"Python {version}"), wheel, tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(HERE / "program.py", home)
    taskyard = python.parent / "taskyard"
    run(home, taskyard, "up", "--detach", "-j", "1", "--allow", "operator", "--allow-pickle")
    try:
        run(home, python, "-W", "error", "program.py")
    finally:
        run(home, taskyard, "down")


@pytest.mark.whole
def test_types_of_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    python = installed(sys.executable, wheel, tmp_path)
    for name in ("program.py", "wrong_use.py"):
        shutil.copy(HERE / name, tmp_path)
    options = ("--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache")
    run(tmp_path, sys.executable, "-m", "mypy", *options, "program.py", "wrong_use.py")


def installed(python: str, wheel: Path, directory: Path) -> Path:
    """Install the wheel into a fresh environment of a Python. Return the Python there."""
    fresh = directory / "fresh"
    run(directory, UV, "venv", "-q", "--python", python, fresh)
    install: list[str | Path] = [UV, "pip", "install", "-q", "--python", fresh]
    install += ["-c", CONSTRAINTS, wheel]
    done = subprocess.run([*install, "--offline"], check=False, capture_output=True, text=True)
    if done.returncode:  # the cache lacks a package
        done = subprocess.run(install, check=False, capture_output=True, text=True)
    if done.returncode:
        skip("package index", done.stderr.strip().splitlines()[-1])
    return fresh / "bin" / "python"


def run(directory: Path, *command: str | Path) -> None:
    """Run a command to its end, without the packages of this checkout. Fail with its output."""
    others = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env=others,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout
