"""A plan for a graph: from the cache on disk, or compiled, proven and kept there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from actorflow.compile.fits import check_fits, fits
from actorflow.compile.native import compiled, has_refusals
from actorflow.compile.plan_cache import PlanCache, is_ready
from actorflow.compile.targets import planned_for
from actorflow.logs import logger, once
from actorflow.settings import Settings
from compiler.gc_pause import collector_paused
from compiler.graph import Graph
from compiler.options import CompileOptions
from compiler.plan import Plan
from compiler.target import Hardware


@collector_paused()
def compiled_plan(
    key: str,
    graph: Graph,
    hardware: Hardware,
    options: CompileOptions,
    settings: Settings,
    evaluation: Graph | None,
) -> Plan:
    """Return the plan from the cache on disk, or compile it and keep it there."""
    cache = PlanCache(settings.cache, logger.warning)
    plan = cache.find(key) if settings.dump is None else None
    if plan is not None and is_ready(plan, logger.warning):
        logger.info("plan %r comes from %s", options.name, settings.cache)
        return plan
    # A quarter of the house, which a run from the cache never loads.
    from actorflow.compile.streams import asks_for_choice, with_streams_that_pay
    from actors.race import check_races
    from compiler.pipeline import compile_graph

    def made(wanted: CompileOptions, *, is_bounded: bool = False) -> Plan:
        dump = dumper(settings.dump)
        there = replace(hardware, memory_bytes=wanted.memory_budget, is_bounded=is_bounded)
        with planned_for(hardware.devices):
            return compiled(
                options.name, lambda: compile_graph(graph, there, wanted, dump, evaluation)
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
    if not has_refusals():  # a compiler that is mended is to be asked again
        cache.store(key, plan)
    return plan


def dumper(directory: Path | None) -> Callable[[str, Graph], None] | None:
    """Return what writes the graph after each pass into `NN-pass.txt` (ACTORFLOW_DUMP), or None.

    Where it cannot, the log says so once.
    """
    if directory is None:
        return None
    from compiler.printer import print_graph

    folder, numbers, warn = directory, count(), once(logger.warning)

    def dump(name: str, graph: Graph) -> None:
        path = folder / f"{next(numbers):02d}-{name}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = "\n".join(print_graph(graph)) + "\n"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files
        except OSError as error:
            warn(f"ACTORFLOW_DUMP: cannot write {path}: {error.strerror}")

    return dump
