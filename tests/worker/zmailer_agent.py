"""A transport agent as ZMailer's are, written from the formats of its control files and lines.

Usage: zmailer_agent.py CHANNEL, in a directory with control files. Delivers to the files that the
recipients name. As in the original, all recipients of a line are locked at once, the last one is
delivered first, and a report is written before the recipient is marked. Some recipients do more:

    die         SIGKILL the agent once, after its delivery and before its report
    defer       are deferred once
    refuse      fail
    gate        wait for a file of that name
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

LOCK = b"~%6d"


def lines_of(content: bytes) -> list[tuple[int, bytes]]:
    """Return the offset and the text of each line."""
    found, offset = [], 0
    for line in content.split(b"\n"):
        found.append((offset, line))
        offset += len(line) + 1
    return found


def mark(path: str, offset: int, text: bytes) -> None:
    with Path(path).open("r+b") as file:
        file.seek(offset + 1)
        file.write(text.ljust(7))


def once(name: str) -> bool:
    """Return whether this is the first call with a name, of all agents."""
    try:
        Path(f"{name}.once").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def deliver(user: str) -> tuple[str, bytes]:
    """Return the status of a delivery, and the mark of the recipient after it."""
    kind = user.partition("-")[0]
    if kind == "refuse":
        return "error2 no such user", b"-"
    if kind == "defer" and once(user):
        return "deferred mailbox is busy", b" "
    while kind == "gate" and not Path("gate").exists():
        time.sleep(0.02)
    with Path(user).open("a") as file:
        file.write("delivered\n")
    if kind == "die" and once(user):
        os.kill(os.getpid(), signal.SIGKILL)
    return "ok3 Ok", b"+"


def process(path: str, host: str | None, channel: str) -> bool:
    """Deliver what is left in a file. Return whether there was anything."""
    found = []
    for offset, line in lines_of(Path(path).read_bytes()):
        words = line[12:].decode().split()
        if line[:2] == b"r " and words[0] == channel and host in (None, words[1]):
            mark(path, offset, LOCK % os.getpid())
            found.append((offset, words[2]))
    for offset, user in reversed(found):
        status, text = deliver(user)
        write(f"{int(path)}/{offset}\t{user}\1failed\t{status}")
        mark(path, offset, text)
    return bool(found)


def main(channel: str) -> None:
    write("#hungry")
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            return
        if line != "#idle\n":
            path, _, host = line.rstrip("\n").partition("\t")
            if not process(path, host or None, channel):
                write(f"#resync {path}")
        write("#hungry")


def control_file(*users: str, channel: str = "local", host: str = "-", number: int = 1) -> str:
    """Return a control file as ZMailer's router writes it."""
    pad = " " * 10
    recipients = [f"r {pad}{channel} {host} {user} 0\nN NOTIFY=FAILURE" for user in users]
    head = ["@ 0x00000007", f"i {number}", "o 96", f"l <{number}@x>", "s smtp x a@x 65534"]
    return "\n".join([*head, *recipients, "m", "From: a@x", "", ""])


if __name__ == "__main__":
    main(sys.argv[1])
