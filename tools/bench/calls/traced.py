"""Processes whose calls are counted: `python -m bench.calls.traced FILE WHAT …`.

Each writes its trace to the file when it ends.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.calls.tracer import Trace, Tracer, write
from taskyard.broker.broker_settings import BrokerSettings
from taskyard.broker.server import serve
from taskyard.broker.turn import Broker
from taskyard.core.scheduler import Scheduler


def _say(text: str) -> None:
    print(text, flush=True)


def broker(state: str, *listen: str) -> Trace:
    """Serve until a signal ends it. A segment is a turn, and the work until the next one."""
    places = [one.partition("=")[::2] for one in listen]
    settings = BrokerSettings(Path(state), listen=tuple(places))
    tracer = Tracer({Broker.turn.__code__: ""}, {Scheduler.handle.__code__: "event"})
    tracer.start()
    serve(settings, _say)
    return tracer.stop()


_PROCESSES: Final[dict[str, Callable[..., Trace]]] = {"broker": broker}


def main(file: str, what: str, *words: str) -> None:
    write(_PROCESSES[what](*words), Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
