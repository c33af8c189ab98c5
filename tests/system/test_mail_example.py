"""The mail example at its small size: real broker, worker and agents, and the closing table."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tests.kit.processes import environment

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE: Final = Path(__file__).parent.parent.parent / "examples" / "mail"

#: Much longer than it takes on a busy machine.
PATIENCE_SECONDS: Final = 200


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mail_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REPORT: Final = imported("report")

#: The lines of the closing table, in its order.
PROMISED: Final = {
    "all_ended": "every message ends done or failed",
    "reasons_hold": "failed messages have a reason",
    "taken_once": "no message is delivered twice",
    "in_their_lanes": "a message's lane is its destination",
    "lane_limit": "connections to a destination",
    "section_limit": "slow destinations served at once",
    "agents_limit": "agents",
    "small_ones_first": "a large one delays no other",
    "others_go_on": "one that is down delays no other",
    "schedule_followed": "retries follow the schedule",
    "never_early": "no message is tried before it is due",
    "in_order": "the order in a lane holds",
}


def test_small_run_keeps_its_guarantees_and_the_table_shows_violations(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLE / "run.py"), "--small", "--directory", "run"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(TASKYARD_BROKER_PAGE="none"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    assert "1,000 of 1,000 have ended" in done.stdout
    assert "SERVICE  LANE " in done.stdout  # lanes were queried during the run
    table = done.stdout.partition("WHAT WAS PROMISED")[2].splitlines()[1:]
    seen = {line.partition("  ")[0]: line.split()[-1] for line in table if line}
    assert seen == dict.fromkeys(PROMISED.values(), "yes"), done.stdout
    assert verdicts(lambda _run: None, tmp_path) == []
    for check, spoil in SPOILED.items():
        assert PROMISED[check] in verdicts(spoil, tmp_path), f"{check} did not notice"


def verdicts(spoil: Callable[[Any], None], directory: Path) -> list[str]:
    """Return the lines of the table that a manipulated run violates."""
    run = REPORT.Run(directory / "run")
    spoil(run)
    checks = [check(run) for check in REPORT.CHECKS]
    return [one.what for one in checks if not one.holds]


def test_every_line_of_the_table_is_seen_to_fail() -> None:
    assert [check.__name__ for check in REPORT.CHECKS] == list(PROMISED)
    assert list(SPOILED) == list(PROMISED)


def leave_one_waiting(run: Any) -> None:
    next(iter(run.tasks.values()))["state"] = "ready"


def forget_a_reason(run: Any) -> None:
    next(task for task in run.tasks.values() if task["state"] == "failed")["reason"] = ""


def deliver_again(run: Any) -> None:
    run.tries.append(run.taken[0])
    del run.taken


def swap_lanes(run: Any) -> None:
    next(iter(run.tasks.values()))["lane"] = "elsewhere.example"


def stretch(kinds: tuple[str, ...]) -> Callable[[Any], None]:
    """Make attempts longer, so that they overlap."""

    def spoil(run: Any) -> None:
        run.tries = [
            one._replace(end=one.end + 3) if REPORT.kind_of(one.host) in kinds else one
            for one in run.tries
        ]

    return spoil


def serve_small_ones_last(run: Any) -> None:
    """Deliver the messages of small lanes last."""
    last = max(one.end for one in run.tries)
    few = {host for host, count in run.hosts.items() if count <= 5}
    run.tries = [one._replace(end=last + 1) if one.host in few else one for one in run.tries]


def stop_for_an_outage(run: Any) -> None:
    """Deliver nothing until the destination that was down is up again."""
    last = max(one.end for one in run.tries if one.word == "deferall")
    run.tries = [
        one._replace(end=one.end + (last + 60)) if one.word == "ok" else one for one in run.tries
    ]


def retry_soon(run: Any) -> None:
    place = next(place for place, one in enumerate(run.put_off) if one.is_charged)
    run.put_off[place] = run.put_off[place]._replace(due=run.put_off[place].at + 0.5)


def try_early(run: Any) -> None:
    place, put_off = next(
        (place, one) for place, one in enumerate(run.put_off) if one.name in run.tries_of
    )
    last = max(one.begin for one in run.tries_of[put_off.name])
    run.put_off[place] = put_off._replace(at=last - 1, due=last + 1)


def overtake(run: Any) -> None:
    """Move the last message of a small lane to the front."""
    names = [name for name, host in run.sent.items() if host == "host-5.example"]
    run.tries_of.pop(names[0])
    run.tries_of[names[0]] = []


#: The manipulation that makes each line fail.
SPOILED: Final[dict[str, Callable[[Any], None]]] = {
    "all_ended": leave_one_waiting,
    "reasons_hold": forget_a_reason,
    "taken_once": deliver_again,
    "in_their_lanes": swap_lanes,
    "lane_limit": stretch(("host",)),
    "section_limit": stretch(("slow",)),
    "agents_limit": stretch(("host", "big")),
    "small_ones_first": serve_small_ones_last,
    "others_go_on": stop_for_an_outage,
    "schedule_followed": retry_soon,
    "never_early": try_early,
    "in_order": overtake,
}
