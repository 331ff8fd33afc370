"""A plan for a graph: from the cache on disk, or compiled, proven and kept there.

`JobSpec` holds all that decides a plan: `cache_key` is a hash of it. A plan for a GPU is
refused where the GPU is known to have too little memory.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import compiler.pipeline.standard_ops  # noqa: F401  # fills the columns whose files a key covers
from actorflow.compile.own_ops import gradient_alone
from actorflow.compile.prove import prove
from actorflow.compile.targets import planned_for
from actorflow.environment.host import num_threads, usable_cores
from actorflow.environment.native import build, choices, compiled, has_refusals, kernel_choice_lock
from actorflow.environment.settings import Settings, collector_paused, logger, once
from actorflow.tensor.probes import Predicates
from actors.kernels.common.files import (
    DamagedFile,
    distrust_of_folder,
    mark_used,
    prune_in_turn,
    read_checksummed,
    write_checksummed,
)
from actors.kernels.host import catalogue
from compiler.contract.errors import ActorflowError, BudgetError, OutOfMemory, PlanFormatError
from compiler.contract.files import replace_regular
from compiler.contract.placement import Device
from compiler.contract.plan import PLAN_FORMAT, Plan
from compiler.graph.graph import Graph, gradient
from compiler.graph.registry import foreign_files
from compiler.graph.target import CompileOptions, Hardware
from compiler.ops.language.definition import definition
from compiler.ops.language.vjp import plugin_programs
from compiler.ops.primitives.body import hash_graph
from compiler.pipeline import rewrites
from memory.report import exact_bytes

if TYPE_CHECKING:
    from actorflow.options.job_options import JobOptions
    from compiler.pipeline.pipeline import LocalGraphs


def fits(plan: Plan, hardware: Hardware) -> bool:
    """Whether a plan takes no more of any device than is known to be there."""
    return not _overfull(plan, hardware)


def check_fits(plan: Plan, hardware: Hardware, make: Callable[[int], object]) -> None:
    """Raise OutOfMemory for a plan that takes more of a device than the device has.

    `make` compiles the job again within a budget in bytes; it is asked for the smallest budget that
    does, which the error names.
    """
    for device, needed, available in _overfull(plan, hardware):
        where = f"{device} ({plan.option('gpu')!s})"
        among = ", ".join(map(str, hardware.devices))
        spread = (
            f", spread over {among} by the best placement found"
            if len(hardware.devices) > 1
            else ""
        )
        raise OutOfMemory(
            f"job {plan.name!r} needs {exact_bytes(needed)} on {where}, which has"
            f" {exact_bytes(available)}{spread}; {_mend(make, available)}"
        )


def _overfull(plan: Plan, hardware: Hardware) -> list[tuple[Device, int, int]]:
    """Return the devices that a plan is too large for, with what it needs and what is there."""
    overfull: list[tuple[Device, int, int]] = []
    for device, target in zip(hardware.devices, hardware.targets, strict=True):
        # Several arenas may lie in one place. 0 bytes: the host's memory is asked at load.
        needed_bytes = sum([a.size_bytes for a in plan.arenas if a.place == device.place])
        if needed_bytes > target.memory_bytes > 0:
            overfull.append((device, needed_bytes, target.memory_bytes))
    return overfull


def _mend(make: Callable[[int], object], there: int) -> str:
    smallest = 0
    try:
        # No plan fits in a byte: the error names the smallest budget that does.
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


# The plan cache on disk. One file per key, under a seal of its name and content
# (`actors.kernels.common.files`), so that a reader never sees half a plan, nor that of another key.
# The key covers the traced graph with its user lines, the compile options, the kernels' fingerprint
# and what native ones are chosen by, the sources of the compiler itself, the files from elsewhere
# that added a column of an op, a kernel or a pass, and what programs and gradients from elsewhere
# emit. What a pass or a kernel imports in its turn is not covered.

_HOUSE = Path(__file__).resolve().parents[2]

_PLANNING = tuple(_HOUSE / wing for wing in ("compiler", "memory", "actors/kernels"))
"""Where the sources lie that decide what a plan looks like."""

_ASSUMING = tuple(
    [
        _HOUSE / name
        for name in (
            "actorflow/compile/cuda_target.py",
            "actorflow/compile/num_streams.py",
            "actorflow/compile/targets.py",
            "actors/simulation/costs.py",
            "actors/simulation/simulate.py",
        )
    ]
)
"""Sources of the assumed costs of devices, and of streams that share one."""

_OURS = tuple(f"{folder}{os.sep}" for folder in _PLANNING)

_STARTED_NS = time.time_ns()
"""When this module was imported, which only that moment can tell: a file that is written later may
not be the one that was loaded."""

_THIS_PROCESS = uuid.uuid4().hex
"""A stamp that no other process has."""


def cache_key(
    graph: Graph,
    options: CompileOptions,
    hardware: Hardware,
    evaluation: Graph | None = None,
) -> str:
    """Return the key of a compilation: 32 hexadecimal digits."""
    parts = (
        hash_graph(graph, with_sources=True),
        "" if evaluation is None else hash_graph(evaluation, with_sources=True),
        options.name,
        repr(options.recorded()),
        repr(hardware.ranks),
        hardware.fingerprint,
        choices(hardware.devices),
        # How many streams pay depends on threads and cores; one stream is the same everywhere.
        f"{num_threads()} of {usable_cores()}" if options.num_streams > 1 else "",
        str(PLAN_FORMAT),
        _compiler_stamp(),
        rewrites.identity(),
        catalogue.identity(),
        *_foreign_stamps(),
        *plugin_programs(graph),
        *_foreign_gradients(graph),
        *(() if evaluation is None else plugin_programs(evaluation)),
    )
    # 16 bytes: a collision of 128 bits is not to be met, and the name of the file stays short.
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class PlanCache:
    """A directory of plans. A directory of None keeps nothing.

    Nor does one that others may write: a plan of theirs would be proven, but train to what they
    like. Plans take at most `most_bytes`; those used longest ago make room for a new one.
    """

    def __init__(
        self, directory: Path | None, report: Callable[[str], None], most_bytes: int = 1 << 30
    ) -> None:
        # Asked once: who may write into the folder is not expected to change during a process.
        why = None if directory is None else distrust_of_folder(directory)
        if why is not None:
            report(f"plan cache: {why}; the cache is not used")
        self._directory = directory if why is None else None
        self._report = report
        self._most_bytes = most_bytes

    def find(self, key: str) -> Plan | None:
        """Return the plan stored under `key`, or None.

        A file that is damaged, or holds the plan of another key, is reported.
        """
        if self._directory is None:
            return None
        path = self._directory / f"{key}.plan"
        try:
            plan = Plan.from_bytes(read_checksummed(path), str(path))
            mark_used(path)
            return plan
        # The ordinary miss, so nothing is said of it; any other OSError is.
        except FileNotFoundError:
            return None
        except DamagedFile as error:
            text = f"{path} is damaged, or holds the plan of another key: {error}"
            self._report(f"plan cache: {text}; compiling again")
            return None
        except (PlanFormatError, OSError) as error:
            self._report(f"plan cache: {error}; compiling again")
            return None

    def store(self, key: str, plan: Plan) -> None:
        """Keep a plan. A directory that cannot be written is reported, never an error."""
        if self._directory is None:
            return
        try:
            write_checksummed(self._directory / f"{key}.plan", plan.to_bytes())
        except OSError as error:
            self._report(f"plan cache: cannot keep the plan in {self._directory}: {error}")
            return
        # After the write, and with the new file's name, so that it is not what goes.
        prune_in_turn(self._directory / f"{key}.plan", self._most_bytes)


def is_ready(plan: Plan, report: Callable[[str], None]) -> bool:
    """Prove a plan of the cache and build its kernels; say why it is of no use.

    A plan of several ranks is not run here: it is there to be shown and simulated.
    """
    if plan.option("mesh", ()) != ():
        return True
    try:
        prove(plan)
    except ActorflowError as error:
        report(f"plan cache: {error}")
        return False
    return build(plan)


def _foreign_gradients(graph: Graph) -> list[str]:
    """Return hashes of what gradients from elsewhere emit that are no programs.

    They are functions over tensors, of any file, and read what they like.
    """
    hashes: list[str] = []
    # Without updates nothing is differentiated, so no gradient is part of the plan.
    for node in graph.nodes if graph.updates else ():
        if not gradient.has(node.op) or gradient.where(node.op).startswith(_OURS):
            continue
        if definition.has(node.op):
            continue
        backward, results = gradient_alone(node, [graph.types[v] for v in node.inputs])
        hashes += [f"{hash_graph(backward)} {results}", *plugin_programs(backward)]
    return hashes


# Once a process: sources that are edited later are not those that were imported.
@functools.cache
def _compiler_stamp() -> str:
    """Return sizes and modification times of the sources that decide what a plan looks like."""
    rows = []
    sources = [p for wing in _PLANNING for kind in ("py", "json") for p in wing.rglob(f"*.{kind}")]
    for path in [*_ASSUMING, *sorted(sources)]:
        facts = path.stat()
        rows.append(f"{path.relative_to(_HOUSE)} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=8).hexdigest()


def _foreign_stamps() -> list[str]:
    """Return name and content hash of each file that added an op's column, a kernel or a pass."""
    files = {
        *foreign_files(_PLANNING),
        *catalogue.registered_files(),
        *rewrites.registered_files(),
    }
    return [f"{file} {_content_stamp(Path(file))}" for file in sorted(files)]


