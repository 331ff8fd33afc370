"""How many compute streams a plan has: as many as pay, and never more than were asked for.

A plan of each number is made, and its steps are run on virtual time, on a host whose cores all
streams share (`actors.simulation.costs`). More streams are taken only where a step takes clearly
less. The rates are fixed ones, never measured: two machines with as many cores make the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actorflow.environment.host import num_threads, usable_cores
from actorflow.environment.settings import logger
from actors.kernels.common.cost import REFERENCE, reference_of_threads
from actors.kernels.host.calibration import firing_prices
from actors.kernels.library import runtime
from actors.simulation.costs import RunCosts, on_host
from actors.simulation.simulate import simulate
from compiler.contract.placement import HOST
from compiler.contract.plan import Plan
from compiler.graph.target import CompileOptions, Hardware

GAIN = 1.1
"""So many times as fast must a step be for a stream more: what the rates are sure of."""

COSTS = RunCosts(25_000.0, 20_000.0, 30_000.0, 15_000.0, 0.2)
"""What a run costs beside its launches, on a machine with other work: streams that only pay on an
idle one would make steps longer on any other."""

_STEPS = 12


def asks_for_choice(hardware: Hardware, options: CompileOptions) -> bool:
    """Whether several streams were asked for on a host, whose cores they share."""
    return options.num_streams > 1 and hardware.devices == (HOST,)


def choose_num_streams(name: str, asked: int, make: Callable[[int], Plan]) -> Plan:
    """Return the fastest of the plans with 1 to `asked` streams, fewest first; a line tells which.

    `make` returns the plan with so many streams. The plan says what was asked for and used.
    """
    best, used = make(1), 1
    best_ns = alone_ns = step_ns(best)
    last_ns = best_ns
    for number in range(2, asked + 1):
        plan = make(number)
        last_ns = step_ns(plan)
        if last_ns * GAIN < best_ns:
            best, used, best_ns = plan, number, last_ns
    of = f"{used} of {asked} used"
    text = (
        f"{of}: a step takes {best_ns / alone_ns:.2f} times as long as with 1"
        if used > 1
        else f"{of}: with {asked}, a step would take {last_ns / alone_ns:.2f} times as long"
    )
    logger.info("plan %r: compute streams: %s (the planner's estimate)", name, text)
    return replace(best, options=(*best.options, ("streams", text)))


def step_ns(plan: Plan) -> float:
    """Return the time of a step at fixed rates, in nanoseconds."""
    threads = num_threads()
    rates = reference_of_threads(threads)
    capacity = rates.capacity_of(usable_cores())
    if not runtime.is_enabled():
        rates = replace(REFERENCE, blas_threads=float(threads))
    durations, host = on_host(plan, firing_prices(plan, rates), capacity, COSTS)
    return simulate(plan, _STEPS, durations, host=host).period_ns
