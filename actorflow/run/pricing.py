"""What this machine takes for the firings of a plan: it is measured once, and kept.

A calibration has a few hundred numbers and knows no job. It is kept in the cache folder by
processor, cores, threads and libraries; nothing that a plan is made from depends on it.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, replace

from actorflow.compile.host import processor, usable_cores
from actorflow.compile.native import ready_native
from actorflow.logs import logger
from actorflow.run.measured_costs import cached_costs, measure_costs
from actorflow.settings import Settings
from actors.contention import SharedHost
from actors.kernels.cost import Rates
from actors.kernels.floating_point import quiet_floating_point
from actors.kernels.library import openblas
from actors.kernels.library.c_calibration import stopwatch_c
from actors.kernels.library.calibration import cached_rates, calibrate, stopwatch
from actors.kernels.library.recost import firing_prices
from actors.kernels.native import runtime
from actors.run_costs import RunCosts, on_host
from compiler.plan import Plan


@dataclass(frozen=True, slots=True)
class Calibration:
    """What launches take on this machine, and what a run costs beside them."""

    rates: Rates
    costs: RunCosts

    @property
    def capacity(self) -> float:
        """What all cores do in the time of one alone."""
        in_c, cores = self.rates.in_c, usable_cores()
        return float(cores) if in_c is None else in_c.capacity_of(cores)


def calibration(settings: Settings, *, is_fresh: bool = False) -> Calibration:
    """Return what was measured of this machine; measure it when nothing is kept, or anew.

    It takes ten seconds, which a line of the log says. A file that is damaged is measured anew,
    with a line too.
    """
    quiet_floating_point()
    ready_native(settings)
    # What is measured must be what runs have, and its name may not depend on what ran before.
    openblas.use_threads(1 if runtime.is_on() else settings.threads)
    begun = time.perf_counter()
    measure = stopwatch(time.perf_counter_ns)
    measure_c = stopwatch_c(time.perf_counter_ns) if runtime.is_on() else None
    if settings.cache is None:
        return Calibration(calibrate(measure, measure_c), measure_costs(settings))
    machine = f"{processor()} {os.cpu_count()} {openblas.loaded_blas()} {runtime.fingerprint()}"
    folder = settings.cache / "rates"
    known = set(folder.glob("*.json")) if folder.is_dir() else set()
    rates = cached_rates(folder, machine, measure, measure_c=measure_c, is_fresh=is_fresh)
    name = hashlib.blake2b(machine.encode(), digest_size=8).hexdigest()
    costs = cached_costs(folder, name, settings, is_fresh=is_fresh)
    if is_fresh or not folder.is_dir() or set(folder.glob("*.json")) != known:
        seconds = time.perf_counter() - begun
        logger.info("this machine was measured in %.1f s; kept in %s", seconds, folder)
    return Calibration(rates, costs)


def priced(plan: Plan, found: Calibration) -> tuple[tuple[float, ...], SharedHost]:
    """Return the durations of a plan's firings here, by actor, and who shares the cores."""
    rates = found.rates
    if rates.in_c is None:
        rates = replace(rates, blas_threads=found.capacity)
    return on_host(plan, firing_prices(plan, rates), found.capacity, found.costs)
