"""A WMP worker as a process, with one program for all tasks.

python wmp_worker.py NAME SLOTS SERVICE[,SERVICE…] ENDPOINT[,ENDPOINT…] PROGRAM…

Without a program, payloads describe their work.
"""

from __future__ import annotations

import sys

from taskyard.worker import wmp
from taskyard.worker.settings import worker_settings


def main(name: str, slots: str, services: str, endpoints: str, *program: str) -> None:
    def say(line: str) -> None:
        print(line, flush=True)  # noqa: T201  # its purpose

    settings = worker_settings(int(slots), services.split(","), name)
    wmp.serve(endpoints.split(","), settings, (), say, command=program or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
