"""GPUs by id, and the environment variables for the resources of a task.

The broker counts amounts, and the worker hands out ids. Knows no processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from taskyard.core.resources import CPUS, GPUS, MEMORY, UNIT, Resources, format_amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Parts of devices by id, in ten-thousandths.
Shares: TypeAlias = dict[str, int]


class DevicePool:
    """Hands out devices by id. Tasks with a fraction share one."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._free: Shares = dict.fromkeys(ids, UNIT)

    def has(self, amount: int) -> bool:
        """Return whether `take` would find this amount."""
        return self._find(amount) is not None

    def take(self, amount: int) -> Shares:
        """Take whole devices, and of one more the fraction that is left.

        A fraction comes from the fullest device that has room, so that others stay whole. An
        amount larger than the pool gets all of it.
        """
        shares = self._find(amount) or {}
        for device, part in shares.items():
            self._free[device] -= part
        return shares

    def give_back(self, shares: Mapping[str, int]) -> None:
        """Return parts that were taken."""
        for device, part in shares.items():
            self._free[device] += part

    def _find(self, amount: int) -> Shares | None:
        if not amount:
            return {}
        whole, fraction = divmod(min(amount, len(self._free) * UNIT), UNIT)
        idle = [device for device, free in self._free.items() if free == UNIT]
        if len(idle) < whole:
            return None
        shares = dict.fromkeys(idle[:whole], UNIT)
        if fraction:
            open_devices = [
                device
                for device, free in self._free.items()
                if free >= fraction and device not in shares
            ]
            if not open_devices:
                return None
            shares[min(open_devices, key=self._free.__getitem__)] = fraction
        return shares


def resource_env(resources: Resources, gpus: Mapping[str, int]) -> dict[str, str]:
    """Return the variables for a task's process: CUDA_VISIBLE_DEVICES and TASKYARD_*."""
    if not resources:
        return {}
    amounts, env = dict(resources), {}
    if CPUS in amounts:
        env["TASKYARD_CPUS"] = format_amount(CPUS, amounts[CPUS])
    if MEMORY in amounts:
        env["TASKYARD_MEMORY"] = str(amounts[MEMORY])
    if GPUS in amounts:
        env["TASKYARD_GPUS"] = env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env
