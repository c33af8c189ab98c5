"""Run simulated schedules and print their verdicts."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from simulator.mutations import MUTATIONS
from simulator.schedule import ScheduleResult, find_killing_seed, find_shorter, run

#: Schedules within which a planted bug must be caught.
HUNT_SCHEDULES_MAX: Final = 1_000

#: Schedules after the first that caught a planted bug, among which a shorter schedule is looked
#: for.
SHORTER_SCHEDULES: Final = 30

#: A seed that caught each planted bug, of a short schedule, a line each: tests try it first.
KILLING_SEEDS: Final = Path(__file__).with_name("killing_seeds.txt")


def main(arguments: list[str] | None = None) -> int:
    """Run the schedules that the arguments select. Return 1 if a promise was broken."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (
        options.start is not None
        and options.schedules is None
        and not (options.bug or options.bugs)
    ):
        parser.error("--start needs --schedules, --bug or --bugs")
    if options.bugs or options.bug:
        names = [*MUTATIONS] if options.bugs else [options.bug]
        count = options.schedules or HUNT_SCHEDULES_MAX
        return _hunt_all(names, options.start or 0, count, update=options.update)
    if options.schedules is None:
        return _run_one(options.seed, quiet=options.quiet, pair=options.pair)
    start = options.seed if options.start is None else options.start
    make = partial(run, invariants=not options.no_invariants, pair=options.pair)
    return _run_many(make, start, options.schedules, hours=options.hours)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="the seed of the schedule")
    parser.add_argument(
        "--schedules", type=_count, help="run N schedules, the first with the seed --start"
    )
    parser.add_argument(
        "--hours", type=float, default=0.0, help="stop after N hours, 0 for no limit"
    )
    parser.add_argument("--start", type=int, help="the first seed of many")
    parser.add_argument(
        "--bug",
        choices=[*MUTATIONS],
        metavar="NAME",
        help="plant one of these: " + ", ".join(MUTATIONS),
    )
    parser.add_argument("--bugs", action="store_true", help="plant every bug in turn")
    parser.add_argument(
        "--update",
        action="store_true",
        help="with --bug or --bugs, replace outdated seeds",
    )
    parser.add_argument(
        "--pair", action="store_true", help="simulate two brokers over one PostgreSQL"
    )
    parser.add_argument("--no-invariants", action="store_true", help="run the checkers only")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the digest")
    return parser


def _count(text: str) -> int:
    """Parse a number of schedules, at least 1."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


def _print_line(line: str) -> None:
    """Print a line. End quietly if the reader is gone, as with `| head`."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # later writes must not fail
        raise SystemExit(0) from None


def _run_one(seed: int, *, quiet: bool, pair: bool) -> int:
    result = run(seed, say=None if quiet else _print_line, pair=pair)
    if result.good and not quiet:
        counts = f"{result.events} events, {result.records} records, {result.restarts} restarts"
        _print_line(f"seed {seed}: good, {counts}, no promise broken")
    else:
        _print_result(result)
    _print_line(f"digest {result.digest}")
    return 0 if result.good else 1


def _run_many(make: Callable[[int], ScheduleResult], start: int, most: int, *, hours: float) -> int:
    """Run schedules until their number or their time is used up."""
    began = time.process_time()
    ends = time.monotonic() + hours * 3600 if hours else float("inf")
    bad = events = restarts = count = 0
    for seed in range(start, start + most):
        if time.monotonic() > ends:
            break
        count += 1
        result = make(seed)
        events += result.events
        restarts += result.restarts
        if not result.good:
            bad += 1
            _print_result(result)
    took = time.process_time() - began
    _print_line(
        f"{count} schedules from seed {start}, {events} events, {restarts} restarts, {bad} bad, "
        f"{count / took:.0f} schedules a second and core"
    )
    return 1 if bad else 0


def killing_seeds() -> dict[str, int]:
    """Return the recorded seed that catches each planted bug."""
    pairs = [line.split() for line in KILLING_SEEDS.read_text().splitlines()]
    return {name: int(seed) for name, seed in pairs}


def _hunt_all(names: list[str], start: int, count: int, *, update: bool) -> int:
    """Plant one bug at a time. Return 1 if a bug was not caught."""
    recorded = killing_seeds() if update else {}
    caught: dict[str, int] = {}
    for name in names:
        if name in recorded and find_killing_seed(MUTATIONS[name], [recorded[name]]) is not None:
            caught[name] = recorded[name]
            _print_line(f"{name}: caught by the recorded seed {recorded[name]}")
            continue
        result = find_killing_seed(MUTATIONS[name], range(start, start + count))
        if result is None:
            _print_line(f"{name}: not caught in {count} schedules")
            continue
        caught[name] = result.seed
        if update:
            later = range(result.seed + 1, result.seed + 1 + SHORTER_SCHEDULES)
            caught[name] = find_shorter(MUTATIONS[name], result, later).seed
        first_line = result.text.strip().splitlines()[-1 if "Traceback" in result.text else 0]
        tried = result.seed - start + 1
        _print_line(
            f"{name}: caught by {result.checker} after {tried} schedules: {first_line[:100]}"
        )
    if update:
        seeds = recorded | caught
        rows = [f"{name} {seeds[name]}\n" for name in MUTATIONS if name in seeds]
        KILLING_SEEDS.write_text("".join(rows))
    _print_line(f"planted bugs: {len(names)}, caught: {len(caught)}")
    return 0 if len(caught) == len(names) else 1


def _print_result(result: ScheduleResult) -> None:
    if not result.good:
        _print_line(f"seed {result.seed}: {result.text}")


if __name__ == "__main__":
    sys.exit(main())
