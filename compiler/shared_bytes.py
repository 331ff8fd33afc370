"""Check that actors which use the same bytes for different tensors are in order.

Two registers that lie over each other belong to one actor, whose launches are ordered, or to two
groups of actors: then a path of edges must lead from every actor that touches the one to every
actor that touches the other, so that the first tensor is dead before the second is born. That holds
within one period; from one period to the next, `actors.race` follows the credits that come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from compiler.errors import InternalError
from compiler.plan import Plan
from compiler.types import RegisterId

_Group = tuple[int, ...]
"""The actors that touch a register."""

_Range = tuple[int, int, int, RegisterId]
"""Arena, first byte, end, and the register that lies there."""


def check_shared_bytes(plan: Plan) -> None:
    """Check a plan. Raises InternalError naming registers and actors that nothing orders.

    Near-linear in registers: to be in order is transitive, so each group is compared only with its
    neighbours among those that share a byte with it.
    """
    touching = _touching(plan)
    groups: dict[tuple[int, ...], list[_Range]] = {}
    for register in plan.registers:
        actors = tuple(sorted(touching.get(register.id, ())))
        if not register.size_bytes or not actors:
            continue
        groups.setdefault(actors, []).extend(
            [
                (register.arena, offset, offset + register.size_bytes, register.id)
                for offset in register.offsets_bytes
            ]
        )
    if len(groups) < 2:
        return
    reach = _reach(plan)
    for earlier, later, first, second in _neighbours(groups, _in_order(groups, reach)):
        if not all([a == b or reach[a] >> b & 1 for a in earlier for b in later]):
            names = [repr(plan.registers[r].name) for r in (first, second)]
            owners = [", ".join([plan.actors[a].name for a in group]) for group in (earlier, later)]
            raise InternalError(
                f"registers {names[0]} of {owners[0]} and {names[1]} of {owners[1]} share bytes,"
                " and no path of edges orders these actors"
            )


def _touching(plan: Plan) -> dict[RegisterId, set[int]]:
    touching: dict[RegisterId, set[int]] = {}
    for actor in plan.actors:
        for port in actor.inputs + actor.outputs:
            touching.setdefault(port.register, set()).add(actor.id)
        for launch in actor.launches:
            scratch = () if launch.workspace is None else (launch.workspace,)
            for view in (*launch.inputs, *launch.outputs, *scratch):
                touching.setdefault(plan.views[view].register, set()).add(actor.id)
    return touching


def _in_order(groups: Iterable[_Group], reach: Sequence[int]) -> list[_Group]:
    """Return groups so that of two that are in order the earlier comes first.

    What leads to an actor leads to all that the actor leads to, and so to more.
    """
    rank = [-bits.bit_count() for bits in reach]
    ranks = {group: [rank[a] for a in group] for group in groups}
    return sorted(groups, key=lambda group: (min(ranks[group]), max(ranks[group])))


def _neighbours(
    groups: Mapping[_Group, list[_Range]], in_order: Sequence[_Group]
) -> Iterable[tuple[_Group, _Group, RegisterId, RegisterId]]:
    """Yield groups that lie over each other with none between them, the earlier first.

    A sweep over addresses keeps the groups that are under it in their order; whatever comes between
    two neighbours, or goes, makes new neighbours, or leaves some that are in order by way of it.
    """
    number = {group: i for i, group in enumerate(in_order)}
    events = [
        (arena, address, is_start, number[group], register)
        for group, ranges in groups.items()
        for arena, start, end, register in ranges
        for address, is_start in ((start, True), (end, False))
    ]
    under: list[int] = []
    registers: dict[int, list[RegisterId]] = {}
    for _, _, is_start, here, register in sorted(events):
        place = bisect_left(under, here)
        if not is_start:
            registers[here].remove(register)
            if not registers[here]:
                del under[place]
            continue
        registers.setdefault(here, []).append(register)
        if len(registers[here]) > 1:
            continue
        for other in under[max(0, place - 1) : place]:
            yield in_order[other], in_order[here], registers[other][0], register
        for other in under[place : place + 1]:
            yield in_order[here], in_order[other], register, registers[other][0]
        under.insert(place, here)


def _reach(plan: Plan) -> list[int]:
    """Return, per actor, a bit for every actor that a path of edges leads to."""
    consumers: dict[RegisterId, list[int]] = {}
    for actor in plan.actors:
        for port in actor.inputs:
            consumers.setdefault(port.register, []).append(actor.id)
    after = [
        sorted({c for port in actor.outputs for c in consumers.get(port.register, [])})
        for actor in plan.actors
    ]
    reach = [0] * len(plan.actors)
    is_settled = False
    while not is_settled:
        is_settled = True
        for index in range(len(after) - 1, -1, -1):
            bits = reach[index]
            for consumer in after[index]:
                bits |= reach[consumer] | 1 << consumer
            is_settled = is_settled and bits == reach[index]
            reach[index] = bits
    return reach
