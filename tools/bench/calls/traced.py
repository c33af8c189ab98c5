"""Processes whose calls are counted: `python -m bench.calls.traced FILE WHAT …`.

Each writes its trace to the file when it ends. Without a file nothing is counted, so that the
system calls of the process itself can be.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.calls import cases
from bench.calls.cases import REPEATS
from bench.calls.tracer import Tracer, write
from taskyard.broker.server import BrokerSettings, Housekeeping, serve
from taskyard.broker.turn import Broker
from taskyard.client.client import Client
from taskyard.client.session import Session
from taskyard.core.scheduler import Scheduler

_PAYLOAD: Final = b"payload-of-000000000"  # 20 bytes


def _say(text: str) -> None:
    print(text, flush=True)


def serve_broker(state: str, *listen: str) -> None:
    """Serve until a signal ends it."""
    places = [one.partition("=")[::2] for one in listen]
    serve(BrokerSettings(Path(state), listen=tuple(places)), _say)


def submit_tasks(endpoint: str) -> None:
    """Submit tasks, each when the result of the one before is there."""
    with Client(endpoint) as client:
        for _ in range(REPEATS):
            _submit_one(client)


def _submit_one(client: Client) -> None:
    client.submit(_PAYLOAD).result()


def broker_tracer() -> Tracer:
    """Return a tracer of turns, and of the steps of housekeeping between some of them."""
    marks = {Broker.turn.__code__: "", Housekeeping.run_step.__code__: cases.HOUSEKEEPING}
    return Tracer(marks, {Scheduler.handle.__code__: "event"})


def client_tracer() -> Tracer:
    """Return a tracer of tasks with the turns of their session, in all threads."""
    turns = {Session.turn.__code__: "self"}
    return Tracer({_submit_one.__code__: ""}, turns, all_threads=True)


_PROCESSES: Final[dict[str, tuple[Callable[..., None], Callable[[], Tracer]]]] = {
    "broker": (serve_broker, broker_tracer),
    "client": (submit_tasks, client_tracer),
}


def main(file: str, what: str, *words: str) -> None:
    run, make_tracer = _PROCESSES[what]
    if not file:
        run(*words)
        return
    tracer = make_tracer()
    tracer.start()
    run(*words)
    write(tracer.stop(), Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
