"""The broker that is measured, as a process of its own: `python -m … STATE [memory]`.

It is the product's broker and nothing else. That it can be profiled is the benchmark's affair, so
the variable that asks for it is known here and not there.
"""

import cProfile
import os
import sys
from pathlib import Path

from taskyard.broker.serve import Settings, serve

#: The file to write the profile to; not set: run without.
PROFILE_VARIABLE = "TASKYARD_BENCH_PROFILE"


def main(state: str, *options: str) -> None:
    settings = Settings(Path(state), in_memory="memory" in options)
    profile = os.environ.get(PROFILE_VARIABLE)
    if not profile:
        serve(settings, _say)
        return
    profiler = cProfile.Profile()
    profiler.runcall(serve, settings, _say)
    profiler.dump_stats(profile)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
