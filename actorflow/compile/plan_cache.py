"""The plan cache on disk: a compiled plan is loaded again while its key is the same.

One file per key, under a seal of its name and content (`actors.kernels.native.sealed`), so that a
reader never sees half a plan, nor that of another key. The key covers the traced graph with its
user lines, the compile options, the kernels' fingerprint and what native ones are chosen by, the
sources of the compiler itself, the files from elsewhere that added a column of an op, a kernel or a
pass, and what programs and gradients from elsewhere emit, so that neither a changed compiler nor a
changed gradient serves an old plan. What a pass or a kernel imports in its turn is not covered. A
damaged file is reported and compiled anew.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import compiler.ops.standard  # noqa: F401  # fills the columns whose files a key covers
from actorflow.compile.host import usable_cores
from actorflow.compile.native import build, choices
from actorflow.compile.threads import num_threads
from actorflow.own_ops import gradient_alone
from actorflow.proof.prove import prove
from actors.kernels import catalogue
from actors.kernels.native.sealed import DamagedFile, read_sealed, replace_sealed
from actors.kernels.native.trust import distrust_of_folder
from compiler import added_passes
from compiler.errors import ActorflowError, PlanFormatError
from compiler.fusion.define import definition
from compiler.fusion.products import foreign_programs
from compiler.graph import Graph
from compiler.graph_hash import hash_graph
from compiler.options import CompileOptions
from compiler.plan import PLAN_FORMAT, Plan
from compiler.registry import foreign_files
from compiler.rules import gradient
from compiler.target import Hardware

_HOUSE = Path(__file__).resolve().parents[2]

_PLANNING = tuple(_HOUSE / wing for wing in ("compiler", "memory", "actors/kernels"))
"""Where the sources lie that decide what a plan looks like."""

_ASSUMING = tuple(
    [
        _HOUSE / name
        for name in (
            "actorflow/compile/cuda_target.py",
            "actorflow/compile/streams.py",
            "actorflow/compile/targets.py",
            "actors/contention.py",
            "actors/run_costs.py",
            "actors/simulate.py",
        )
    ]
)
"""What is assumed of devices, and of streams that share one."""

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
        f"{num_threads()} of {usable_cores()}" if options.num_streams > 1 else "",
        str(PLAN_FORMAT),
        _compiler_stamp(),
        added_passes.identity(),
        catalogue.identity(),
        *_foreign_stamps(),
        *foreign_programs(graph),
        *_foreign_gradients(graph),
        *(() if evaluation is None else foreign_programs(evaluation)),
    )
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class PlanCache:
    """A directory of plans. A directory of None keeps nothing.

    Nor does one that others may write: a plan of theirs would be proven, but train to what they
    like.
    """

    def __init__(self, directory: Path | None, report: Callable[[str], None]) -> None:
        why = None if directory is None else distrust_of_folder(directory)
        if why is not None:
            report(f"plan cache: {why}; no plan is kept there, or taken from there")
        self._directory = directory if why is None else None
        self._report = report

    def find(self, key: str) -> Plan | None:
        """Return the plan stored under `key`, or None.

        A file that is damaged, or holds the plan of another key, is reported.
        """
        if self._directory is None:
            return None
        path = self._directory / f"{key}.plan"
        try:
            return Plan.from_bytes(read_sealed(path), str(path))
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
            replace_sealed(self._directory / f"{key}.plan", plan.to_bytes())
        except OSError as error:
            self._report(f"plan cache: cannot keep the plan in {self._directory}: {error}")


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
    found: list[str] = []
    for node in graph.nodes if graph.updates else ():
        if not gradient.has(node.op) or gradient.where(node.op).startswith(_OURS):
            continue
        if definition.has(node.op):
            continue
        emitted, made = gradient_alone(node, [graph.types[v] for v in node.inputs])
        found += [f"{hash_graph(emitted)} {made}", *foreign_programs(emitted)]
    return found


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
        *added_passes.registered_files(),
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
