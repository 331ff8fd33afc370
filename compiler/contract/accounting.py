"""The account of an arena's bytes by purpose, recomputed from the registers of a plan.

Two questions with two answers. *Which bytes are there for what* goes by address: every byte of the
arena belongs to the shares whose registers ever use it, and to the first of them in
`MemoryCategory`, so the parts add up to the arena exactly. *What makes the arena so large* goes by
time: the launch with the most live bytes, and what the kernels' workspaces hold of them.

A share by address and not by time, because bytes between chains are used again by temporaries of
other chains: their sizes may add up to more than the arena, their addresses cannot.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    PORTED,
    Actor,
    ActorKind,
    DeviceMemory,
    Launch,
    Register,
    RegisterKind,
)
from compiler.contract.types import RegisterId
from memory.liveness import align_up, lower_bound
from memory.report import format_bytes


class MemoryCategory(Enum):
    """What the bytes of a register are there for; earlier ones claim shared addresses."""

    PARAMETER = "parameters"
    OPTIMIZER = "optimizer"
    SCRATCH = "gradient sums"
    OTHER_VARIABLE = "other variables"
    CONSTANT = "constants"
    STAGING = "staging"
    SLOT = "slots"
    CROSSING = "between chains"
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces"


_OF_ROLE = {
    "parameter": MemoryCategory.PARAMETER,
    "optimizer": MemoryCategory.OPTIMIZER,
    "scratch": MemoryCategory.SCRATCH,
}


def memory_categories(plan: Plan) -> tuple[MemoryCategory, ...]:
    """Return the share of every register, by its id. O(registers + launches).

    A register of kind DATA is a snapshot's staging if a snapshot fills it, a slot of a
    host port if a source makes it or a sink reads it, and else a value between chains.
    """
    roles = {plan.views[v.view].register: v.role for v in plan.variables}
    launches = [launch for actor in plan.actors for launch in actor.launches]
    workspaces = {plan.views[x.workspace].register for x in launches if x.workspace is not None}
    staged = {port.register for actor in _snapshots(plan) for port in actor.outputs}
    ported = _registers_of(plan.actors, *PORTED)
    kinds: list[MemoryCategory] = []
    for register in plan.registers:
        if register.kind is RegisterKind.VARIABLE:
            kinds.append(_OF_ROLE.get(roles.get(register.id, ""), MemoryCategory.OTHER_VARIABLE))
        elif register.kind is RegisterKind.CONSTANT:
            kinds.append(MemoryCategory.CONSTANT)
        elif register.kind is RegisterKind.TEMPORARY:
            kinds.append(
                MemoryCategory.WORKSPACE if register.id in workspaces else MemoryCategory.TEMPORARY
            )
        elif register.id in staged:
            kinds.append(MemoryCategory.STAGING)
        else:
            kinds.append(MemoryCategory.SLOT if register.id in ported else MemoryCategory.CROSSING)
    return tuple(kinds)


def chain_launches(plan: Plan) -> tuple[tuple[Actor, Launch], ...]:
    """Return the launches of all chains, one after the other: the time of `Register.interval`.

    Copies of variables for a snapshot are no part of it: they touch no temporary.
    """
    snapshots = [actor.id for actor in _snapshots(plan)]
    return tuple(
        [
            (actor, launch)
            for actor in plan.actors
            if actor.id not in snapshots
            for launch in actor.launches
        ]
    )


def peak_launch(plan: Plan, memory: DeviceMemory) -> Launch | None:
    """Return the launch with the most live bytes; None where no chain has one."""
    launches = chain_launches(plan)
    return launches[memory.peak_launch][1] if memory.peak_launch < len(launches) else None


def account(plan: Plan, arena: int, lower_bound_bytes: int, text: str) -> DeviceMemory:
    """Return the account of one arena. O(registers log registers).

    `lower_bound_bytes` and `text` are what the packing proved of it.
    """
    kinds = memory_categories(plan)
    alignment = plan.arenas[arena].alignment
    registers = [r for r in plan.registers if r.arena == arena and r.size_bytes]
    parts = _by_address(registers, kinds, alignment)
    # A slot reaches to the next multiple of the alignment, for nothing else can begin before it.
    sizes = np.array([_aligned(r, alignment) * r.num_slots for r in registers], np.int64)
    lower = np.array([r.interval[0] for r in registers], np.int64)
    upper = np.array([r.interval[1] for r in registers], np.int64)
    is_workspace = np.array([kinds[r.id] is MemoryCategory.WORKSPACE for r in registers], np.bool_)
    live_bytes, peak_launch = lower_bound(lower, upper, sizes)
    is_live = (lower <= peak_launch) & (peak_launch < upper)
    return DeviceMemory(
        peak_bytes=plan.arenas[arena].size_bytes,
        lower_bound_bytes=lower_bound_bytes,
        parameter_bytes=parts[MemoryCategory.PARAMETER],
        optimizer_bytes=parts[MemoryCategory.OPTIMIZER],
        scratch_bytes=parts[MemoryCategory.SCRATCH],
        other_variable_bytes=parts[MemoryCategory.OTHER_VARIABLE],
        constant_bytes=parts[MemoryCategory.CONSTANT],
        staging_bytes=parts[MemoryCategory.STAGING],
        slot_bytes=parts[MemoryCategory.SLOT],
        crossing_bytes=parts[MemoryCategory.CROSSING],
        temporary_bytes=parts[MemoryCategory.TEMPORARY] + parts[MemoryCategory.WORKSPACE],
        unused_bytes=plan.arenas[arena].size_bytes - sum(parts.values()),
        largest_workspace_bytes=int(sizes[is_workspace].max(initial=0)),
        peak_launch=peak_launch,
        peak_live_bytes=live_bytes,
        peak_workspace_bytes=int(sizes[is_workspace & is_live].sum()),
        text=text,
    )


def _snapshots(plan: Plan) -> list[Actor]:
    """Return the actors that copy variables, or copies of them, for a sink and for no chain."""
    state = {plan.views[variable.view].register for variable in plan.variables}
    chains = [a for a in plan.actors if a.kind not in (*PORTED, ActorKind.COPY)]
    computed = _registers_of(tuple(chains), *ActorKind)
    snapshots: list[Actor] = []
    # In actor order, so that a copy of a copy is found after what it copies.
    for actor in plan.actors:
        outputs = {port.register for port in actor.outputs}
        is_apart = actor.kind is ActorKind.COPY and outputs and not outputs & (computed | state)
        inputs = [plan.views[view].register for x in actor.launches for view in x.inputs]
        if is_apart and state.issuperset(inputs):
            state |= outputs
            snapshots.append(actor)
    return snapshots


def _registers_of(actors: tuple[Actor, ...], *kinds: ActorKind) -> set[RegisterId]:
    """Return what actors of some kinds put out and take in."""
    registers: set[RegisterId] = set()
    for actor in actors:
        if actor.kind in kinds:
            registers.update([port.register for port in actor.inputs + actor.outputs])
    return registers


def _aligned(register: Register, alignment: int) -> int:
    return align_up(register.size_bytes, alignment)


def _by_address(
    held: list[Register], of: tuple[MemoryCategory, ...], alignment: int
) -> dict[MemoryCategory, int]:
    """Return the bytes of each share: addresses that no earlier share claims."""
    ranges: dict[MemoryCategory, list[tuple[int, int]]] = {share: [] for share in MemoryCategory}
    for register in held:
        size = _aligned(register, alignment)
        ranges[of[register.id]] += [(at, at + size) for at in register.offsets_bytes]
    claimed: list[tuple[int, int]] = []
    parts: dict[MemoryCategory, int] = {}
    covered = 0
    # In the order of `MemoryCategory`: an address that several use counts for the first.
    for share, spans in ranges.items():
        claimed += spans
        union = _union_bytes(claimed)
        parts[share] = union - covered
        covered = union
    return parts


def _union_bytes(ranges: list[tuple[int, int]]) -> int:
    """Return how many bytes some ranges [begin, end) cover. O(n log n)."""
    if not ranges:
        return 0
    # Sorted by begin: a range adds what lies beyond the farthest end before it.
    begins, ends = np.array(sorted(ranges), np.int64).T
    reach = np.maximum.accumulate(ends)
    before = np.concatenate((begins[:1], reach[:-1]))
    return int(np.maximum(reach - np.maximum(begins, before), 0).sum())


def slots_in(plan: Plan, arena: int) -> list[tuple[Register, int]]:
    """Return the slots of all registers that have bytes in an arena, in order."""
    registers = [r for r in plan.registers if r.arena == arena and r.size_bytes]
    return [(register, slot) for register in registers for slot in range(register.num_slots)]


def largest_tensor(plan: Plan) -> str:
    """Return in words what the largest tensor is, and where it is made; after a message."""
    # Of tensors of one size the last one stands for all.
    labels = {
        plan.views[v].type.size_bytes: f"{launch.label!r} ({plan.sources[launch.source]})"
        for actor in plan.actors
        for launch in actor.launches
        for v in launch.outputs
    }
    labels |= {plan.views[v.view].type.size_bytes: f"variable {v.name!r}" for v in plan.state}
    size = max(labels, default=0)
    return f"; its largest tensor is of {format_bytes(size)}, {labels[size]}" if labels else ""
