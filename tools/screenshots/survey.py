"""The campaign in the pictures: a survey of the sky as a graph of 1,001 tasks.

Fields are fetched, cleaned and fitted, then merged by region into one atlas. Some fetches fail once
and are retried, some fields are missing, and some fits don't converge, so that every state of a
task can be seen. The tasks sleep, so a busy machine shows the same picture. Starts nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS: Final = 320

#: Fields of a region, which are merged into one map.
REGION_FIELDS: Final = 8

#: The program of every task: step, field, seconds and outcome.
SCRIPT_NAME: Final = "step.sh"
SCRIPT: Final = """\
#!/bin/sh
# usage: step.sh STEP FIELD SECONDS OUTCOME
echo "$1 $2: attempt $TASKYARD_ATTEMPT on $(hostname)"
for percent in 25 50 75; do
    sleep "$(awk "BEGIN { print $3 / 4 }")"
    echo "$percent % of $1 $2"
done
case $4 in
flaky) [ "$TASKYARD_ATTEMPT" -gt 1 ] || { echo "archive: connection reset" >&2; exit 75; } ;;
missing) echo "archive: field $2 not found" >&2; exit 4 ;;
diverging) echo "fit of field $2: no convergence after 200 iterations" >&2; exit 1 ;;
esac
echo "wrote $1-$2.fits"
"""

_SEED: Final = 19

#: Average seconds of each step. The whole takes three minutes with ten slots. Later steps have
#: priority, so that every state is there from the beginning.
_SECONDS: Final = {"fetch": 1.0, "clean": 1.6, "fit": 2.6, "merge": 2.0}

#: Of so many tasks one has this outcome.
_OUTCOMES: Final = {"fetch": (("flaky", 12), ("missing", 53)), "fit": (("diverging", 40),)}


def tasks(pace: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield the tasks of the survey, predecessors first. They are the same in every run.

    `pace` multiplies their seconds.
    """
    random_bits = random.Random(_SEED)

    def step(kind: str, name: str, after: list[str]) -> dict[str, Any]:
        seconds = pace * _SECONDS[kind] * random_bits.lognormvariate(0, 0.4)
        outcome = next(
            (word for word, one_in in _OUTCOMES.get(kind, ()) if not random_bits.randrange(one_in)),
            "good",
        )
        argv = ["sh", SCRIPT_NAME, kind, name, f"{seconds:.1f}", outcome]
        return {
            "name": f"{kind}-{name}",
            "argv": argv,
            "after": after,
            "priority": list(_SECONDS).index(kind),
            "retries": [1, 2] if kind == "fetch" else 0,
            "time_limit": "10m",
        }

    fields = [f"{number:03}" for number in range(FIELDS)]
    for field in fields:
        yield step("fetch", field, [])
        yield step("clean", field, [f"fetch-{field}"])
        yield step("fit", field, [f"clean-{field}"])
    maps = []
    for first in range(0, FIELDS, REGION_FIELDS):
        region = f"{first:03}"
        maps.append(f"merge-{region}")
        yield step("merge", region, [f"fit-{field}" for field in fields[first:][:REGION_FIELDS]])
    yield step("merge", "atlas", maps)
