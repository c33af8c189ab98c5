"""`taskyard demo --pair`, and the PostgreSQL cluster that it starts."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest

from taskyard.demo import postgresql
from taskyard.demo.postgresql import ThrowawayCluster, find_programs
from taskyard.errors import NotInstalled, ProcessEnded
from tests.kit.postgres import programs
from tests.kit.processes import PATIENCE_SECONDS


def fake_programs(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("initdb", "postgres"):
        (directory / name).write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
        (directory / name).chmod(0o755)
    return directory


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
from taskyard.demo.postgresql import ThrowawayCluster
cluster = ThrowawayCluster(Path(sys.argv[1]))
print(cluster.url(), cluster.data, flush=True)
sys.stdin.read()
"""


def test_cluster_ends_with_a_process_that_is_killed() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(programs())],
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
