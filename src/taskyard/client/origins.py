"""Where this program's functions come from, as a pickled call tells it to its worker.

Reads `sys.path` and `__main__`; changes neither.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Final

from taskyard.wire.pickled import Origin

#: Python's own places: a worker has them, or others of its own.
_INSTALL_DIRECTORIES: Final = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

#: In every pickle that refers to the main script, under whichever of its names.
_MAIN_MARK: Final = b"_main__"


class CallOrigins:
    """Made anew when `sys.path` has changed."""

    def __init__(self) -> None:
        self._sys_path: list[str] | None = None
        self._origin = Origin()
        self._origin_with_main = Origin()

    def of(self, call: bytes) -> Origin:
        """What a worker needs for this pickle. Scripts are named only where they are needed: to
        find a function there the worker has to run them."""
        if self._sys_path != sys.path:
            self._refresh()
        return self._origin_with_main if _MAIN_MARK in call else self._origin

    def _refresh(self) -> None:
        self._sys_path = [*sys.path]
        users = filter(_is_user_directory, self._sys_path)
        path = tuple(dict.fromkeys(map(os.path.abspath, users)))  # "" is where we are
        self._origin = Origin(path=path)
        main, module = _main_script()
        self._origin_with_main = Origin(main, module, path)


def _is_user_directory(place: str) -> bool:
    """Not the standard library, its archive or the installed packages."""
    if place.startswith(_INSTALL_DIRECTORIES):
        return False
    return not (place.startswith(sys.base_prefix) and place.endswith(".zip"))


def _main_script() -> tuple[str | None, str | None]:
    """The script that is `__main__`, or the module that was run as such; neither where there is no
    file, as in an interactive session."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return None, str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).exists():
        return None, None
    return os.path.abspath(file), None  # noqa: PTH100  # a link is not followed: it has the name
