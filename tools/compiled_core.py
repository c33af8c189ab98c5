"""A build hook: compiles the hot modules of the core to C if `TASKYARD_COMPILE=1` is set.

Hatchling loads this file for every wheel. Without the variable it changes nothing: the wheel is
pure and needs no compiler. Owns the list of compiled modules. The package does not know of it.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE: Final = "TASKYARD_COMPILE"

SOURCES: Final = "src"

#: The modules that handle most events. Modules with structs are left out, because mypyc drops the
#: options of a struct (`frozen`, `gc`, `array_like`). So is `identity`, because mypyc does not
#: support constrained type variables. The others are used too rarely to gain anything.
MODULES: Final = tuple(
    f"taskyard/core/{name}.py"
    for name in (
        *("apply", "assignment", "commands", "context", "deadlines", "expiry", "graph"),
        *("holds", "lane_queues", "ledger", "membership", "reservations", "resources", "results"),
        *("scheduler", "selection", "shape", "subscriptions", "timers"),
    )
)

#: The extension that has the code of all of them, to which mypyc adds a suffix. It can't be inside
#: the package: mypyc derives `__file__` of the modules from its place.
LIBRARY: Final = "taskyard_core"

#: Settings of mypy. Other packages are not read, which the package's own file imports: they need
#: dependencies that an isolated build does not have.
TYPES: Final = """
[mypy]
mypy_path = {sources}
explicit_package_bases = true
follow_imports = silent
[mypy-taskyard]
follow_imports = skip
"""

#: Needed to compile. The core imports msgspec, whose types mypy reads.
REQUIREMENTS: Final = ("mypy[mypyc]>=2.4", "msgspec>=0.19")


class CompiledCore(BuildHookInterface):  # type: ignore[type-arg]  # its parameter is for plugins
    """Adds an extension module beside the source of each compiled module."""

    _directory: TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        return list(REQUIREMENTS) if is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules and add them to the wheel, which is then for one platform."""
        if not is_wanted():
            return
        if version == "editable":
            raise SystemExit(f"{VARIABLE}: can't compile an editable install (leave out -e)")
        self._directory = TemporaryDirectory(prefix="taskyard-compile-")
        extensions = compile_modules(Path(self.root), Path(self._directory.name))
        build_data["force_include"].update(extensions)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the extension modules, which are in the wheel now."""
        del version, build_data, artifact_path
        if self._directory is not None:
            self._directory.cleanup()


def is_wanted() -> bool:
    """Return whether the variable asks for a compiled core."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{VARIABLE}={value}: expected 0 or 1")
    return value == "1"


def compile_modules(root: Path, directory: Path) -> dict[str, str]:
    """Compile the modules below `directory`. Return the path of each extension in the wheel."""
    # On use: a pure wheel is built without them.
    from mypyc.build import mypycify  # noqa: PLC0415
    from setuptools import Distribution  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    built = directory / "lib"
    settings = directory / "mypy.ini"
    settings.write_text(TYPES.format(sources=root / SOURCES))
    options = [f"--config-file={settings}", f"--cache-dir={directory / 'types'}"]
    files = [str(Path(SOURCES, module)) for module in MODULES]
    extensions = mypycify([*options, *files], target_dir=str(directory / "c"), group_name=LIBRARY)
    command = build_ext(Distribution({"name": "taskyard", "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(built), str(directory / "objects")
    command.ensure_finalized()
    command.run()
    return {str(path): str(path.relative_to(built)) for path in built.rglob("*.so")}
