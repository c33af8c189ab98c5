"""Where a pickled call comes from, made so here: its directories, and its `__main__`.

A function that a script defines is pickled as one of `__main__`, by name. So the script is run here
once, under the name `__mp_main__`, as `multiprocessing` does it: what stands under
`if __name__ == "__main__":` is passed over. A child may do calls of several scripts; each stays
loaded, and becomes `__main__` for its own calls. Must not know processes.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from taskyard.errors import UserError
from taskyard.wire.pickled import IMPORTING_VARIABLE, MAIN_NAME, Origin


class MainScripts:
    """The scripts that were run in this process."""

    def __init__(self) -> None:
        #: Modules, and why there is none, by what was asked for.
        self._mains: dict[tuple[str | None, str | None], ModuleType | str] = {}

    def activate(self, origin: Origin) -> None:
        """Raises UserError if its script can't be run here."""
        missing = [place for place in origin.path if place not in sys.path]
        sys.path[:0] = missing
        if origin.main is None and origin.main_module is None:
            return
        asked = origin.main, origin.main_module
        if asked not in self._mains:
            self._mains[asked] = _run(*asked)
        main = self._mains[asked]
        if isinstance(main, str):
            raise UserError(main)
        sys.modules["__main__"] = sys.modules[MAIN_NAME] = main


def _run(path: str | None, name: str | None) -> ModuleType | str:
    """The script as a module, or why it could not be run: it is not tried twice, because half of
    it may have been done."""
    try:
        with _script_marker():
            content = _content(path, name)
    except BaseException as error:  # noqa: BLE001  # whatever a script does ends its tasks alone
        return (
            f"{path or name}, where the function is defined, can't be run by the worker: "
            f"{type(error).__name__}: {error}"
        )
    main = ModuleType(MAIN_NAME)
    main.__dict__.update(content)
    return main


def _content(path: str | None, name: str | None) -> dict[str, Any]:
    if name is not None:
        return runpy.run_module(name, run_name=MAIN_NAME, alter_sys=True)
    assert path is not None  # noqa: S101 - one of the two is given
    return runpy.run_path(path, run_name=MAIN_NAME)


@contextmanager
def _script_marker() -> Iterator[None]:
    os.environ[IMPORTING_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[IMPORTING_VARIABLE]
