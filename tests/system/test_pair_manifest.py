"""The commands of deploy/kubernetes/pair.yaml, run as its two pods would run them."""

from __future__ import annotations

import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]  # stubs would be one more package

from pair_demo.pair import free_ports
from taskyard.client.client import Client
from tests.kit.processes import PATIENCE_SECONDS, TASKYARD, Running, environment

if TYPE_CHECKING:
    from tests.kit.postgres import Cluster

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "pair.yaml"


class Pod:
    """A directory in place of a pod's volume, and a port in place of its address."""

    def __init__(self, directory: Path, port: int, url: str) -> None:
        directory.mkdir(mode=0o700)
        self.directory, self.port, self._url = directory, port, url
        self.variables = environment(TASKYARD_BROKER_STORE=url)
        (found,) = [
            one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "StatefulSet"
        ]
        spec = found["spec"]["template"]["spec"]
        self._containers: dict[str, dict[str, Any]] = {
            one["name"]: one for one in spec["initContainers"] + spec["containers"]
        }

    def words(self, container: str) -> list[str]:
        """Return the command line of a container of this pod."""
        one = self._containers[container]
        given = [self._here(word) for word in one["args"]]
        return [*one["command"], *given] if "command" in one else [*TASKYARD, *given]

    def _here(self, word: str) -> str:
        return (
            word.replace("/var/lib/taskyard", str(self.directory))
            .replace(":6125", f":{self.port}")
            .replace("$(TASKYARD_BROKER_STORE)", self._url)
            .replace("taskyard keys", f"{shlex.join(TASKYARD)} keys")
        )

    def start(self, container: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.words(container), env=self.variables, text=True)

    def broker(self) -> Running:
        return Running(
            self.directory,
            f"TASKYARD_BROKER_STORE={self._url}",
            *self.words("broker"),
            "--until-eof",
            program=("env",),
        )


def test_two_pods_share_store_and_keys_and_one_leads(tmp_path: Path, cluster: Cluster) -> None:
    url = cluster.database(with_store=False)
    pods = [Pod(tmp_path / f"pod-{n}", port, url) for n, port in enumerate(free_ports(2))]
    assert pods[0].start("store").wait(PATIENCE_SECONDS) == 0
    # Both at once: a container that fails is started again.
    started = [pod.start("keys") for pod in pods]
    codes = [one.wait(PATIENCE_SECONDS) for one in started]
    assert 0 in codes
    for pod, code in zip(pods, codes, strict=True):
        assert code == 0 or pod.start("keys").wait(PATIENCE_SECONDS) == 0
    (key,) = tmp_path.glob("*/admin.key")
    with ExitStack() as stack:
        leader = stack.enter_context(pods[0].broker())
        assert len(leader.read_endpoints(2)) == 2
        standby = stack.enter_context(pods[1].broker())
        assert standby.line().startswith("standby: following epoch 1 ")
        places = "+".join(f"tcp://127.0.0.1:{pod.port}" for pod in pods)
        with Client(places, key=str(key)) as client:
            client.submit(["true"], name="before")
            assert client.status()["health"]["leader"]["epoch"] == 1
            leader.send(signal.SIGTERM)
            client.submit(["true"], name="after")
            assert sum(client.status()["counts"].values()) == 2
            assert client.status()["health"]["leader"]["epoch"] == 2
