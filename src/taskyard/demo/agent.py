"""The demo's hungry agent: pretends to deliver mail. How a destination behaves, its name tells.

A worker host runs it as a program and feeds it a task a line; docs/dialects/hungry.md has the
language. It stands alone: nothing of Taskyard is imported. When the one destination that is down
was asked for the first time is remembered in a file of the directory in which it runs.
"""
# ruff: noqa: T201  # lines on stdout are how it talks

import sys
import time
from pathlib import Path

#: Takes nothing at first, and everything later.
DOWN = "down.example"

#: Takes nothing ever.
STRICT = "strict.example"

#: For how long the one is down, from the first mail for it on.
OUTAGE_SECONDS = 5.0

#: How long a mail takes that is taken.
MAIL_SECONDS = 0.012

OUTAGE_FILE = Path("down-since")

#: An identity, a lane and a payload.
_FIELDS = 3


def main() -> None:
    print("#hungry", flush=True)
    for line in sys.stdin:
        fields = line.rstrip("\n").split("\t")
        if not line.strip():
            return
        if len(fields) == _FIELDS:  # else it is a comment
            identity, host, _mail = fields
            print(f"{identity}\t\t{deliver(host)}", flush=True)
            print("#hungry", flush=True)


def deliver(host: str) -> str:
    """Try one mail. Returns what to report."""
    if host == STRICT:
        return "error 550 no such user here"
    if host == DOWN and is_down():
        return "deferall 421 connection refused"
    time.sleep(MAIL_SECONDS)
    return "ok 250 taken"


def is_down() -> bool:
    if not OUTAGE_FILE.exists():
        OUTAGE_FILE.touch()
    return time.time() - OUTAGE_FILE.stat().st_mtime < OUTAGE_SECONDS


if __name__ == "__main__":
    main()
