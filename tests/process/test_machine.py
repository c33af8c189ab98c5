"""Detection of the machine's resources, over directories that show other machines."""

from pathlib import Path

import pytest

from taskyard.core.resources import UNIT
from taskyard.process import machine
from taskyard.process.machine import Machine, detect, gpu_ids


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)


def write(root: Path, **files: str) -> None:
    """Write files. Two underscores separate directories."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_machine_without_limits(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal:       16000 kB\nMemFree:  1 kB\n")
    found = detect(tmp_path, {})
    assert found == Machine(8 * UNIT, 16_000 * 1024)
    assert found.resources() == ((b"cpus", 8 * UNIT), (b"memory", 16_000 * 1024))


def test_limits_of_unified_control_groups(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 16000 kB\n", proc__self__cgroup="0::/user/job\n")
    group = tmp_path / "sys/fs/cgroup/user"
    (group / "job").mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "job/cpu.max").write_text("max 100000\n")
    (group / "job/memory.max").write_text("4096\n")
    assert detect(tmp_path, {}) == Machine(15_000, 4096)


def test_limits_of_older_control_groups_in_a_container(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="4:memory:/on/host\n1:cpuacct,cpu:/on/host\n0::/\n")
    group = tmp_path / "sys/fs/cgroup"
    for controller, name, text in (
        ("memory", "memory.limit_in_bytes", "8192"),
        ("cpu", "cpu.cfs_quota_us", "50000"),
        ("cpu", "cpu.cfs_period_us", "100000"),
    ):
        (group / controller).mkdir(parents=True, exist_ok=True)
        (group / controller / name).write_text(text)
    assert detect(tmp_path, {}) == Machine(5_000, 8192)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,5", ("2", "5")), ("GPU-1a, 3", ("GPU-1a", "3")), ("", ()), ("-1", ()), ("NoDevFiles", ())],
)
def test_visible_devices_are_the_ids(
    tmp_path: Path, visible: str, expected: tuple[str, ...]
) -> None:
    write(tmp_path, dev__nvidia0="", dev__nvidia1="")
    assert gpu_ids(tmp_path, {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_devices_are_counted(tmp_path: Path) -> None:
    write(tmp_path, dev__nvidia0="", dev__nvidia4="", dev__nvidiactl="")
    assert gpu_ids(tmp_path, {}) == ("0", "1")


def test_driver_lists_devices_without_files(tmp_path: Path) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: B (UUID: y)'\n")
    program.chmod(0o755)
    assert gpu_ids(tmp_path, {"PATH": f"{program.parent}:/bin"}) == ("0", "1")
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert gpu_ids(tmp_path, {"PATH": f"{program.parent}:/bin"}) == ()


def test_devices_of_amd_are_nodes_with_units(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, units in enumerate((0, 256)):
        write(nodes, **{f"{number}__properties": f"cpu_cores_count 8\nsimd_count {units}\n"})
    assert gpu_ids(tmp_path, {"PATH": "/nowhere"}) == ("0",)


def test_workers_share_a_machine() -> None:
    whole = Machine(4 * UNIT, 9000, ("0", "1", "2"))
    assert whole.share(0, 2) == Machine(2 * UNIT, 4500, ("0", "2"))
    assert whole.share(1, 2) == Machine(2 * UNIT, 4500, ("1",))


def test_this_machine_has_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = detect()
    assert found.cpus > 0
    assert found.memory > 1 << 20
