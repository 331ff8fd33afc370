"""What every launch of a plan will take at the rates of a machine.

A launch's own work comes from its kernel, asked again with the operands of the plan. What the
caches hold depends on the launches before it: every granule of an arena remembers how many bytes
had been touched when it was touched last, and the difference is its reuse distance. The chain is
walked twice, because a step begins with the caches that the step before it left. The helpers of the
pool sleep where a chain begins, and wherever it goes on for long on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from actors.kernels import catalogue, cost
from actors.kernels.c_rates import Price
from actors.kernels.cost import Rates
from actors.kernels.kernel import Kernel, OneOfSeveral, Operand
from actors.kernels.work import CWork, Work
from compiler.plan import Actor, Launch, Plan, View

GRANULE_BYTES = 64 << 10


def recost(plan: Plan, rates: Rates) -> tuple[tuple[Price, ...], ...]:
    """Return the price of every launch, per actor in the order of its chain.

    A kernel that does not describe its work keeps the duration that the plan has. Pure; linear in
    launches and in the granules that they touch.
    """
    kernels = catalogue.binders()
    return tuple([_chain(plan, actor, rates, kernels) for actor in plan.actors])


def firing_prices(plan: Plan, rates: Rates) -> tuple[Price, ...]:
    """Return the price of a firing per actor; an actor without launches keeps the plan's."""
    return tuple(
        [
            Price(sum([x.duration_ns for x in own]), sum([x.busy_ns for x in own]))
            if own
            else Price(actor.duration_ns, actor.duration_ns)
            for actor, own in zip(plan.actors, recost(plan, rates), strict=True)
        ]
    )


def durations_ns(plan: Plan, rates: Rates) -> tuple[float, ...]:
    """Return the duration of a firing per actor; an actor without launches keeps the plan's."""
    return tuple([price.duration_ns for price in firing_prices(plan, rates)])


def _chain(
    plan: Plan, actor: Actor, rates: Rates, kernels: Mapping[str, Kernel]
) -> tuple[Price, ...]:
    works = [_work(plan, launch, kernels.get(launch.kernel)) for launch in actor.launches]
    caches = _Caches(plan)
    total: list[Price] = []
    for _ in range(2):
        total, idle_ns = [], math.inf
        for launch, work in zip(actor.launches, works, strict=True):
            in_c = None if work is None or work.in_c is None else work.in_c()
            miss_ns_at = _misses(in_c, rates)
            unswept = work.unswept if work is not None else ()
            missed_ns = 0.0
            for index, view in enumerate((*launch.inputs, *launch.outputs)):
                if index not in unswept:
                    missed_ns += caches.touch(plan.views[view], miss_ns_at)
            if in_c is not None and rates.in_c is not None:
                total.append(rates.in_c.price(in_c, missed_ns, idle_ns))
                if rates.in_c.is_shared(in_c):
                    idle_ns = 0.0
                    continue
            else:
                total.append(_price(launch, work, rates, missed_ns))
            idle_ns += total[-1].duration_ns
    return tuple(total)


def _misses(in_c: CWork | None, rates: Rates) -> Callable[[float], float]:
    """Return the time per byte at a reuse distance, for one launch."""
    if in_c is None or rates.in_c is None:
        return rates.miss_ns_at
    if not rates.in_c.is_shared(in_c):
        return rates.in_c.miss_ns_at
    return rates.in_c.shared_miss_ns_at


def _price(launch: Launch, work: Work | None, rates: Rates, missed_ns: float) -> Price:
    if work is None:
        return Price(launch.duration_ns, launch.duration_ns)
    duration = rates.work_ns(work) + missed_ns
    products = sum([rates.product_ns(item) for item in work.products])
    return Price(duration, duration + products * (rates.blas_threads - 1))


def _work(plan: Plan, launch: Launch, kernel: Kernel | None) -> Work | None:
    if kernel is None:
        return None
    inputs = tuple([_operand(plan.views[view]) for view in launch.inputs])
    outputs = tuple([_operand(plan.views[view]) for view in launch.outputs])
    ask = kernel.needs if isinstance(kernel, OneOfSeveral) else kernel.query
    needs = ask(dict(launch.attrs), inputs, outputs)
    return None if needs is None else needs.work


def _operand(view: View) -> Operand:
    return Operand(view.type, view.offset_bytes, view.strides_bytes)


class _Caches:
    """When each granule of the arenas was touched last, in bytes touched by the chain."""

    __slots__ = ("_last", "_now_bytes", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last: dict[tuple[int, int], float] = {}
        self._now_bytes = 0.0

    def touch(self, view: View, miss_ns_at: Callable[[float], float]) -> float:
        """Touch the bytes of a view; return the time that their way to the caches takes.

        What was never touched is as far away as can be: only the first walk meets it.
        """
        size_bytes = cost.footprint_bytes(_operand(view))
        if not size_bytes:
            return 0.0
        register = self._plan.registers[view.register]
        start = register.offsets_bytes[0] + view.offset_bytes
        granules = range(start // GRANULE_BYTES, (start + size_bytes - 1) // GRANULE_BYTES + 1)
        share = size_bytes / len(granules)
        missed_ns = 0.0
        for granule in granules:
            place = (register.arena, granule)
            distance = self._now_bytes - self._last.get(place, -cost.DISTANCES_BYTES[-1])
            missed_ns += share * miss_ns_at(distance)
            self._now_bytes += share
            self._last[place] = self._now_bytes
        return missed_ns
