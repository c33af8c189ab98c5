"""`./yard demo --pair`, and the PostgreSQL cluster that it starts."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs

from pair_demo import postgresql
from pair_demo.pair import PairCounts, Takeover, proof
from pair_demo.postgresql import ThrowawayCluster, find_programs
from taskyard.demo.campaign import AuditCounts
from taskyard.errors import ExitCode, NotInstalled, ProcessEnded
from tests.kit.processes import PATIENCE_SECONDS, Running
from tests.kit.requirements import need

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = Path(__file__).parents[2] / "tools"

#: The least that the demo takes.
TASKS = 200


def fake_programs(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("initdb", "postgres"):
        (directory / name).write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
        (directory / name).chmod(0o755)
    return directory


# The whole demo.

STEPS = [
    "starting a throw-away PostgreSQL",
    "broker-1 leads, broker-2 follows",
    "killing broker-1 by SIGKILL, with ",
    "broker-2 has taken over: epoch 1 -> 2, served again after ",
    "started broker-1 again: following epoch 2 at row ",
    "all tasks have settled",
]


class Demo(Running):
    """`demo --pair` whose temporary files are in `directory`."""

    def __init__(self, directory: Path, *options: str) -> None:
        # Variables for another database are not used.
        others = ("PGHOST=db.example", "PGPORT=1", "PGSERVICE=none", "PGOPTIONS=-c wrong=1")
        places = (f"TMPDIR={directory}", f"PYTHONPATH={TOOLS}")
        program = ("env", *places, *others, sys.executable, "-m", "pair_demo")
        super().__init__(directory, "--pair", *options, program=program)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a directory that another user may enter."""
    need("PostgreSQL")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def processes_below(directory: Path) -> list[str]:
    """Return the command lines of processes that use a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str((path / "cwd").readlink()).startswith(str(directory)):
                found.append((path / "cmdline").read_text())
    return found


def test_demo_kills_the_leader_and_proves_that_nothing_is_lost(temporary: Path) -> None:
    with Demo(temporary, "--tasks", str(TASKS)) as demo:
        code, out, errors = demo.end()
    assert code == 0, errors
    printed = iter(errors.splitlines())
    for step in STEPS:
        assert any(step in line for line in printed), (step, errors)
    assert all(text in errors for text in (": no answer since ", ": answers again"))
    lines = dict(re.findall(r"(?m)^  (\S.*?)  +(\S.*)$", out))
    assert lines["submitted"].startswith(f"{TASKS} = {TASKS} done + 0 failed; ")
    assert (lines["lost"], lines["completed twice"]) == ("0", "0")
    assert lines["takeover"].startswith("broker-2, epoch 1 -> 2, ")
    assert len(lines) == 8
    assert re.search(r"^all checks passed \(\d+ s\)$", out, re.MULTILINE)
    assert list(temporary.iterdir()) == []
    assert processes_below(temporary) == []


def test_interrupted_demo_leaves_no_process_and_no_file(temporary: Path) -> None:
    with Demo(temporary) as demo:
        lines = iter(demo.error_line, "")
        assert any("killing broker-1" in line for line in lines)  # no broker leads from here on
        code, _, errors = demo.send(signal.SIGINT).end()
    assert code == 130, errors
    assert "all processes of the demo have ended" in errors
    assert list(temporary.iterdir()) == []
    assert processes_below(temporary) == []


def test_failed_demo_keeps_its_logs(temporary: Path) -> None:
    with Demo(temporary, "--postgresql", str(fake_programs(temporary / "bin"))) as demo:
        code, _, errors = demo.end()
    assert code == 6
    assert "initdb: exit status 3: no room" in errors
    (kept,) = temporary.glob("taskyard-pair-*")
    assert f"failed (see the logs in {kept / 'log'})" in errors


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    for words, text in {
        ("--out", "x"): "unknown option --out",
        ("--postgresql", str(tmp_path)): "has no initdb and postgres",
        ("--tasks", "1"): ", not 1",
    }.items():
        with Demo(tmp_path, *words) as demo:
            code, _, errors = demo.end()
        assert (code, text in errors) == (2, True), errors


# The closing table.

SOUND = PairCounts(AuditCounts(submitted=9, done=9), 5, {1: 2, 2: 3}, 9)
TAKEOVER = Takeover(-9, 2, 9, "broker-2", 1, 2, 5.0, 3)


def broken(counts: PairCounts, takeover: Takeover = TAKEOVER) -> dict[str, ExitCode]:
    return {line.what: line.code for line in proof(counts, takeover) if not line.passed}


def test_each_broken_guarantee_fails_its_line() -> None:
    def audited(**values: int) -> PairCounts:
        counts = AuditCounts(**{"submitted": 9, "done": 9, **values})
        return structs.replace(SOUND, audit_counts=counts)

    damaged, failed = ExitCode.STATE_DAMAGED, ExitCode.TASK_FAILED
    assert broken(SOUND) == broken(audited(stale=1)) == {}
    assert broken(audited(completed_twice=1)) == {"completed twice": damaged}
    assert broken(audited(done=8, unfinished=1)) == {"submitted": failed, "lost": damaged}
    assert broken(audited(done=8, failed=1)) == {"submitted": failed}
    assert broken(audited(unknown=1)) == {"rows of the journal": damaged}
    assert broken(structs.replace(SOUND, results_right=8)) == {"results": failed}
    assert broken(structs.replace(SOUND, rows_by_epoch={1: 5})) == {"rows of the journal": damaged}
    assert broken(SOUND, structs.replace(TAKEOVER, status=0)) == {"leader killed": failed}
    assert broken(SOUND, structs.replace(TAKEOVER, epoch_after=1)).keys() == {
        "takeover",
        "rows of the journal",
    }


# Find PostgreSQL.


def test_named_directory_is_used_with_or_without_bin(tmp_path: Path) -> None:
    folder = fake_programs(tmp_path / "pg" / "bin")
    assert find_programs(folder) == find_programs(folder.parent) == folder


def test_named_directory_without_programs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="has no initdb and postgres"):
        find_programs(tmp_path)


def test_path_comes_before_pg_config_and_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [fake_programs(tmp_path / "lib" / version / "bin") for version in ("9.6", "15")]
    monkeypatch.setattr(postgresql, "_FOLDERS", (f"{tmp_path}/lib/*/bin"[1:],))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_programs() == folders[1]
    config = tmp_path / "pg_config"
    config.write_text(f"#!/bin/sh\necho {folders[0]}\n")
    config.chmod(0o755)
    assert find_programs() == folders[0]
    monkeypatch.setenv("PATH", f"{fake_programs(tmp_path / 'own')}:{tmp_path}")
    assert find_programs() == tmp_path / "own"


def test_links_in_the_path_lead_to_the_directory_with_all_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_programs(tmp_path / "lib")
    links = tmp_path / "bin"
    links.mkdir()
    for name in ("initdb", "postgres"):
        (links / name).symlink_to(folder / name)
    monkeypatch.setenv("PATH", str(links))
    assert find_programs() == folder


def test_without_postgresql_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInstalled, match="apt-get install postgresql"):
        find_programs()


# A throw-away cluster.


def test_failed_initdb_is_an_error_with_its_reason_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        parent.chmod(0o755)  # another user runs it
        folder = fake_programs(parent / "bin")
        with pytest.raises(ProcessEnded, match="initdb: exit status 3: no room"):
            ThrowawayCluster(folder, parent)
        assert list(parent.iterdir()) == [folder]


HOLD = """
import sys
from pathlib import Path
from pair_demo.postgresql import ThrowawayCluster
cluster = ThrowawayCluster(Path(sys.argv[1]))
print(cluster.url(), cluster.data, flush=True)
sys.stdin.read()
"""


@pytest.mark.needs("setpriv")
def test_cluster_ends_with_a_process_that_is_killed() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, need("PostgreSQL")],
        env=os.environ | {"PYTHONPATH": str(TOOLS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        url, data = holder.stdout.readline().split()
        server = int((Path(data) / "postmaster.pid").read_text().split()[0])
        descriptor = os.pidfd_open(server)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT 1").fetchall() == [(1,)]
        holder.kill()
    # A process descriptor is readable when its process has ended.
    assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0]
    os.close(descriptor)
    shutil.rmtree(Path(data).parent)
