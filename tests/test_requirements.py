"""The table of what tests need: a part is found, present in part, or missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pair_demo import postgresql
from tests.kit import requirements
from tests.kit.processes import environment
from tests.kit.requirements import ROOT, TABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Every program that a probe runs, with its exit status.
PROGRAMS = {
    **dict.fromkeys(("awk", "bash", "cc", "chromium", "git", "ip", "node", "setpriv"), 0),
    **dict.fromkeys(("initdb", "pg_basebackup", "postgres", "prometheus", "promtool"), 0),
    **dict.fromkeys(("beanstalkd", "gearmand", "redis-server", "systemd-analyze"), 0),
    **dict.fromkeys(("bcftools", "java", "parallel", "samtools"), 0),
    "bwa": 1,
}
#: Rows of the table whose probes run only these.
ROWS = [
    name
    for name, row in TABLE.items()
    if row.packages and name != "CPython's tests"
] + ["zeromq of npm"]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty directory that is all of PATH, and forget what was found before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgresql, "_FOLDERS", ())
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    requirements.problem.cache_clear()
    requirements.found.cache_clear()


def write_program(path: Path, name: str, status: int) -> None:
    program = path / name
    program.write_text(f"#!/bin/sh\necho {name}: no library >&2\nexit {status}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("name", ROWS)
def test_missing_program_is_missing(path: Path, name: str) -> None:
    assert list(path.iterdir()) == []
    assert requirements.problem(name)


@pytest.mark.parametrize("name", ROWS)
def test_program_that_can_not_run_is_missing(path: Path, name: str) -> None:
    for program in PROGRAMS:
        write_program(path, program, 127)
    assert "no library" in requirements.problem(name)


@pytest.mark.parametrize("name", ROWS)
def test_program_that_runs_is_found(path: Path, name: str) -> None:
    for program, status in PROGRAMS.items():
        write_program(path, program, status)
    assert requirements.problem(name) == ""


def test_links_to_some_programs_of_postgresql_lead_to_all(path: Path, tmp_path: Path) -> None:
    whole = tmp_path / "lib"
    whole.mkdir()
    for name in ("initdb", "postgres", "pg_basebackup"):
        write_program(whole, name, 0)
    for name in ("initdb", "postgres"):
        (path / name).symlink_to(whole / name)
    assert requirements.need("PostgreSQL") == str(whole)


def test_programs_of_postgresql_without_one_that_is_used_are_missing(path: Path) -> None:
    for name in ("initdb", "postgres"):
        write_program(path, name, 0)
    assert "pg_basebackup" in requirements.problem("PostgreSQL")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (None, "No module named 'test.test_concurrent_futures'"),
        (("__init__.py",), "No module named 'test.test_concurrent_futures'"),
        (("__init__.py", "test_concurrent_futures.py"), ""),
    ],
    ids=["missing", "in part", "whole"],
)
def test_tests_of_cpython_are_found_by_importing_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...] | None, why: str
) -> None:
    package = path / "lib" / "test"
    package.parent.mkdir()
    monkeypatch.setattr(requirements, "CPYTHON_TESTS", package)
    monkeypatch.setattr(requirements, "CPYTHON_VERSION", sys.version_info[:2])
    for name in files or ():
        package.mkdir(exist_ok=True)
        (package / name).touch()
    assert requirements.problem("CPython's tests").endswith(why)
    assert bool(requirements.problem("CPython's tests")) == bool(why)


def test_snakemake_without_the_modules_of_the_plugin_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "SNAKEMAKE", path / "snakemake")
    assert "No such file" in requirements.problem("snakemake")
    forget()
    write_program(path, "snakemake", 0)
    write_program(path, "python", 1)
    assert "no library" in requirements.problem("snakemake")
    forget()
    write_program(path, "python", 0)
    assert requirements.need("snakemake") == str(path / "snakemake")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("ci", ["", "true"])
def test_missing_program_skips_a_test_and_fails_it_on_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    kind = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(kind) as raised:
        requirements.need("chromium")
    assert raised.value.msg == "chromium: not in PATH (apt-get install chromium fonts-liberation)"


def test_missing_right_skips_a_test_also_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    forget()
    with pytest.raises(pytest.skip.Exception, match="root: run as another user"):
        requirements.need("root")
    forget()


def test_ci_installs_what_is_missing_with_one_command_for_all_packages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ("cc", "zmq.h", "git", "zeromq of npm", "root", "parallel")
    monkeypatch.setattr(requirements, "TABLE", {name: TABLE[name] for name in rows})
    write_program(path, "git", 0)
    assert requirements.commands() == [
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends gcc libc6-dev libzmq3-dev",
        TABLE["zeromq of npm"].command,
    ]
    script = (ROOT / ".ci" / "run").read_text()
    assert ".venv/bin/python -m tests.kit.requirements | " in script
    assert "apt-get" not in script


def test_run_without_a_program_ends_with_the_command_that_installs_it(tmp_path: Path) -> None:
    """The tests of committed files need git."""
    words = ("-m", "pytest", "-q", "-rs", "-o", f"cache_dir={tmp_path}", "-k", "committed_file")
    done = subprocess.run(
        [sys.executable, *words, "tests/test_style.py"],
        cwd=ROOT,
        env=environment(PATH=str(tmp_path), PYTEST_ADDOPTS="", CI=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    found = re.fullmatch(r"SKIPPED \[(\d+)\] tests/kit/requirements.py:\d+: (.+)", line)
    assert found, line
    count, reason = found.groups()
    assert reason == "git: not in PATH (apt-get install git)"
    listed = tmp_path / "v" / "taskyard" / "skipped"
    assert json.loads(listed.read_text()) == {reason: int(count)}


def test_no_test_looks_for_a_program_by_itself() -> None:
    probes = re.compile(r"skipif\(|importorskip|shutil\.which\(|pytest\.skip\(")
    files = [*(ROOT / "tests").rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path not in (Path(requirements.__file__), Path(__file__))
        for line in path.read_text().splitlines()
        if probes.search(line)
    }
    assert found == {
        'tests/conformance/test_with_keys.py: pytest.skip(WORKERS[worker_kind].cannot["leave"])',
        'tests/pipeline/test_linked_campaigns.py: pytest.skip("only with --whole")',
        'tests/pipeline/test_signals.py: pytest.skip("only with --whole")',
    }


def test_readme_says_what_is_not_tested_without_which_package() -> None:
    without: dict[str, list[str]] = {}
    for name, row in TABLE.items():
        if row.install and not row.is_for_whole:
            without.setdefault(row.tests, []).append(row.packages or name)
    rows = [f"| {tests} | {', '.join(packages)} |" for tests, packages in without.items()]
    table = "\n".join(["| not tested | without |", "|---|---|", *rows, ""])
    assert table in (ROOT / "README.md").read_text()