def _content_stamp(path: Path) -> str:
    """Return a hash of what was loaded from `path`.

    Where that cannot be told, because it was typed at a prompt or the file was written after it may
    have been loaded, the stamp is this process's own and no other process shares the plan.
    """
    try:
        if path.stat().st_mtime_ns >= _STARTED_NS:
            return _THIS_PROCESS
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return _THIS_PROCESS


Watch = Callable[[str, Graph], None]


@dataclass(frozen=True)
class JobSpec:
    """What a compilation is asked: all that decides a plan, and so what ranks agree on.

    `job` is what the user said of the job, `options` what the compiler is told of that and of the
    call. `traced` is the graph before weights of outputs were added. `predicates` are what checks
    of both graphs call; they decide nothing. `is_alone` says that a rank of several compiles it
    without the others, by its own measurements.
    """

    graph: Graph
    hardware: Hardware
    options: CompileOptions
    settings: Settings
    job: JobOptions
    traced: Graph
    evaluation: Graph | None = None
    predicates: Predicates = field(default_factory=dict)
    is_alone: bool = False

    def alone(self) -> JobSpec:
        """Return it as it is where no other rank is asked."""
        return replace(self, is_alone=self.hardware.ranks.count > 1)

    def choosing(self) -> AbstractContextManager[bool]:
        """Hold the choice of kernels that it is compiled with."""
        return kernel_choice_lock(
            self.settings, self.hardware.devices, deterministic=self.job.deterministic
        )

    @cached_property
    def key(self) -> str:
        """What its plan is kept under; asked for while the choice of kernels is held."""
        key = cache_key(self.graph, self.options, self.hardware, self.evaluation)
        # A plan by own measurements must not be found by ranks that agree on theirs.
        return f"{key}-alone" if self.is_alone else key

    @cached_property
    def cache(self) -> PlanCache:
        """Where plans are kept."""
        return PlanCache(self.settings.cache, logger.warning, self.settings.cache_bytes)

    @cached_property
    def dump(self) -> Watch | None:
        """The callback that receives the graph after each pass; None without ACTORFLOW_DUMP."""
        return dumper(self.settings.dump, self.hardware.ranks.rank)


