"""The measured broker as a process: `python -m … STATE KIND [RULES [LIMITS]]`.

It is the product's broker. Profiling belongs to the benchmark, so only this file knows the variable
that enables it.

The echo replies to plain peers from a table and stores nothing. It shows the limit of the sockets
alone.
"""

import cProfile
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from taskyard.broker.compaction import CompactionLimits
from taskyard.broker.server import BrokerSettings, serve
from taskyard.core.events import RulesSet
from taskyard.net import endpoints, sockets
from taskyard.net.host import Poller, Signals
from taskyard.net.zmq_socket import ZmqSocket
from taskyard.wire import dwork_pb2 as pb

#: The file for the profile. Not set: no profile.
PROFILE_VARIABLE: Final = "TASKYARD_BENCH_PROFILE"

#: The URL of the store of a broker on PostgreSQL.
STORE_VARIABLE: Final = "BENCH_STORE"

_Q: Final = pb.QueryMsg
_TASK: Final = pb.TaskMsg(name=b"task-0-000000000", origin=b"peer-0").SerializeToString()
#: Replies of the echo, by the type byte of a plain message.
_ANSWERS: Final[dict[int, bytes]] = {
    _Q.Create: _Q(type=_Q.OK).SerializeToString(),
    _Q.Steal: _Q(type=_Q.Transfer, task=[_TASK]).SerializeToString(),
    _Q.Complete: _Q(type=_Q.OK).SerializeToString(),
}


def encode_rules(rules: RulesSet) -> str:
    """Encode rules as an argument of a command line."""
    return msgspec.json.encode(rules).decode()


def main(state: Path, kind: str, encoded: str = "", limits: str = "") -> None:
    if kind == "echo":
        echo(state)
        return
    rules = msgspec.json.decode(encoded, type=RulesSet) if encoded else RulesSet(0)
    compact = msgspec.json.decode(limits, type=CompactionLimits) if limits else CompactionLimits()
    settings = BrokerSettings(
        state,
        in_memory=kind == "in memory",
        rules=rules,
        compact=compact,
        store=os.environ[STORE_VARIABLE] if kind == "postgresql" else "",
        blobs_directory=state.parent / "files" if kind == "postgresql" else None,
    )
    profile = os.environ.get(PROFILE_VARIABLE)
    if not profile:
        serve(settings, _say)
        return
    profiler = cProfile.Profile()
    profiler.runcall(serve, settings, _say)
    profiler.dump_stats(profile)


def echo(state: Path) -> None:
    """Reply until a signal ends it."""
    wire, poller = sockets.listen(endpoints.native_endpoint(state)), Poller()
    with Signals() as signals:
        poller.add(wire)
        poller.add(signals.fileno())
        _say("listening")
        while not signals.received():
            poller.wait(None)
            _answer_all(wire)
    wire.close()


def _answer_all(wire: ZmqSocket) -> None:
    arrived = []
    while (frames := wire.receive()) is not None:
        arrived.append(frames)
    for route, _, body in arrived:
        wire.send([route, b"", _ANSWERS[body[1]]])


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
