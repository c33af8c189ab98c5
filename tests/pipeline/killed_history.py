"""Run the job of `pipeline history`, and kill this process at a given step."""

import os
import signal
import sys
from pathlib import Path

from taskyard.pipeline.jobs.history import HistoryJob


class Bomb:
    """Calls a function at the step of a given number."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, step: str) -> None:
        self._left -= 1
        if not self._left:
            self.go_off(step)

    def go_off(self, _step: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(state: str, out: str, number: str) -> None:
    HistoryJob(Path(state), Path(out), Bomb(int(number))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
