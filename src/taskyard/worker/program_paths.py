"""The paths of programs, by the PATH that they will run with. Starts no processes."""

import os
from collections.abc import Callable, Mapping
from typing import Final

from taskyard.core.limits import SECOND_NS

#: How long a path is remembered. A campaign of quick tasks runs the same program all the time, and
#: a search costs a system call for every directory. Then a new program is found soon.
REMEMBERED_NS_MAX: Final = SECOND_NS

#: Paths that are remembered. Tasks that run at the same time use few programs.
_PATHS_MAX: Final = 256


def find_program(program: str, env: Mapping[str, str]) -> str:
    """Return a program's path, by the PATH that it will run with. Raises `FileNotFoundError`."""
    if "/" in program:
        return program
    for directory in _directories(env):
        path = os.path.join(directory, program)  # noqa: PTH118 - three times as fast as pathlib
        if os.access(path, os.X_OK) and os.path.isfile(path):  # noqa: PTH113 - faster than pathlib
            return path
    raise FileNotFoundError(2, os.strerror(2), program)


def _directories(env: Mapping[str, str]) -> list[str]:
    return env.get("PATH", os.defpath).split(os.pathsep)


class ProgramPaths:
    """Finds programs like `find_program`, and remembers their paths for a moment."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        #: Paths by program and PATH, and until when they are used.
        self._known: dict[tuple[str, str | None], tuple[str, int]] = {}

    def find(self, program: str, env: Mapping[str, str]) -> str:
        """Return a program's path. Raises `FileNotFoundError`."""
        if "/" in program:
            return program
        key, now_ns = (program, env.get("PATH")), self._now_ns()
        path, until_ns = self._known.get(key, ("", 0))
        if now_ns < until_ns:
            return path
        path = find_program(program, env)
        # A relative directory is another one for each task.
        if all(map(os.path.isabs, _directories(env))):
            if len(self._known) >= _PATHS_MAX:
                self._known.clear()
            self._known[key] = path, now_ns + REMEMBERED_NS_MAX
        return path

    def forget(self) -> None:
        """Search again next time: a path did not work."""
        self._known.clear()
