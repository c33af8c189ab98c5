"""The resources of this machine, as far as this process may use them.

Reads the affinity mask, control groups, /proc and device files. Slots are not counted here. Paths
and environment are arguments, so that tests can show another machine.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from taskyard.core.resources import CPUS, GPUS, MEMORY, UNIT, Resources, format_amount
from taskyard.net.memory import UNIFIED, control_groups, memory_limits, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A driver that does not answer within this time has no usable GPU.
_NVIDIA_SMI_SECONDS_MAX: Final = 10

#: Values of CUDA_VISIBLE_DEVICES that hide all devices.
_NO_DEVICES: Final = ("-1", "none", "nodevfiles")


class Machine(Struct, frozen=True):
    """Resources of a machine, or of a worker's share of it."""

    #: In ten-thousandths.
    cpus: int = 0
    #: In bytes. 0: unknown.
    memory: int = 0
    #: The ids of its GPUs.
    gpus: tuple[str, ...] = ()
    #: Other resources, which only a user can name.
    others: Resources = ()

    def resources(self) -> Resources:
        """Return all of them by name, if there are any."""
        amounts = {**dict(self.others), CPUS: self.cpus, MEMORY: self.memory}
        amounts[GPUS] = len(self.gpus) * UNIT
        return tuple(sorted((name, amount) for name, amount in amounts.items() if amount))

    def share(self, index: int, count: int) -> Machine:
        """Return the share of one of `count` workers.

        Cores and memory in equal parts. GPUs and other resources in turn, each as a whole. Names of
        other resources stay with an amount of 0, so that `arguments` overrides settings.
        """
        others = tuple((name, _whole_share(amount, index, count)) for name, amount in self.others)
        return Machine(self.cpus // count, self.memory // count, self.gpus[index::count], others)

    def arguments(self, prefix: str = "--") -> list[str]:
        """Return the options that give these resources to `worker`, or with a prefix to `up`."""
        gpus = "".join(f"{one}," for one in self.gpus) or "0"
        options = [f"{prefix}cpus", format_amount(CPUS, self.cpus)]
        options += [f"{prefix}memory", str(self.memory)]
        options += [f"{prefix}gpus", gpus]
        for name, amount in self.others:
            options += [f"{prefix}resource", f"{name.decode()}={format_amount(name, amount)}"]
        return options


def _whole_share(amount: int, index: int, count: int) -> int:
    """Return a part of an amount in whole units. The first part gets the fraction."""
    units, fraction = divmod(amount, UNIT)
    return (units // count + (index < units % count)) * UNIT + (0 if index else fraction)


def detect(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Machine:
    """Return the resources that this process may use."""
    return Machine(_cpus(root), _memory(root), gpu_ids(root, os.environ if env is None else env))


@cache
def this_machine() -> Machine:
    """Return the resources that this process may use, detected once."""
    return detect()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpus(root: Path) -> int:
    """Return the usable cores in ten-thousandths, within the quotas of the control groups."""
    amounts = [usable_cores() * UNIT]
    for group in control_groups(root, UNIFIED):
        quota, _, period = read_text(group / "cpu.max").partition(" ")
        amounts += _part_of_cores(quota, period)
    for group in control_groups(root, "cpu"):
        quota, period = (read_text(group / f"cpu.cfs_{one}_us") for one in ("quota", "period"))
        amounts += _part_of_cores(quota, period)
    return min(amounts)


def _part_of_cores(quota: str, period: str) -> list[int]:
    """Return a quota of CPU time in ten-thousandths of a core, or nothing if there is none."""
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return []
    return [max(1, int(quota) * UNIT // int(period))]


def _memory(root: Path) -> int:
    """Return the memory of the machine, within the limits of the control groups. 0: unknown."""
    found = re.search(r"^MemTotal: *(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    amounts = [int(found[1]) * 1024] if found else []
    return min(amounts + memory_limits(root), default=0)


def gpu_ids(root: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs that this process may use.

    They are from CUDA_VISIBLE_DEVICES if it is set, else as many as there are devices.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [one.strip() for one in visible.split(",") if one.strip()]
        return () if any(one.lower() in _NO_DEVICES for one in ids) else tuple(ids)
    count = len(list((root / "dev").glob("nvidia[0-9]*"))) or _nvidia_smi_count(env)
    return tuple(map(str, range(count or _rocm_count(root))))


def _nvidia_smi_count(env: Mapping[str, str]) -> int:
    """Return the number of GPUs that the driver lists."""
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607  # found by the PATH, as a user's own command
            env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True,
            timeout=_NVIDIA_SMI_SECONDS_MAX,
        )  # fmt: skip
        return len(re.findall(rb"^GPU \d+:", listed.stdout, re.MULTILINE))
    return 0


def _rocm_count(root: Path) -> int:
    """Return the number of GPUs of AMD. Nodes without SIMD units are processors."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(
        re.search(r"^simd_count [1-9]", read_text(one), re.MULTILINE) is not None for one in nodes
    )
