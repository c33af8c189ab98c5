"""A program for a separate network namespace: a remote broker that is reached with keys only.

Peers of every dialect use invitations. With `127.0.0.1` as the address it needs no namespace.
"""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from taskyard.cli.daemon_options import DIALECT_SIDES
from taskyard.client.internal import InternalClient
from taskyard.errors import Refused, UserError
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.kit.processes import Broker, Running, run, run_here, until

#: Reserved for documentation: RFC 5737.
ADDRESS = "192.0.2.77"
LOCAL = "127.0.0.1"

#: Upper case is a result of this worker.
COMMAND = ("--command", "tr a-z A-Z", "--slots", "1", "--until-eof")


def main(directory: Path, address: str) -> list[str]:
    """Return the result of each step as a word."""
    if address == ADDRESS:
        make_address()
    places = dict.fromkeys(DIALECT_SIDES, f"tcp://{address}:0")
    places["ping-pong"] = f"tcp://{address}:0,tcp://{address}:0"
    listen = [word for one, place in places.items() for word in ("--listen", f"{one}={place}")]
    refused = run(directory, "broker", "--secure", *listen[:4])[0] == 2
    steps = ["refused" if refused else "opened"]
    with ExitStack() as stack:
        ring = Keyring(directory / ".taskyard")
        ring.create("owner", Role.ADMIN, directory / "owner.key")
        broker = stack.enter_context(Broker(directory, "--secure", *listen))
        found = dict(zip(places, broker.endpoints[1:], strict=True))
        for dialect, endpoint in found.items():
            backend, *frontends = endpoints.split_endpoints(endpoint)
            invite(directory, dialect, "worker,producer", f"w-{dialect}", backend)
            invite(directory, dialect, "producer", f"p-{dialect}", (frontends or [backend])[0])
        steps += work(directory, stack, found["dwork"])
        steps.append(try_without_a_key(found["dwork"]))
    return steps


def invite(directory: Path, dialect: str, roles: str, name: str, endpoint: str) -> None:
    words = ("keys", "invite", roles, name, "--for", dialect, "--broker", endpoint)
    code, _, err = run_here(directory, *words)
    assert code == 0, err


def work(directory: Path, stack: ExitStack, endpoint: str) -> list[str]:
    """Run a task on a worker of each dialect, one worker at a time."""
    client = stack.enter_context(InternalClient(endpoint, key=directory / "p-dwork.invite"))
    steps = []
    for dialect, service in (("dwork", "s"), ("wmp", "default"), ("ping-pong", "default")):
        options = ("--service", "s") if dialect == "dwork" else ()
        words = ("worker", "--invite", f"w-{dialect}.invite", *COMMAND, *options)
        with Running(directory, *words) as worker:
            task = client.submit(b"done", service=service)
            steps.append(task.result(60).decode().lower())
            assert worker.terminate()[0] == 0
    with Running(directory, "rr", "worker", "--invite", "w-round-robin.invite") as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.write("register\n")
        worker.process.stdin.flush()
        until(lambda: any(one["dialect"] == "round-robin" for one in client.workers()))
        words = ("rr", "client", "--invite", "p-round-robin.invite")
        with Running(directory, *words) as peer:
            assert peer.process.stdin is not None
            peer.process.stdin.write("pingt\n")
            peer.hang_up()
            steps.append("done" if "pingt: answered by tcp://" in peer.end()[1] else "lost")
    return steps


def make_address() -> None:
    for words in ("link set lo up", f"address add {ADDRESS}/32 dev lo"):
        subprocess.run(["ip", *words.split()], check=True)  # noqa: S607  # as root


def try_without_a_key(endpoint: str) -> str:
    """Connect without a key. Our client refuses, and a plain socket gets no reply."""
    try:
        InternalClient(endpoint).close()
    except Refused:
        return "refused"
    except UserError:
        endpoints.Tcp.is_loopback = property(lambda _: True)  # type: ignore[assignment, method-assign]
        return try_without_a_key(endpoint)
    return "came in"


if __name__ == "__main__":
    sys.stdout.write(" ".join(main(Path(sys.argv[1]), sys.argv[2])))
