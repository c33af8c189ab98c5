"""The pages are true: links lead to targets, named tests and verbs exist, figures equal the
code's."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from simulator.mutations import MUTATIONS
from taskyard.broker import compaction
from taskyard.campaign.values import PATHS_MAX
from taskyard.cli import connection
from taskyard.cli.commands import COMMANDS
from taskyard.client.waits import REPORT_NS
from taskyard.core import deadlines, limits
from taskyard.errors import ExitCode
from taskyard.journal.store import DISK_RESERVE_BYTES
from taskyard.net.endpoints import IPC_PATH_BYTES_MAX
from taskyard.net.options import FRAME_BYTES_MAX
from taskyard.process import supervisor
from taskyard.worker import jobs as worker_limits
from taskyard.worker.output import SPOOL_BYTES_MAX
from taskyard.worker.settings import WorkerSettings
from tests.kit.cases import each_case

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUARANTEES: Final = (ROOT / "docs" / "guarantees.md").read_text()
OPERATING: Final = (ROOT / "docs" / "operating.md").read_text()

MEBIBYTE: Final = 1024 * 1024
WORKER: Final = WorkerSettings(b"", (), 1, 1)

#: Verbs of `./yard` itself.
OWN_VERBS: Final = ("setup", "test", "check", "bench", "docs", "sim", "screenshots", "help")


def of(test: str, name: str) -> int:
    """Return a number at the top of a test file."""
    found = re.search(rf"^{name} = ([\d_]+)$", (ROOT / "tests" / test).read_text(), re.MULTILINE)
    assert found, f"{test} has no {name}"
    return int(found[1])


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings]


def is_there(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@each_case("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    near = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in near if not is_there(page, link)] == []


def test_every_page_is_in_the_reading_order() -> None:
    order = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in order] == []


@each_case("page", PAGES)
def test_verbs_that_are_named_exist(page: Path) -> None:
    code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
    form = re.compile(r"(?:(?<![.\w])taskyard|/yard) ([a-z]+)\b")
    labels = ("`taskyard snapshot`", "`TASKYARD history 1`")  # at the head of a file
    named = [verb for part in code if part not in labels for verb in form.findall(part)]
    known = (*COMMANDS, *OWN_VERBS)
    assert [verb for verb in named if verb not in known] == []


def test_architecture_names_every_package_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| package | owns |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.strip().splitlines()[1:]]
    named = sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))
    product = ROOT / "src" / "taskyard"
    packages = [path.name for path in product.iterdir() if (path / "__init__.py").exists()]
    modules = [path.stem for path in product.glob("*.py") if path.name != "__init__.py"]
    assert named == sorted(packages + modules)


def test_files_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"\b((?:\w+/)+\w+\.py)\b", page)
    assert len(named) > 15
    assert [one for one in named if not (ROOT / "src" / "taskyard" / one).exists()] == []


def proofs_in(path: Path) -> list[str]:
    """Return the tests of a file, as on pytest's command line."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found += [f"{node.name}::{one.name}" for one in node.body if hasattr(one, "name")]
        elif isinstance(node, ast.FunctionDef):
            found.append(node.name)
    return found


def test_tests_that_prove_a_guarantee_exist() -> None:
    proofs = re.findall(r"`(tests/[\w/.]+?)(?:::([\w:]+))?`", GUARANTEES)
    assert len(proofs) > 20
    for path, test in proofs:
        assert (ROOT / path).exists(), path
        assert not test or test in proofs_in(ROOT / path), f"{path}::{test}"


