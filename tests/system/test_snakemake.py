"""The Snakemake plugin: a real workflow, killed and started again, failed and interrupted.

Snakemake is in an environment of its own, because it needs older versions of packages.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from taskyard.client.client import Client
from tests.kit.processes import Broker, Running, Worker, until
from tests.kit.requirements import PLUGIN, ROOT, SNAKEMAKE, need

GENOME_BASES: Final = 5_000
READ_BASES: Final = 100

#: Stands before the real samtools in PATH: writes a line for each call, and lets sorting wait
#: for a file.
SAMTOOLS: Final = """#!/bin/sh
echo "$@" >> {directory}/calls.log
case "$*" in sort*) until [ -e {directory}/gate ]; do sleep 0.05; done;; esac
exec {samtools} "$@"
"""

ONE_JOB: Final = """
rule waits:
    output: "done.txt"
    shell: "echo begins >> calls.log; until [ -e gate ]; do sleep 0.05; done; touch {output}"
"""

TWO_JOBS: Final = """
rule all:
    input: "never.txt", "late.txt"

rule fails:
    output: "never.txt"
    shell: "echo about to fail >&2; exit 3"

rule sleeps:
    output: "late.txt"
    shell: "sleep 600"
"""


class Workflow:
    """A directory with a workflow, its broker's state, and the programs in front of PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / ".taskyard"

    def snakemake(self, *options: str) -> Running:
        path = os.pathsep.join([str(self.directory / "bin"), os.environ["PATH"]])
        modules = os.pathsep.join([str(ROOT / "src"), str(PLUGIN / "src")])
        program = ("env", f"PATH={path}", f"PYTHONPATH={modules}", str(SNAKEMAKE), "--nocolor")
        return Running(self.directory, *options, program=program, stderr=subprocess.STDOUT)

    def run(self, *options: str) -> Running:
        return self.snakemake("--executor", "taskyard", "--jobs", "4", *options)

    def tasks(self) -> list[dict[str, Any]]:
        with Client(state=self.state) as client:
            return [*client.tasks()]

    def states(self) -> Counter[tuple[str, str]]:
        """Return how many tasks of each rule are in each state."""
        return Counter((view["name"].partition("-")[0], view["state"]) for view in self.tasks())


@pytest.fixture
def workflow(tmp_path: Path) -> Workflow:
    need("snakemake")
    return Workflow(tmp_path)


def write_inputs(directory: Path) -> None:
    """Write a genome, and reads of a sample that differs from it at every 400th base.

    There is one sample, because each job costs two seconds of CPU for another Snakemake.
    """
    samtools = need("genome programs")
    shutil.copytree(PLUGIN / "example", directory, dirs_exist_ok=True)
    (directory / "data" / "samples").mkdir(parents=True)
    chance = random.Random(7)
    genome = "".join(chance.choices("ACGT", k=GENOME_BASES))
    (directory / "data" / "genome.fa").write_text(f">I\n{genome}\n")
    changed = "".join(
        "CGTA"["ACGT".index(base)] if place % 400 == 100 else base
        for place, base in enumerate(genome)
    )
    starts = [chance.randrange(GENOME_BASES - READ_BASES) for _ in range(800)]
    reads = [changed[start : start + READ_BASES] for start in starts]
    records = [f"@{number}\n{read}\n+\n{'I' * READ_BASES}\n" for number, read in enumerate(reads)]
    (directory / "data" / "samples" / "A.fastq").write_text("".join(records))
    index = ["bwa", "index", str(directory / "data" / "genome.fa")]
    subprocess.run(index, check=True, stderr=subprocess.DEVNULL)
    program = directory / "bin" / "samtools"
    program.parent.mkdir()
    program.write_text(SAMTOOLS.format(directory=directory, samtools=samtools))
    program.chmod(0o755)


def read_until(running: Running, text: str, count: int = 1) -> None:
    """Read lines until a number of them has this text."""
    seen: list[str] = []
    while sum(text in line for line in seen) < count:
        seen.append(running.line())
        assert seen[-1] or running.process.poll() is None, "\n".join(seen)


def test_job_of_a_killed_workflow_is_followed(workflow: Workflow) -> None:
    (workflow.directory / "Snakefile").write_text(ONE_JOB)
    with Broker(workflow.directory), Worker(workflow.directory):
        with workflow.run("--nolock") as first:
            until((workflow.directory / "calls.log").exists)
            first.kill()
        with workflow.run("--nolock", "--rerun-incomplete") as again:
            read_until(again, "of an earlier start")
            (workflow.directory / "gate").touch()
            code, out, _ = again.end()
        assert code == 0, out
        assert workflow.states() == {("waits", "done"): 1}
    assert (workflow.directory / "calls.log").read_text() == "begins\n"


@pytest.mark.whole
def test_workflow_killed_and_started_again_repeats_no_job(workflow: Workflow) -> None:
    write_inputs(workflow.directory)
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(workflow.directory))
        stack.enter_context(Worker(workflow.directory, "--slots", "4"))
        first = stack.enter_context(workflow.run())
        read_until(first, "Finished jobid")
        until(lambda: workflow.states()["samtools_sort", "leased"] == 1)
        first.kill()
        broker.kill()
        stack.enter_context(Broker(workflow.directory))
        assert stack.enter_context(workflow.snakemake("--unlock")).end()[0] == 0
        again = stack.enter_context(workflow.run("--rerun-incomplete"))
        read_until(again, "of an earlier start")
        (workflow.directory / "gate").touch()
        code, out, _ = again.end()
        assert code == 0, out
        tasks = workflow.tasks()
    assert {view["state"] for view in tasks} == {"done"}
    assert sorted(view["name"].partition("-")[0] for view in tasks) == [
        *("bcftools_call", "bwa_map", "plot_quals", "samtools_index", "samtools_sort"),
    ]
    calls = (workflow.directory / "calls.log").read_text().splitlines()
    assert Counter(call.split()[0] for call in calls) == {"view": 1, "sort": 1, "index": 1}
    (mapped,) = [view for view in tasks if view["name"].startswith("bwa_map")]
    assert mapped["resources"] == {"cpus": 2, "memory": 500_000_000}
    assert "<rect" in (workflow.directory / "plots" / "quals.svg").read_text()


@pytest.mark.whole
def test_failure_is_reported_with_its_output_and_interrupt_cancels(workflow: Workflow) -> None:
    (workflow.directory / "Snakefile").write_text(TWO_JOBS)
    with (
        Broker(workflow.directory),
        Worker(workflow.directory, "--slots", "2"),
        workflow.run("--keep-going") as running,
    ):
        until(lambda: workflow.states() == {("fails", "failed"): 1, ("sleeps", "leased"): 1})
        read_until(running, "taskyard_logs")
        running.send(signal.SIGINT).end()
        assert workflow.states() == {("fails", "failed"): 1, ("sleeps", "cancelled"): 1}
    (log,) = (workflow.directory / ".snakemake" / "taskyard_logs").iterdir()
    assert log.name.startswith("fails-")
    assert "about to fail" in log.read_text()
