"""Whether a plan fits the memory of its devices, where that is known before there are any."""

from __future__ import annotations

from collections.abc import Callable

from compiler.errors import BudgetError, OutOfMemory
from compiler.placement import Device
from compiler.plan import Plan
from compiler.target import Hardware
from memory.report import exact_bytes


def fits(plan: Plan, hardware: Hardware) -> bool:
    """Whether a plan takes no more of any device than is known to be there."""
    return not _overfull(plan, hardware)


def check_fits(plan: Plan, hardware: Hardware, make: Callable[[int], object]) -> None:
    """Raise OutOfMemory for a plan that takes more of a device than the device has.

    `make` compiles the job again within a budget in bytes; it is asked for the smallest budget that
    does, which the error names.
    """
    for device, needed, there in _overfull(plan, hardware):
        where = f"{device} ({plan.option('gpu')!s})"
        among = ", ".join(map(str, hardware.devices))
        spread = f", spread over {among} as well as was found" if len(hardware.devices) > 1 else ""
        raise OutOfMemory(
            f"job {plan.name!r} needs {exact_bytes(needed)} on {where}, which has"
            f" {exact_bytes(there)}{spread}; {_mend(make, there)}"
        )


def _overfull(plan: Plan, hardware: Hardware) -> list[tuple[Device, int, int]]:
    """Return the devices that a plan is too large for, with what it needs and what is there."""
    found: list[tuple[Device, int, int]] = []
    for device, target in zip(hardware.devices, hardware.targets, strict=True):
        needed = sum([a.size_bytes for a in plan.arenas if a.place == device.place])
        if needed > target.memory_bytes > 0:
            found.append((device, needed, target.memory_bytes))
    return found


def _mend(make: Callable[[int], object], there: int) -> str:
    smallest = 0
    try:
        make(1)
    except BudgetError as error:
        smallest = error.smallest_bytes
    if smallest > there:
        return (
            f"the smallest budget found feasible is {exact_bytes(smallest)}: lower the batch size,"
            " or make the model smaller"
        )
    return (
        f"give it a memory_budget, of which {exact_bytes(smallest)} is the smallest found feasible"
        f" and {exact_bytes(there)} the fastest, or lower the batch size"
    )
