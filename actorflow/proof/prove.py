"""Prove a plan before it runs here: the one way through, for compiled plans and for those of files.

A plan is trusted in nothing. The compiler's proof (`compiler.verify`) and the order of accesses
(`actors.race`) are plan against itself; here the plan is held against this house besides: what its
ops and kernels say of every launch, the ports that a run binds, and the memory of the machine.

What does not fit is the plan's fault, whatever part finds it, and a bug of ours only where the plan
was compiled in this process: the message says to compile the job again.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actorflow.proof.anatomy import check_anatomy
from actorflow.proof.launches import check_launches
from actors.load import num_phases
from actors.race import RaceError, check_races
from compiler.accounting import largest_tensor
from compiler.errors import InternalError, OutOfMemory, PlanFormatError
from compiler.placement import DeviceKind, Memory
from compiler.plan import PORTED, Actor, Arena, Plan
from compiler.references import check_references
from compiler.sub_plan import sub_plans
from compiler.verify import verify_plan
from memory.report import format_bytes

MAX_BINDINGS = 20_000_000
"""Launches times phases: what a plan may ask to be bound. A real one has 10^5."""

MAX_FIRINGS = 1 << 24
"""Firings of one period, all actors together; a real one has 10^6."""

_newest: weakref.ref[Plan] | None = None
"""The plan that was proven last: the cache of plans and the runner both ask for the same one."""


def prove(plan: Plan) -> None:
    """Check that a plan can run on this machine, right and without touching a byte that is not its.

    Native kernels are turned on or off before, as the run will have them.

    Raises:
        CompileError: The plan deadlocks or its rates do not balance.
        PlanFormatError: It contradicts itself, or what the ops and kernels of this house say.
        OutOfMemory: Its arenas are larger than the machine's memory.
    """
    global _newest
    if _newest is not None and _newest() is plan:
        return
    what = f"plan {plan.name!r}"
    _check_memory(plan)
    firings = prove_consistent(plan, what)
    with _refusing(what):
        for inner in sub_plans(plan):
            check_launches(inner.plan)
        check_launches(plan)
        check_anatomy(plan, firings)
    _newest = weakref.ref(plan)


def prove_consistent(plan: Plan, what: str) -> tuple[int, ...]:
    """Check a plan against itself alone, as whoever only shows or simulates it needs it.

    Return the firings of each actor in one period. Raises PlanFormatError, which begins with
    `what`, and CompileError for a deadlock.
    """
    with _refusing(what):
        check_references(plan)
        bindings = sum([_num_bindings(plan, actor) for actor in plan.actors])
        if bindings > MAX_BINDINGS:
            raise PlanFormatError(
                f"its launches on all slots are {bindings:,} bindings, {MAX_BINDINGS:,} at most"
            )
        firings = verify_plan(plan)
        if sum(firings) > MAX_FIRINGS:
            raise PlanFormatError(f"a period has {sum(firings):,} firings, {MAX_FIRINGS:,} at most")
        check_races(plan)
    return firings


def _num_bindings(plan: Plan, actor: Actor) -> int:
    is_port = actor.kind in PORTED
    return num_phases(plan, actor) * (1 if is_port else len(actor.launches))


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn what a proof says of a plan into PlanFormatError: it is no bug of ours."""
    try:
        yield
    except RaceError as error:
        raise PlanFormatError(f"{what} is not a plan that can run: {error}") from error
    except (PlanFormatError, InternalError) as error:
        reason = str(error).partition(" (this is a bug")[0]
        raise PlanFormatError(
            f"{what} is not a plan that can run: {reason}. Was it changed by hand? Compile the job"
            " again"
        ) from error


def _check_memory(plan: Plan) -> None:
    """Raise OutOfMemory for more than the machine has, before anything is worked out for it.

    What a GPU has is known to whoever opens it.
    """
    own = [arena for arena in plan.arenas if not _is_of_gpu(arena)]
    needed, there = sum([arena.size_bytes for arena in own]), _memory_bytes()
    if there is not None and needed > there:
        raise OutOfMemory(
            f"plan {plan.name!r} needs {format_bytes(needed)}, and this machine has"
            f" {format_bytes(there)} of memory{largest_tensor(plan)}; compile the job with a"
            " smaller batch or a memory_budget"
        )


def _is_of_gpu(arena: Arena) -> bool:
    return arena.device.kind is DeviceKind.CUDA and arena.memory is Memory.DEVICE


def _memory_bytes() -> int | None:
    """Return the machine's memory, with what it may swap to; None where it does not tell."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        kilobytes = dict(re.findall(r"^(MemTotal|SwapTotal): +(\d+) kB$", text, re.MULTILINE))
        return 1024 * (int(kilobytes["MemTotal"]) + int(kilobytes.get("SwapTotal", 0)))
    except (OSError, ValueError, LookupError):
        return None