@pytest.mark.parametrize(
    "text",
    [
        f"A loaded broker killed {of('system/test_kills.py', 'KILLS')} times",
        f"the journal alone, {of('journal/test_crash.py', 'KILLS')} times",
        f"Workers killed {of('system/test_workers.py', 'KILLS')} times under load",
        f"under load: {of('system/test_workers.py', 'TASKS')} tasks",
        f"{of('system/test_open_requests.py', 'WORKERS'):,} requests that wait",
        f"after {limits.CRASHES_MAX} lost workers",
        f"{WORKER.lease_timeout_ns // limits.SECOND_NS} s after its last heartbeat",
        f"Under {DISK_RESERVE_BYTES // MEBIBYTE} MiB free",
        f"{of('system/test_malformed.py', 'MESSAGES'):,} spoilt messages",
        f"| schedules | {of('sim/test_schedules.py', 'SCHEDULES'):,}, with",
        f"| {len(MUTATIONS)}, all caught |",
        f"more than {compaction.ROWS_MAX:,} rows",
    ],
)
def test_figures_of_the_guarantees_are_those_of_the_tests(text: str) -> None:
    assert text in GUARANTEES


@pytest.mark.parametrize(
    "text",
    [
        f"campaign | {limits.NAME_BYTES_MAX:,} bytes |",
        f"payload of a task | {limits.PAYLOAD_BYTES_MAX // MEBIBYTE} MiB |",
        f"variables of a submitter | {limits.ENVIRONMENT_BYTES_MAX // 1024} KiB |",
        f"`outputs` of a task | {PATHS_MAX:,} |",
        f"result of a function or an agent | {worker_limits.RESULT_BYTES_MAX // MEBIBYTE} MiB |",
        f"output kept of a function or an agent | {worker_limits.OUTPUT_TAIL_BYTES // 1024} KiB,",
        f"A stream below {limits.BLOB_BYTES_MIN // 1024} KiB is in the journal.",
        f"{limits.STREAM_END_BYTES // 1024} KiB each",
        f"stops reading at {SPOOL_BYTES_MAX // MEBIBYTE} MiB of unacknowledged",
        f"reason of a failure | {limits.REASON_BYTES_MAX:,} bytes |",
        f"unfinished tasks of a broker | {limits.TASKS_MAX:,} |",
        f"tasks in one message | {limits.TASKS_PER_MESSAGE_MAX:,} |",
        f"tasks that one waits for | {limits.AFTER_MAX:,} |",
        f"priorities | -{limits.PRIORITY_MAX:,} to {limits.PRIORITY_MAX:,} |",
        f"steps of `retries` | {limits.RETRIES_MAX:,} |",
        f"a task survives | {limits.CRASHES_MAX - 1}: it fails with the {limits.CRASHES_MAX}th |",
        f"frame of a message | {FRAME_BYTES_MAX // MEBIBYTE} MiB |",
        f"submissions are refused | {DISK_RESERVE_BYTES // MEBIBYTE} MiB |",
        f"silence of a worker | {WORKER.lease_timeout_ns // limits.SECOND_NS} s, `--lease` |",
        f"heartbeat of a worker | {deadlines.HEARTBEAT_NS_MIN // limits.SECOND_NS} s, with more",
        (
            f"with more than {deadlines.HEARTBEAT_RATE_MAX} workers "
            "up to a third of `--lease`; `--heartbeat` |"
        ),
        f"longer than {IPC_PATH_BYTES_MAX} bytes",
        f"Under {DISK_RESERVE_BYTES // MEBIBYTE} MiB free",
        f"more than {compaction.ROWS_MAX:,} rows",
        f"(SIGTERM, {worker_limits.KILL_GRACE_NS // limits.SECOND_NS} s later",
        f"after {supervisor.RESTART_SECONDS_FIRST} s, then twice as long each time,",
        f"up to {supervisor.RESTART_SECONDS_MAX:g} s",
        f"warn after {REPORT_NS // limits.SECOND_NS} s",
        f"wait {connection.FIRST_ANSWER_SECONDS} s for the first",
    ],
)
def test_limits_for_operators_are_those_of_the_code(text: str) -> None:
    assert text in OPERATING


def test_exit_codes_are_documented() -> None:
    table = OPERATING.partition("## Exit codes")[2].partition("##")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == list(
        ExitCode
    )
