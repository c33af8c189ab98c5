"""The processes in the pictures: a broker, workers and the page, with two campaigns.

Every process ends with this process, however it ends, because it reads a pipe from it. Knows no
browser.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from screenshots import survey
from taskyard.client.internal import InternalClient
from taskyard.client.requests import full_name, scope_of
from taskyard.core.states import TaskState
from taskyard.process.child import ChildProcess, environment_without_settings, taskyard_command

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parents[2]
MAIL: Final = ROOT / "examples" / "mail"

#: Workers and their slots. Tasks of the survey sleep, so the slots need no cores.
WORKERS: Final = {
    "telescope-a": ("--service", "exec", "--slots", "4"),
    "telescope-b": ("--service", "exec", "--slots", "4"),
    "archive": ("--service", "exec", "--slots", "2"),
    "mailer": ("--service", "smtp", "--slots", "3"),
}

#: Limit for a busy machine.
_SECONDS_MAX: Final = 600.0
_POLL_SECONDS: Final = 0.2
_END_SECONDS: Final = 15.0


class Scene:
    """A context manager: the running processes, and what they work on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / ".taskyard"
        #: The page's address with its token.
        self.address = ""
        self._processes = ExitStack()
        self._broker: ChildProcess | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._processes)
            self._start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def _start(self) -> None:
        for name in ("taskyard.toml", "agent.py"):
            shutil.copy(MAIL / name, self.directory)
        (self.directory / survey.SCRIPT_NAME).write_text(survey.SCRIPT)
        self.start_broker()
        for name, options in WORKERS.items():
            self._start_process("worker", "--until-eof", "--quiet", "--name", name, *options)
        page = self._start_process(
            "web", "--until-eof", "--state", ".taskyard", "--page", "127.0.0.1:0"
        )
        line = page.read_line()
        if not line.startswith("page "):
            raise RuntimeError("taskyard web: no address")
        self.address = line.removeprefix("page ")

    def start_broker(self) -> None:
        """Start the broker, or start it again after `kill_broker`."""
        self._broker = self._start_process("broker", "--until-eof")
        if not self._broker.read_endpoints(1):
            raise RuntimeError("taskyard broker: no endpoint")

    def kill_broker(self) -> None:
        """Kill the broker, as a crash would."""
        if self._broker is not None:
            self._broker.kill()

    def _start_process(self, *words: str) -> ChildProcess:
        process = ChildProcess(
            taskyard_command(words),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.directory,
            env=environment_without_settings(),
        )
        self._processes.callback(_end, process)
        return process

    def taskyard(self, *words: str) -> str:
        """Run a command and return its output. Raises `CalledProcessError`."""
        return subprocess.run(
            taskyard_command(words),
            cwd=self.directory,
            env=environment_without_settings(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    def load_survey(self, pace: float) -> None:
        """Submit the graph of a thousand tasks."""
        file = self.directory / "survey.jsonl"
        file.write_text("".join(json.dumps(task) + "\n" for task in survey.tasks(pace)))
        self.taskyard("load", file.name, "--campaign", "survey")

    def load_mail(self) -> None:
        """Submit the messages of the mail example."""
        file = self.directory / "mails.jsonl"
        subprocess.run([sys.executable, MAIL / "campaign.py", file], check=True)
        self.taskyard("load", file.name, "--campaign", "mail")

    def wait_for_done(self, count: int) -> None:
        """Wait until so many tasks of the survey are done, and a task has failed."""

        def is_so() -> bool:
            counts = client.counts("survey")
            return counts["done"] >= count and counts["failed"] > 0

        with InternalClient(state=self.state) as client:
            until(is_so)

    def wait_for_end(self) -> None:
        """Wait until no task of the survey can run any more."""
        with InternalClient(state=self.state) as client:
            client.wait_campaign("survey", _SECONDS_MAX)

    def task_of_each_kind(self) -> dict[str, str]:
        """Return a failed, a running and a blocked task of the survey, by the name of its state."""
        found: dict[str, str] = {}
        with InternalClient(state=self.state) as client:
            for state in (TaskState.FAILED, TaskState.LEASED, TaskState.BLOCKED):
                scope = scope_of(campaign="survey", states=[state])
                task = next(client.tasks(scope), None)
                if task is not None:
                    found[str(task["state"])] = full_name(task)
        return found


def until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition holds. Raises `TimeoutError` after some minutes."""
    deadline = time.monotonic() + _SECONDS_MAX
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the campaign did not get there in {_SECONDS_MAX:g} s")
        time.sleep(_POLL_SECONDS)


def _end(process: ChildProcess) -> None:
    process.close_stdin()
    process.wait_or_kill(_END_SECONDS)
