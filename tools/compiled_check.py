"""Builds a wheel with a compiled core, as a user does, and runs the tests against it.

A step of `./yard check --long`: the compiler takes minutes. The tests are those of the pure
package. This file is also a plugin of pytest, which skips tests that replace a part of a compiled
module: compiled code does not see the replacement.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Final
from zipfile import ZipFile

import pytest

from compiled_core import MODULES, VARIABLE

ROOT: Final = Path(__file__).parent.parent

#: Without the planted bugs, which are replaced parts of modules.
TESTS: Final = ("tests/core", "tests/journal", "tests/sim", "--ignore=tests/sim/test_mutations.py")

NAMES: Final = [module.removesuffix(".py").replace("/", ".") for module in MODULES]

#: Prints the modules that are imported from their source.
PURE_MODULES: Final = """
import importlib, sys
for name in sys.argv[1:]:
    path = importlib.import_module(name).__file__
    if not path.endswith(".so"):
        print(name, path)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Test the package with a compiled core.")
    parser.add_argument("--schedules", type=int, default=500, metavar="N")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="taskyard-compiled-") as directory:
        package = Path(directory) / "package"
        unpack(build(Path(directory)), package)
        check(package, options.schedules)


def build(directory: Path) -> Path:
    """Build the wheel by pip, with the packages of this environment."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    run([*pip, "--no-deps", "--no-build-isolation", "-w", directory, ROOT], {VARIABLE: "1"})
    (wheel,) = directory.glob("*.whl")
    return wheel


def unpack(wheel: Path, package: Path) -> None:
    """Unpack the wheel beside the environment, which keeps the pure package."""
    with ZipFile(wheel) as archive:
        archive.extractall(package)
    print(f"{wheel.name}: {len(MODULES)} compiled modules", flush=True)


def check(package: Path, schedules: int) -> None:
    """Run the tests and the simulator with the unpacked package."""
    path = {"PYTHONPATH": os.pathsep.join((str(package), str(ROOT / "tools")))}
    pure = run([sys.executable, "-c", PURE_MODULES, *NAMES], path, stdout=subprocess.PIPE)
    if pure:
        sys.exit(f"compiled_check: not compiled:\n{pure}")
    plugins = ["-p", "no:cacheprovider", "-p", Path(__file__).stem]
    run([sys.executable, "-m", "pytest", "-q", "-n", "2", *plugins, *TESTS], path)
    run([sys.executable, "-m", "simulator", "0", "--schedules", str(schedules)], path)


def pytest_configure() -> None:
    """Skip a test as soon as it replaces a part of a compiled module."""
    replace: Callable[..., None] = pytest.MonkeyPatch.setattr

    def replace_or_skip(self: object, target: object, *rest: object, **options: object) -> None:
        is_module = isinstance(target, ModuleType)
        name = getattr(target, "__name__" if is_module else "__module__", "")
        if name in NAMES:
            pytest.skip(f"replaces a part of {name}, which is compiled")
        replace(self, target, *rest, **options)

    # Because pytest offers no hook here, and the class is final.
    pytest.MonkeyPatch.setattr = replace_or_skip  # type: ignore[method-assign]


def run(
    command: list[str | Path], variables: dict[str, str], stdout: int | None = None
) -> str | None:
    """Run a command at the root of the checkout. Exit with its code if it fails."""
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, stdout=stdout, text=True, check=False
    )
    if ended.returncode:
        sys.exit(ended.returncode)
    return ended.stdout


if __name__ == "__main__":
    main()
