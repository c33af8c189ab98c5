"""Soak Taskyard: workers of every dialect under load, random kills, and an audit at the end.

    python tools/soak.py --minutes 20

A broker and local workers run under `taskyard up`, beside them three workers of every dialect, most
of them small programs written from the dialects' pages. Clients of several dialects submit about 25
tasks a second. Meanwhile workers, the relay and the broker are killed, suspended and terminated at
random. Then everything is left alone, and all has to settle: nothing lost, nothing completed twice,
no innocent task failed, nothing READY beside a free slot, and every worker still working.

The seed is printed first, and every random choice is drawn from it. The machine's own timing
is not repeatable. Exit code 0 only if all holds; the directory with state and logs is kept if not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import taskyard
from soak_kit import audit
from soak_kit.audit import AuditLine, Sampler, ask
from soak_kit.fleet import Fleet, Layout
from soak_kit.load import CLIENTS, Client, Promises

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds between two faults, on average.
FAULT_SECONDS: Final = 1.6

#: How long the broker may take to listen for the first time.
START_SECONDS: Final = 60.0

#: Without faults everything settles within this. The longest lease is 60 s, and is renewed by a
#: restart.
SETTLE_SECONDS: Final = 240.0

#: How long clients wait for their last answers, and then have to end.
LAST_SECONDS: Final = 15.0

#: The last tasks take as long as the long tasks, twice: one worker is lost. Slots are left beside
#: the long tasks on every worker.
PROBE_SECONDS: Final = 120.0
LONG_PROBES: Final = 7
LONG_PROBE_SECONDS: Final = 25

#: Seconds between samples of an undisturbed broker, and between printed lines before that.
SAMPLE_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 10.0

#: Tasks of each service that show at the end that every worker still works. Plain workers poll, so
#: there must be some left for a few seconds.
PROBES: Final = {"exec": 60, "default": 800, "mail": 60}


class Soak:
    """A soak, from the first start to the closing table."""

    def __init__(self, place: Layout, seed: int) -> None:
        self._place = place
        self._seed = seed
        self._dice = random.Random(seed)
        self._began = time.monotonic()
        self._fleet = self._make_fleet()
        self._promises = Promises()
        self._sampler = Sampler(place)
        self._lines: list[AuditLine] = []
        self._has_faults = True
        self._counts: dict[str, int] = {}
        self._log_file = (place.root / "soak.log").open("a", buffering=1)

    def _make_fleet(self) -> Fleet:
        return Fleet(self._place, self._dice, self.log)

    def log(self, line: str, *, shown: bool = False) -> None:
        """Write a line to the log, and print it if it is to be shown."""
        stamped = f"{time.monotonic() - self._began:7.1f}  {line}"
        self._log_file.write(stamped + "\n")
        if shown:
            print(stamped, flush=True)

    def run(self, minutes: float) -> bool:
        """Run all of it. Return True if everything holds."""
        try:
            self._start()
            self._inject_faults(minutes * 60)
            self._heal()
        finally:
            self._fleet.end()
        self._audit()
        return self._close()

    def _start(self) -> None:
        ends = time.monotonic() + START_SECONDS
        while ask(self._place, "status") is None:
            if time.monotonic() > ends:
                raise SystemExit("soak: the broker does not start (see the logs)")
            self._fleet.turn()
        self._fleet.members["watch"].start_at = 0.0  # it does not wait for a first broker
        self.log("all started", shown=True)

    def _inject_faults(self, seconds: float) -> None:
        """Submit tasks and inject faults for some time."""
        self._clients = [
            make(self._place, self._fleet, self._promises, self._seed) for make in CLIENTS
        ]
        self.log(f"never killed: {', '.join(self._fleet.never_killed)}", shown=True)
        for client in self._clients:
            client.start()
        sampler = threading.Thread(target=self._sample, name="sampler", daemon=True)
        sampler.start()
        ends = time.monotonic() + seconds
        fault_at = progress_at = time.monotonic() + 3
        while (now := time.monotonic()) < ends:
            self._fleet.turn()
            if now >= fault_at:
                self._fleet.inject_fault()
                fault_at = now + self._dice.expovariate(1 / FAULT_SECONDS)
            if now >= progress_at:
                progress_at = now + PROGRESS_SECONDS
                self._progress()
            time.sleep(0.05)
        self._has_faults = False
        sampler.join()

    def _sample(self) -> None:
        """Look for stuck tasks while faults go on."""
        while self._has_faults:
            self._counts = self._sampler.sample() or self._counts
            time.sleep(SAMPLE_SECONDS)

    def _progress(self) -> None:
        faults = sum(self._fleet.faults.values())
        counts = ", ".join(f"{count:,} {state}" for state, count in self._counts.items() if count)
        wrong = len(self._promises.wrong) + len(self._sampler.stuck)
        self.log(f"{faults} faults, {wrong} wrong; {counts}", shown=True)

    def _heal(self) -> None:
        """Leave everything alone until it has settled, then see that every worker still works."""
        self._fleet.heal()
        for client in self._clients:
            client.stop()
        self.log("no more faults; waiting until all is settled", shown=True)
        is_settled = self._wait_settled("all settled after the faults", SETTLE_SECONDS)
        self._wait_for(self._clients)
        if not is_settled:
            self._show_unfinished()
        healed_at = time.time()
        with taskyard.Client(self._place.native, timeout=30) as native:
            self._lose_a_worker(native)
            self._probe(native)
        self._wait_settled("all settled once more", PROBE_SECONDS)
        self._lines.append(self._served(healed_at))
        self._await_watch()

    def _wait_settled(self, what: str, seconds: float) -> bool:
        """Sample until nothing can run any more. Return False if that takes too long."""
        began = time.monotonic()
        counts: dict[str, int] | None = None
        while time.monotonic() < began + seconds:
            self._turn_for(SAMPLE_SECONDS)
            counts = self._sampler.sample()
            self.log(f"counts {counts}")
            if counts is not None and not any(
                counts[state] for state in ("blocked", "delayed", "ready", "leased")
            ):
                taken = f"{time.monotonic() - began:.0f} s"
                self._lines.append(AuditLine(what, taken))
                self.log(f"{what}: {taken}", shown=True)
                return True
        self._lines.append(AuditLine(what, f"{seconds:g} s", [f"not settled: {counts}"]))
        self.log(f"not settled: {counts}", shown=True)
        return False

    def _turn_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._fleet.turn()
            time.sleep(0.05)

    def _wait_for(self, clients: Sequence[Client]) -> None:
        """Wait for the last answers, then until the clients have ended."""
        for stop_waiting in (False, True):
            ends = time.monotonic() + LAST_SECONDS
            while any(client.is_alive() for client in clients) and time.monotonic() < ends:
                self._turn_for(0.1)
            for client in clients:
                if client.is_alive() and stop_waiting:
                    self._promises.wrong.append(f"{client.name} did not end")
                client.give_up()

    def _show_unfinished(self) -> None:
        """Log all unsettled tasks and all workers."""
        states = ("blocked", "delayed", "ready", "leased")
        tasks = ask(self._place, "list", "--all", *(f"--only={state}" for state in states))
        for task in (tasks or {"tasks": []})["tasks"][:30]:
            fields = {key: task[key] for key in ("name", "state", "worker", "attempt", "losses")}
            self.log(f"unfinished {fields}: {self._sampler.why(task['name'])}")
        for worker in (ask(self._place, "workers") or {"workers": []})["workers"]:
            self.log(f"worker {worker}")

    def _lose_a_worker(self, client: taskyard.Client) -> None:
        """Kill a local worker once more, while long tasks keep all other workers busy.

        Its tasks must not hold up the probes that follow.
        """
        for number in range(LONG_PROBES):
            client.submit(["sleep", str(LONG_PROBE_SECONDS)], name=f"probe-long-{number}")
        self._turn_for(SAMPLE_SECONDS)
        self.log(f"last fault: local worker killed: {self._fleet.kill_local()}", shown=True)
        self._turn_for(SAMPLE_SECONDS)

    def _probe(self, client: taskyard.Client) -> None:
        """Submit enough tasks for every worker to get some."""
        for service, count in PROBES.items():
            for number in range(count):
                text = f"probe-{service}-{number}"
                if service == "exec":
                    write = f"printf '0\\tprobe\\t%s\\n' {text} >> '{self._place.ledger}'"
                    client.submit(["sh", "-c", f"sleep 0.1; {write}"], name=text)
                    continue
                lane: dict[str, Any] = {}
                if service == "mail":
                    lane["lane"] = f"probe-{number % 12}"
                client.submit(text.encode(), name=text, service=service, **lane)

    def _served(self, since: float) -> AuditLine:
        """Return whether every worker has run a task since a time."""
        history = audit.read_history(self._place.root / "log" / "watch.log")
        _, ledger = audit.read_ledger(self._place.ledger)
        names = self._fleet.worker_names()
        seen = {name for name, at in {**history.served_at, **ledger}.items() if at >= since}
        addresses = [name for name, at in history.served_at.items() if at >= since]
        if any(audit.SILENT_WORKER in address for address in addresses):
            seen.add("rr-1")
        idle = [name for name in names if name not in seen]
        return AuditLine("every worker works at the end", f"{len(names)} workers", idle)

    def _await_watch(self) -> None:
        """Wait until `watch` has printed all decisions of the broker."""
        status = ask(self._place, "status")
        ends = time.monotonic() + 30
        while status and time.monotonic() < ends:
            if audit.last_record(self._place.root / "log" / "watch.log") >= status["records"]:
                return
            self._turn_for(0.5)

    def _audit(self) -> None:
        history = audit.read_history(self._place.root / "log" / "watch.log")
        ledger, _ = audit.read_ledger(self._place.ledger)
        stuck = [*self._sampler.stuck.values()]
        self._lines += [
            AuditLine(
                "nothing READY beside a free slot", f"for over {audit.STUCK_SECONDS:g} s", stuck
            ),
            AuditLine("no process ended without a fault", "", self._fleet.unexpected),
            AuditLine("no internal error in a log", "", self._tracebacks()),
            *audit.history_lines(history, self._promises, ledger),
            *audit.journal_lines(self._place, history),
        ]

    def _tracebacks(self) -> list[str]:
        logs = sorted((self._place.root / "log").glob("*.log"))
        signs = ("Traceback", "mistake of Taskyard", "internal error")
        texts = [(path.name, path.read_text(errors="replace")) for path in logs]
        return [f"{name}: {sign}" for name, text in texts for sign in signs if sign in text]

    def _close(self) -> bool:
        """Print the closing table."""
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self._fleet.faults.items()))
        self.log(f"faults: {faults}", shown=True)
        for line in self._lines:
            mark = "FAILED" if line.wrong else "good"
            self.log(f"{mark:<7} {line.what:<36} {line.figures}", shown=True)
            for number, problem in enumerate(line.wrong):
                self.log(f"          {problem}", shown=number < audit.SHOWN_MAX)
            if len(line.wrong) > audit.SHOWN_MAX:
                self.log(f"          … {len(line.wrong)} in all", shown=True)
        return not any(line.wrong for line in self._lines)


def main(arguments: Sequence[str]) -> int:
    """Run a soak by the options of a command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=20, help="How long faults go on.")
    parser.add_argument("--seed", type=int, default=None, help="Where random choices come from.")
    parser.add_argument("--state", type=Path, help="An empty directory for state and logs.")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    root = options.state or Path(tempfile.mkdtemp(prefix="soak-"))
    root.mkdir(parents=True, exist_ok=True)
    holds = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    try:
        holds = Soak(Layout(root.resolve()), seed).run(options.minutes)
    finally:
        if holds and options.state is None:
            shutil.rmtree(root)
        elif not holds:
            print(f"soak: FAILED; state and logs are in {root}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
