"""A Jupyter kernel in its own process: run cells, and kill it.

Needs ipykernel and jupyter_client, of the extra `dev`.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any, Self

from jupyter_client.manager import KernelManager

from tests.kit.processes import PATIENCE_SECONDS, environment

if TYPE_CHECKING:
    from pathlib import Path


class CellFailed(AssertionError):
    """A cell raised an exception. The text is its traceback."""


class Kernel:
    """A kernel that runs in a directory. As a context manager it is killed at the end."""

    def __init__(self, directory: Path) -> None:
        self._manager: Any = KernelManager(kernel_name="python3")  # it has no types
        self._manager.start_kernel(cwd=str(directory), env=environment())
        self.client: Any = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_SECONDS)

    @property
    def process_id(self) -> int:
        return int(self._manager.provisioner.pid)

    def run(self, code: str, timeout: float = PATIENCE_SECONDS) -> str:
        """Run a cell. Return what it printed and its value. Raises `CellFailed`."""
        parts: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                parts.append(content["text"])
            elif message["msg_type"] == "execute_result":
                parts.append(content["data"]["text/plain"] + "\n")

        reply = self.client.execute_interactive(code, output_hook=collect, timeout=timeout)
        if reply["content"]["status"] != "ok":
            raise CellFailed("\n".join(reply["content"].get("traceback", ["aborted"])))
        return "".join(parts)

    def begin(self, code: str) -> None:
        """Start a cell without waiting for its end."""
        self.client.execute(code)

    def kill(self) -> None:
        """Kill the kernel with SIGKILL, as the system does that runs out of memory."""
        os.kill(self.process_id, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def cells_of(notebook: Path) -> list[str]:
    """Return the code cells of a notebook, in their order."""
    document = json.loads(notebook.read_text())
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in cells]
