"""A plan for a graph: from the cache on disk, or compiled, proven and kept there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from actorflow.compile.fits import check_fits, fits
from actorflow.compile.native import choosing, compiled, has_refusals
from actorflow.compile.plan_cache import PlanCache, cache_key, is_ready
from actorflow.compile.targets import planned_for
from actorflow.logs import logger, once
from actorflow.settings import Settings
from compiler.gc_pause import collector_paused
from compiler.graph import Graph
from compiler.options import CompileOptions
from compiler.plan import Plan
from compiler.target import Hardware

if TYPE_CHECKING:
    from actorflow.compile.job_options import JobOptions
    from compiler.pipeline import LocalGraphs

Watch = Callable[[str, Graph], None]


@dataclass(frozen=True)
class Compilation:
    """What a plan is compiled of and for.

    `is_alone` says that a rank of several compiles it without the others, by its own measurements.
    """

    graph: Graph
    hardware: Hardware
    options: CompileOptions
    settings: Settings
    evaluation: Graph | None = None
    deterministic: bool = False
    job: JobOptions | None = None
    """What the user has said of the job, for messages; it changes nothing of the plan."""
    is_alone: bool = False

    def alone(self) -> Compilation:
        """Return it as it is where no other rank is asked."""
        return replace(self, is_alone=self.hardware.ranks.count > 1)

    def choosing(self) -> AbstractContextManager[bool]:
        """Hold the choice of kernels that it is compiled with."""
        return choosing(self.settings, self.hardware.devices, deterministic=self.deterministic)

    @cached_property
    def key(self) -> str:
        """What its plan is kept under; asked for while the choice of kernels is held."""
        key = cache_key(self.graph, self.options, self.hardware, self.evaluation)
        return f"{key}-alone" if self.is_alone else key

    @cached_property
    def cache(self) -> PlanCache:
        """Where plans are kept."""
        return PlanCache(self.settings.cache, logger.warning)

    @cached_property
    def dump(self) -> Watch | None:
        """What is told the graph after each pass."""
        return dumper(self.settings.dump, self.hardware.ranks.rank)


@collector_paused()
def kept_plan(asked: Compilation) -> Plan | None:
    """Return the plan from the cache on disk, if it is there and can run."""
    plan = asked.cache.find(asked.key) if asked.settings.dump is None else None
    if plan is None or not is_ready(plan, logger.warning):
        return None
    logger.info("plan %r comes from %s", asked.options.name, asked.settings.cache)
    return plan


def keep_plan(asked: Compilation, plan: Plan) -> None:
    """Keep a plan on disk."""
    if not has_refusals():  # a compiler that is mended is to be asked again
        asked.cache.store(asked.key, plan)


@collector_paused()
def compiled_plan(asked: Compilation, local: LocalGraphs | None = None) -> Plan:
    """Compile a plan, prove it and keep it on disk; `local` as `compile_graph` has it."""
    # A quarter of the house, which a run from the cache never loads.
    from actorflow.compile.streams import asks_for_choice, with_streams_that_pay
    from actors.race import check_races
    from compiler.pipeline import compile_graph

    graph, hardware, options = asked.graph, asked.hardware, asked.options

    def made(wanted: CompileOptions, *, is_bounded: bool = False) -> Plan:
        there = replace(hardware, memory_bytes=wanted.memory_budget, is_bounded=is_bounded)
        with planned_for(hardware.devices):
            return compiled(
                options.name,
                lambda: compile_graph(graph, there, wanted, asked.dump, asked.evaluation, local),
            )

    def made_with(num_streams: int) -> Plan:
        return made(replace(options, num_streams=num_streams))

    before = time.perf_counter()
    if asks_for_choice(hardware, options):
        plan = with_streams_that_pay(options.name, options.num_streams, made_with)
    else:
        plan = made(options)
    if len(hardware.devices) > 1 and not fits(plan, hardware):
        # What places by cost counts bytes from above: only where a plan is too large is it told to.
        plan = made(options, is_bounded=True)
    check_races(plan)
    check_fits(plan, hardware, lambda budget: made(replace(options, memory_budget=budget)))
    seconds = time.perf_counter() - before
    logger.info("plan %r compiled in %.3f s: %d nodes", options.name, seconds, len(graph.nodes))
    keep_plan(asked, plan)
    return plan


def dumper(directory: Path | None, rank: int = 0) -> Watch | None:
    """Return what writes the graph after each pass into `NN-pass.txt` (ACTORFLOW_DUMP), or None.

    Of ranks above 0 that is `NN-pass.rank1.txt`. Where it cannot, the log says so once.
    """
    if directory is None:
        return None
    from compiler.printer import print_graph

    folder, numbers, warn = directory, count(), once(logger.warning)
    of_rank = f".rank{rank}" if rank else ""

    def dump(name: str, graph: Graph) -> None:
        path = folder / f"{next(numbers):02d}-{name}{of_rank}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = "\n".join(print_graph(graph)) + "\n"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files
        except OSError as error:
            warn(f"ACTORFLOW_DUMP: cannot write {path}: {error.strerror}")

    return dump