@collector_paused()
def cached_plan(job_spec: JobSpec) -> Plan | None:
    """Return the plan from the cache on disk, if it is there and can run."""
    # A dump wants the graph after each pass, which only a compilation has.
    plan = job_spec.cache.find(job_spec.key) if job_spec.settings.dump is None else None
    if plan is None or not is_ready(plan, logger.warning):
        return None
    logger.info("plan %r comes from %s", job_spec.options.name, job_spec.settings.cache)
    return plan


def cache_plan(job_spec: JobSpec, plan: Plan) -> None:
    """Keep a plan on disk."""
    if not has_refusals():  # a compiler that is mended is to be asked again
        job_spec.cache.store(job_spec.key, plan)


@collector_paused()
def compiled_plan(job_spec: JobSpec, local: LocalGraphs | None = None) -> Plan:
    """Compile a plan, prove it and keep it on disk; `local` as `compile_graph` has it."""
    # Late: a quarter of all our code, which a run from the cache never loads.
    from actorflow.compile.num_streams import asks_for_choice, choose_num_streams
    from actors.race.race import check_races
    from compiler.pipeline.pipeline import compile_graph

    graph, hardware, options = job_spec.graph, job_spec.hardware, job_spec.options

    def made(wanted: CompileOptions, *, is_bounded: bool = False) -> Plan:
        there = replace(hardware, memory_bytes=wanted.memory_budget, is_bounded=is_bounded)
        with planned_for(hardware.devices):
            return compiled(
                options.name,
                lambda: compile_graph(
                    graph, there, wanted, job_spec.dump, job_spec.evaluation, local
                ),
                # Nor is it proven for this machine, or built, when it comes from the cache
                # (`is_ready`).
                is_run=not job_spec.is_alone,
            )

    def made_with(num_streams: int) -> Plan:
        return made(replace(options, num_streams=num_streams))

    before = time.perf_counter()
    if asks_for_choice(hardware, options):
        plan = choose_num_streams(options.name, options.num_streams, made_with)
    else:
        plan = made(options)
    if len(hardware.devices) > 1 and not fits(plan, hardware):
        # What places by cost counts bytes from above: only where a plan is too large is it told to.
        plan = made(options, is_bounded=True)
    check_races(plan)
    check_fits(plan, hardware, lambda budget: made(replace(options, memory_budget=budget)))
    seconds = time.perf_counter() - before
    logger.info("plan %r compiled in %.3f s: %d nodes", options.name, seconds, len(graph.nodes))
    # Kept only now that races and sizes are checked.
    cache_plan(job_spec, plan)
    return plan


def dumper(directory: Path | None, rank: int = 0) -> Watch | None:
    """Return what writes the graph after each pass into `NN-pass.txt` (ACTORFLOW_DUMP), or None.

    Of ranks above 0 that is `NN-pass.rank1.txt`. Where it cannot, the log says so once.
    """
    if directory is None:
        return None
    from compiler.pipeline.printer import print_graph

    folder, numbers, warn = directory, count(), once(logger.warning)
    of_rank = f".rank{rank}" if rank else ""

    def dump(name: str, graph: Graph) -> None:
        path = folder / f"{next(numbers):02d}-{name}{of_rank}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = "\n".join(print_graph(graph)) + "\n"
            replace_regular(path, text.encode(errors="backslashreplace"))  # names of files
        except OSError as error:
            warn(f"ACTORFLOW_DUMP: cannot write {path}: {error.strerror}")

    return dump
