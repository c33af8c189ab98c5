"""A program with tasks that are named by their content. A test runs it again and again.

usage: task_script.py STATE TRACE LIMIT
"""

import sys
from pathlib import Path

import taskyard

STATE, TRACE, LIMIT = sys.argv[1], sys.argv[2], int(sys.argv[3])


def below(number: int) -> bool:
    return number < LIMIT


@taskyard.task(key="content")
def square(number: int, trace: str) -> int:
    with Path(trace).open("a") as file:
        file.write(f"{number}\n")
    return number**2 if below(number) else -1


if __name__ == "__main__":
    with taskyard.Client(state=STATE) as client:
        futures = square.options(client=client).map(range(20), trace=TRACE)
        print(sum(client.gather(futures)))  # noqa: T201  # for the test
