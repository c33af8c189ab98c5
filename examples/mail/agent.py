"""A hungry agent that pretends to deliver mail. How a destination behaves, its name tells.

It is fed by a worker host, a message a line, and notes every try in `deliveries.log`: when it began
and ended, who made it, for which destination and message, at which attempt, and what came of it.
What destinations remember is in `memory/`: agents come and go.
"""
# ruff: noqa: INP001, T201  # it stands alone; lines on stdout are how it talks

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

#: How long destinations take for a message, in seconds.
QUICK_S, SLOW_S = 0.002, 0.12

#: For how long a destination is down, from the first message on that it did not take.
OUTAGE_S = 3.0

#: When to come back, says a busy one.
BUSY_S = 2

MEMORY = Path("memory")
ESCAPES = {r"\t": "\t", r"\n": "\n", r"\r": "\r", r"\\": "\\"}


def main() -> None:
    MEMORY.mkdir(exist_ok=True)
    print("#hungry", flush=True)
    for line in sys.stdin:
        fields = line.rstrip("\n").split("\t")
        if len(fields) == 3:  # noqa: PLR2004  # else it is a comment
            print(f"{fields[0]}\t\t{deliver(*fields)}", flush=True)
            print("#hungry", flush=True)
        elif not line.strip():
            return


def deliver(identity: str, host: str, payload: str) -> str:
    """Try one message. Returns what to report."""
    name, _, attempt = unescaped(identity).rpartition("/")
    begin_ns = time.time_ns()
    kind = host.partition(".")[0].partition("-")[0]
    answer = BEHAVIOURS.get(kind, quick)(name, host, mail_of(name, unescaped(payload)))
    word = answer.partition(" ")[0]
    with Path("deliveries.log").open("a") as log:
        print(begin_ns, time.time_ns(), os.getpid(), host, name, attempt, word, sep="\t", file=log)
    if word == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


def mail_of(name: str, payload: str) -> dict[str, str]:
    """Return the message of a task. In a bundle, the end of the name selects the recipient."""
    mail = json.loads(payload)
    if "recipients" not in mail:
        return mail
    return mail["body"] | mail["recipients"][int(name.rpartition("/")[2])]


def quick(_name: str, _host: str, _mail: dict[str, str]) -> str:
    time.sleep(QUICK_S)
    return "ok 250 taken"


def slow(_name: str, _host: str, _mail: dict[str, str]) -> str:
    time.sleep(SLOW_S)
    return "ok 250 taken"


def down(name: str, host: str, mail: dict[str, str]) -> str:
    """Not there for a while: no use in trying the next message."""
    since = MEMORY / host
    is_first_time(host)
    if time.time() - since.stat().st_mtime < OUTAGE_S:
        return "deferall 421 connection refused"
    return quick(name, host, mail)


def grey(name: str, host: str, mail: dict[str, str]) -> str:
    """Accept a message at the second attempt."""
    return "deferred 451 greylisted" if is_first_time(name) else quick(name, host, mail)


def busy(name: str, host: str, mail: dict[str, str]) -> str:
    """Says when to come back."""
    if is_first_time(name):
        return f"retryat +{BUSY_S} 450 mailbox busy"
    return quick(name, host, mail)


def strict(_name: str, _host: str, _mail: dict[str, str]) -> str:
    return "error 550 no such user here"


def crash(name: str, host: str, mail: dict[str, str]) -> str:
    """Its greeting upsets the agent, for some messages."""
    return "crash" if mail["subject"] == "poison" else quick(name, host, mail)


def is_first_time(what: str) -> bool:
    try:
        (MEMORY / what.replace("/", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def unescaped(field: str) -> str:
    return re.sub(r"\\[tnr\\]", lambda found: ESCAPES[found[0]], field)


BEHAVIOURS = {
    "slow": slow,
    "down": down,
    "grey": grey,
    "busy": busy,
    "strict": strict,
    "crash": crash,
}

if __name__ == "__main__":
    main()
