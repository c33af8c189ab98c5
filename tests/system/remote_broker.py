"""A program for a separate network namespace: a remote broker that is reached with keys only."""

import shutil
import subprocess
import sys
from pathlib import Path

from taskyard.client.client import Client
from taskyard.errors import NoBroker, UserError
from taskyard.net import endpoints
from taskyard.net.keyring import Keyring
from taskyard.wire.roles import Role
from tests.kit.processes import Broker, Running, run

#: Reserved for documentation: RFC 5737.
ADDRESS = "192.0.2.77"


def main(directory: Path) -> list[str]:
    """Return the result of each step as a word."""
    make_address()
    listen = ("--listen", f"dwork=tcp://{ADDRESS}:0")
    steps = ["refused" if run(directory, "broker", *listen)[0] == 2 else "opened"]
    ring = Keyring(directory / ".taskyard")
    for role in (Role.PRODUCER, Role.WORKER):
        ring.create(role.value, role, directory / f"{role}.key")
    with Broker(directory, "--listen", "dwork=tcp://0.0.0.0:0") as broker:
        endpoint = f"tcp://{ADDRESS}:{broker.endpoints[1].rpartition(':')[2]}"
        words = ("worker", "--broker", endpoint, "--key", "worker.key", "--until-eof")
        with (
            Running(directory, *words),
            Client(endpoint, key=directory / "producer.key") as client,
        ):
            steps.append("done" if client.submit(["true"]).result(30) == "" else "lost")
        steps.append(try_without_a_key(endpoint))
    return steps


def make_address() -> None:
    ip = shutil.which("ip")
    assert ip
    for words in ("link set lo up", f"address add {ADDRESS}/32 dev lo"):
        subprocess.run([ip, *words.split()], check=True)


def try_without_a_key(endpoint: str) -> str:
    """Connect without a key. Our client refuses, and a plain socket gets no reply."""
    try:
        Client(endpoint)
    except UserError:
        endpoints.Tcp.is_loopback = property(lambda _: True)  # type: ignore[assignment, method-assign]
    try:
        Client(endpoint, timeout=1).close()
    except NoBroker:
        return "nobody"
    return "came in"


if __name__ == "__main__":
    sys.stdout.write(" ".join(main(Path(sys.argv[1]))))
