"""Whether a plan fits the memory of its devices, where that is known before there are any."""

from __future__ import annotations

from collections.abc import Callable

from compiler.errors import BudgetError, OutOfMemory
from compiler.plan import Plan
from compiler.target import Hardware
from memory.report import exact_bytes


def check_fits(plan: Plan, hardware: Hardware, make: Callable[[int], object]) -> None:
    """Raise OutOfMemory for a plan that takes more of a device than the device has.

    `make` compiles the job again within a budget in bytes; it is asked for the smallest budget that
    does, which the error names.
    """
    for device, target in zip(hardware.devices, hardware.targets, strict=True):
        needed = sum([a.size_bytes for a in plan.arenas if a.place == device.place])
        there = target.memory_bytes
        if needed <= there or not there:
            continue
        where = f"{device} ({plan.option('gpu')!s})"
        raise OutOfMemory(
            f"job {plan.name!r} needs {exact_bytes(needed)} on {where}, which has"
            f" {exact_bytes(there)}; {_mend(make, there)}"
        )


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
