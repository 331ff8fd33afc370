"""Check that actors which use the same bytes for different tensors are in order.

Two registers that lie over each other belong to one actor, whose launches are ordered, or to two
groups of actors: then a path of edges must lead from every actor that touches the one to every
actor that touches the other, so that the first tensor is dead before the second is born. That holds
within one period; from one period to the next, `actors.race` follows the credits that come back.
"""

from __future__ import annotations

from collections.abc import Iterable

from compiler.errors import InternalError
from compiler.plan import Plan
from compiler.types import RegisterId

_Range = tuple[int, int, int, RegisterId]
"""Arena, first byte, end, and the register that lies there."""


def check_shared_bytes(plan: Plan) -> None:
    """Check a plan. Raises InternalError naming registers and actors that nothing orders."""
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
    for one, other, first, second in _overlaps(groups):
        if not (_all_before(reach, one, other) or _all_before(reach, other, one)):
            names = [repr(plan.registers[r].name) for r in (first, second)]
            owners = [", ".join([plan.actors[a].name for a in group]) for group in (one, other)]
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


def _overlaps(
    groups: dict[tuple[int, ...], list[_Range]],
) -> Iterable[tuple[tuple[int, ...], tuple[int, ...], RegisterId, RegisterId]]:
    """Yield every pair of groups with common bytes once, by a sweep over addresses.

    Per group only the range that reaches furthest is kept, so a step costs the number of groups.
    """
    ranges = sorted([(row, group) for group, rows in groups.items() for row in rows])
    furthest: dict[tuple[int, ...], tuple[int, int, RegisterId]] = {}
    found: set[frozenset[tuple[int, ...]]] = set()
    for (arena, start, end, register), group in ranges:
        for other, (its_arena, its_end, its_register) in furthest.items():
            pair = frozenset((group, other))
            if other != group and its_arena == arena and its_end > start and pair not in found:
                found.add(pair)
                yield other, group, its_register, register
        kept = furthest.get(group)
        if kept is None or kept[:2] < (arena, end):
            furthest[group] = (arena, end, register)


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


def _all_before(reach: list[int], earlier: tuple[int, ...], later: tuple[int, ...]) -> bool:
    return all([a == b or reach[a] >> b & 1 for a in earlier for b in later])
