"""Which bytes a firing accesses, and which bytes several actors share.

What a firing accesses is gathered per actor and view, because the launches of a firing are ordered
among themselves. A sweep over addresses then cuts the arenas where an access begins or ends, and
puts bytes that the same actors access in the same phases into one class; bytes of one actor drop
out, and all variables of a plan end in one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

from actors.conflicts import PhasedFiring
from compiler.plan import PORTED, Actor, Plan, RegisterKind

_EDGES = (RegisterKind.DATA, RegisterKind.CONTROL)


class LaunchAccess(NamedTuple):
    """Bytes [start, end) and the firings that access them; the rest is for the message."""

    arena: int
    start: int
    end: int
    phase: PhasedFiring
    register: int
    slot: int
    op: str
    scope: str
    source: int


class ByteSegment(NamedTuple):
    """Bytes [start, end) that several actors access, with the numbers of their accesses."""

    arena: int
    start: int
    end: int
    accesses: tuple[int, ...]


SharedBytes = dict[tuple[PhasedFiring, ...], list[ByteSegment]]


def gather_accesses(plan: Plan) -> list[LaunchAccess]:
    """Return the accesses of all actors, each actor's in the order of its launches."""
    extents = [view.extent for view in plan.views]
    accesses: list[LaunchAccess] = []
    for actor in plan.actors:
        rates = {port.register: port.rate for port in actor.inputs + actor.outputs}
        seen: set[tuple[int, int, bool]] = set()
        for view, edge, is_write, op, scope, source in _operands(plan, actor):
            if (view, edge, is_write) in seen or extents[view][0] == extents[view][1]:
                continue
            seen.add((view, edge, is_write))
            register = plan.registers[plan.views[view].register]
            phases: tuple[tuple[int, int, int], ...] = ((0, 1, 0),)
            if plan.registers[edge].kind in _EDGES:
                phases = _phases(plan.registers[edge].num_slots, rates.get(plan.registers[edge].id))
            for slot, modulus, residue in phases:
                slot %= register.num_slots
                start, end = [register.offsets_bytes[slot] + byte for byte in extents[view]]
                phase, id_ = PhasedFiring(actor.id, modulus, residue, is_write), register.id
                accesses.append(
                    LaunchAccess(register.arena, start, end, phase, id_, slot, op, scope, source)
                )
    return accesses


def _operands(plan: Plan, actor: Actor) -> Iterator[tuple[int, int, bool, str, str, int]]:
    """Yield view, the register whose slots it follows, is_write, op, scope and line."""
    if actor.kind in PORTED:
        kind = actor.kind.value
        for ports, is_write in ((actor.inputs, False), (actor.outputs, True)):
            registers = {port.register for port in ports}
            for field in plan.fields:
                if field.register in registers:
                    yield field.view, field.register, is_write, kind, field.name, field.source
        return
    for launch in actor.launches:
        workspace = () if launch.workspace is None else (launch.workspace,)
        for views, is_write in ((launch.inputs, False), (launch.outputs + workspace, True)):
            for view in views:
                register = plan.views[view].register
                yield view, register, is_write, launch.op, launch.scope, launch.source


def _phases(num_slots: int, rate: int | None) -> tuple[tuple[int, int, int], ...]:
    """Return (slot, modulus, residue) for every slot and every firing that works on it.

    Without a port (rate None), which no loader accepts, each firing is taken to access every slot.
    """
    if rate is None:
        return tuple([(slot, 1, 0) for slot in range(num_slots)])
    modulus = num_slots // gcd(num_slots, rate)
    return tuple(
        [
            ((residue * rate + token) % num_slots, modulus, residue)
            for residue in range(modulus)
            for token in range(rate)
        ]
    )


def share_bytes(accesses: Sequence[LaunchAccess]) -> SharedBytes:
    """Return the segments that two actors access and one writes, by the phases of all accesses."""
    events = [(t.arena, t.start, 1, i) for i, t in enumerate(accesses)]
    events += [(t.arena, t.end, 0, i) for i, t in enumerate(accesses)]
    events.sort()
    classes: SharedBytes = {}
    active: set[int] = set()
    actors: Counter[int] = Counter()
    previous = 0
    for arena, address, is_start, index in events:
        if len(actors) > 1 and address > previous:
            key = tuple(sorted({accesses[i].phase for i in active}))
            if any([phase.is_write for phase in key]):
                segment = ByteSegment(arena, previous, address, tuple(sorted(active)))
                classes.setdefault(key, []).append(segment)
        previous = address
        actor = accesses[index].phase.actor
        if is_start:
            active.add(index)
            actors[actor] += 1
        else:
            active.remove(index)
            actors[actor] -= 1
            if not actors[actor]:
                del actors[actor]
    return classes
