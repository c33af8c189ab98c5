"""Makes the messages: python campaign.py [--small] FILE, as JSONL for `taskyard load`.

Destinations get messages as cities get people: the largest as many as the second and third and
sixth together (Zipf). Most messages are tasks of their own, some are bundles: one text for many
recipients. Nobody says a lane: the settings do, by `lane = "{host}"`.
"""
# ruff: noqa: INP001, S311  # it stands alone; the same luck every time is the point

import argparse
import json
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple


class Size(NamedTuple):
    messages: int
    destinations: int
    bundles: int
    #: Recipients of a bundle.
    recipients: int
    #: Destinations of each kind; what is left is quick, but for the largest.
    kinds: dict[str, int]


ODD = {"strict": 1, "crash": 1}
FULL = Size(20_000, 500, 20, 100, {"slow": 20, "down": 10, "grey": 10, "busy": 5, **ODD})
SMALL = Size(1_000, 50, 2, 50, {"slow": 4, "down": 2, "grey": 2, "busy": 1, **ODD})

#: The largest destinations are healthy: those that are not begin at this place.
FIRST_ODD = 5

#: One message in so many to the destination that crashes agents does it.
POISON = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="1,000 messages instead of 20,000")
    parser.add_argument("file", type=Path)
    wanted = parser.parse_args()
    tasks = campaign(SMALL if wanted.small else FULL)
    wanted.file.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def campaign(size: Size) -> Iterator[dict[str, Any]]:
    """Its tasks, bundles among them, in the order of submission."""
    luck = random.Random(2)
    hosts = destinations(size)
    weights = [*accumulate(1 / place for place in range(1, len(hosts) + 1))]
    single = size.messages - size.bundles * size.recipients
    to = luck.choices(hosts, cum_weights=weights, k=single)
    to[: len(hosts)] = luck.sample(hosts, len(hosts))  # nobody is left out
    pause = single // size.bundles
    for number, host in enumerate(to):
        mail = {"to": f"user{number}@{host}", "host": host, "subject": subject(number, host)}
        yield {"name": f"mail-{number:05}", "service": "smtp", "payload": mail}
        if number % pause == pause - 1:
            picked = luck.choices(hosts, cum_weights=weights, k=size.recipients)
            yield newsletter(number // pause, picked)


def destinations(size: Size) -> list[str]:
    """Their names, the largest first. A name tells how it behaves."""
    odd = [
        f"{kind}.example" if count == 1 and kind in ODD else f"{kind}-{number}.example"
        for kind, count in size.kinds.items()
        for number in range(count)
    ]
    random.Random(1).shuffle(odd)
    plain = [f"host-{number}.example" for number in range(size.destinations - len(odd) - 1)]
    names = ["big.example", *plain]
    step = (size.destinations - FIRST_ODD) // len(odd)
    for place, host in enumerate(odd):
        names.insert(FIRST_ODD + place * max(1, step // 3), host)
    return names


def subject(number: int, host: str) -> str:
    return "poison" if host == "crash.example" and number % POISON == 0 else "hello"


def newsletter(number: int, hosts: list[str]) -> dict[str, Any]:
    people = [{"to": f"reader{place}@{host}", "host": host} for place, host in enumerate(hosts)]
    return {
        "name": f"news-{number}",
        "service": "smtp",
        "payload": {"subject": "news", "text": "What was new this week. " * 20},
        "recipients": people,
    }


if __name__ == "__main__":
    main()
