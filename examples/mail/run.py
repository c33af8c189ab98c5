"""A delivery run from beginning to end: python run.py [--small] [--directory DIRECTORY].

It works in a directory of its own, on copies of the settings and of the agent, and prints the
commands that it gives, as anybody could type them there.
"""
# ruff: noqa: INP001, T201  # it stands alone; it prints

import argparse
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

import report

HERE = Path(__file__).parent
COPIED = ("taskyard.toml", "agent.py")
TASKYARD = (sys.executable, "-m", "taskyard.cli")

#: Look at the lanes when this share of the messages has ended.
LOOK = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="1,000 messages instead of 20,000")
    parser.add_argument("--directory", type=Path, default=Path("taskyard-mail"))
    wanted = parser.parse_args()
    directory = wanted.directory
    if importlib.util.find_spec("taskyard") is None:
        sys.exit("this Python has no taskyard; run `source .venv/bin/activate` in the clone first")
    prepare(directory, *(["--small"] if wanted.small else []))
    taskyard(directory, "config", "--check")
    taskyard(directory, "up", "--detach")
    try:
        taskyard(directory, "load", "mails.jsonl", "--campaign", "mail")
        follow(directory)
        with (directory / "tasks.json").open("w") as file:
            taskyard(directory, "list", "--campaign", "mail", "--all", "--json", to=file)
    finally:
        taskyard(directory, "down")
    print()
    return report.main(directory)


def prepare(directory: Path, *options: str) -> None:
    """Create a directory with the files of a run. Replaces only that of an earlier run."""
    if directory.exists() and not (directory / "mails.jsonl").exists():
        sys.exit(f"{directory} is there and is not from this example; give another --directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(HERE / name, directory)
    file = directory / "mails.jsonl"
    subprocess.run([sys.executable, HERE / "campaign.py", *options, file], check=True)


def taskyard(directory: Path, *words: str, to: IO[str] | None = None) -> None:
    """Run a command, after showing it."""
    print(f"$ taskyard {shlex.join(words)}{f' > {Path(to.name).name}' if to else ''}", flush=True)
    ended = subprocess.run([*TASKYARD, *words], cwd=directory, stdout=to, check=False)
    if ended.returncode:
        sys.exit(f"it ended with {ended.returncode}; the log is in {directory}/.taskyard/log")


def follow(directory: Path) -> None:
    """Write down what happens until all is settled, and look at the lanes in the middle of it."""
    words = ("watch", "--campaign", "mail", "--since", "0", "--until-settled", "--json")
    print(f"$ taskyard {shlex.join(words)} > events.jsonl", flush=True)
    mails = (directory / "mails.jsonl").read_text().splitlines()
    total = sum(1 for line in mails for _ in report.recipients(json.loads(line)))
    ended = 0
    has_looked = False
    command = [*TASKYARD, *words]
    with (
        subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as watch,
        (directory / "events.jsonl").open("w") as file,
    ):
        for line in watch.stdout or ():
            file.write(line)
            event = json.loads(line)
            ended += len(event["names"]) if event["kind"] in ("finished", "failed") else 0
            if not has_looked and ended > LOOK * total:
                has_looked = True
                print(f"… {ended:,} of {total:,} have ended")
                taskyard(directory, "services")
                taskyard(directory, "lanes")
    print(f"… {ended:,} of {total:,} have ended", flush=True)


if __name__ == "__main__":
    sys.exit(main())
