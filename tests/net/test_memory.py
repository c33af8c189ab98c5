"""The memory of the process: its use and its limits."""

import os
import resource
from pathlib import Path

import pytest

from taskyard.net import memory
from taskyard.net.memory import MemoryMeter, memory_max

pytestmark = pytest.mark.needs("Linux")

MIB = 1 << 20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write_groups(root: Path, text: str) -> None:
    """Write the control groups of a process."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_meter_sees_allocated_memory() -> None:
    with MemoryMeter() as meter:
        before = meter.read()
        taken = bytearray(64 * MIB)
        after = meter.read()
        assert after.resident - before.resident > 32 * MIB
        assert after.address_space - before.address_space > 32 * MIB
        del taken


def test_machine_is_the_limit_where_there_is_no_other(tmp_path: Path) -> None:
    assert memory_max(tmp_path).resident <= MACHINE


def test_nearest_limit_of_the_control_groups_holds(tmp_path: Path) -> None:
    inner = tmp_path / "sys/fs/cgroup/outer/inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{300 * MIB}\n")
    write_groups(tmp_path, "0::/outer/inner\n")
    assert memory_max(tmp_path).resident == 300 * MIB


def test_limit_of_an_older_control_group_holds(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/task"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{200 * MIB}\n")
    write_groups(tmp_path, "3:cpu,cpuacct:/task\n2:memory:/task\n")
    assert memory_max(tmp_path).resident == 200 * MIB


def test_address_space_is_limited_by_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512 * MIB, 512 * MIB))
    assert memory_max(tmp_path) == memory.Memory(512 * MIB, 512 * MIB)
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (endless, endless))
    assert memory_max(tmp_path).address_space > 1 << 60


def test_memory_is_returned_where_the_c_library_can() -> None:
    assert memory.give_back() in (True, False)


def test_memory_settings_can_be_made_twice() -> None:
    memory.return_memory()
    memory.return_memory()
