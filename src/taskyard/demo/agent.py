"""The demo's hungry agent, which pretends to deliver mail.

A worker host runs it as a program and sends it a task on each line, as docs/dialects/hungry.md
describes. It imports nothing of Taskyard. The name of a destination determines its behaviour. A
file in the current directory records when the destination that is down was first tried.
"""

# ruff: noqa: T201  # the protocol is lines on stdout

import sys
import time
from pathlib import Path

#: Refuses mail at first, and accepts it later.
DOWN = "down.example"

#: Always refuses mail.
STRICT = "strict.example"

#: How long the first one is down, from its first mail on.
OUTAGE_SECONDS = 5.0

#: How long a delivery takes.
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
        if len(fields) == _FIELDS:  # otherwise it is a comment
            identity, host, _mail = fields
            print(f"{identity}\t\t{deliver(host)}", flush=True)
            print("#hungry", flush=True)


def deliver(host: str) -> str:
    """Deliver one mail, and return the report."""
    if host == STRICT:
        return "error 550 no such user here"
    if host == DOWN and is_down():
        return "deferall 421 connection refused"
    time.sleep(MAIL_SECONDS)
    return "ok 250 accepted"


def is_down() -> bool:
    if not OUTAGE_FILE.exists():
        OUTAGE_FILE.touch()
    return time.time() - OUTAGE_FILE.stat().st_mtime < OUTAGE_SECONDS


if __name__ == "__main__":
    main()
