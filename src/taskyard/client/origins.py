"""Where a worker finds the functions of a pickled call: search path, main script or module.

Reads `sys.path` and `__main__`. Changes neither.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Final

from taskyard.wire.pickled import Origin

#: Directories of the standard library and of installed packages. A worker has its own.
_INSTALL_DIRECTORIES: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

#: Part of every pickle that refers to the main script, under any of its names.
_MAIN_MARK: Final = b"_main__"


class CallOrigins:
    """The origins of this program's calls. Refreshed when `sys.path` has changed."""

    def __init__(self) -> None:
        self._sys_path: list[str] | None = None
        self._origin = Origin()
        self._origin_with_main = Origin()

    def of(self, call: bytes) -> Origin:
        """Return the origin of a pickled call.

        It names the main script only if the call refers to it: the worker has to run it.
        """
        if self._sys_path != sys.path:
            self._refresh()
        return self._origin_with_main if _MAIN_MARK in call else self._origin

    def _refresh(self) -> None:
        self._sys_path = [*sys.path]
        users = filter(_is_user_directory, self._sys_path)
        path = tuple(dict.fromkeys(map(os.path.abspath, users)))  # "" is the current directory
        self._origin = Origin(path=path)
        main, module = _main_script()
        self._origin_with_main = Origin(main, module, path)


def _is_user_directory(place: str) -> bool:
    """Return whether a directory is neither the standard library nor installed packages."""
    if place.startswith(_INSTALL_DIRECTORIES):
        return False
    return not (place.startswith(sys.base_prefix) and place.endswith(".zip"))


def _main_script() -> tuple[str | None, str | None]:
    """Return the path of the main script, or the name of the main module.

    Neither in an interactive session, which has no file.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return None, str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).exists():
        return None, None
    return os.path.abspath(file), None  # noqa: PTH100  # keep the name of a link
