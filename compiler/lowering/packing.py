"""Offsets for all registers of a plan, and the order of actors that sharing bytes asks for.

Two levels. The temporaries of one chain are packed by their live intervals in launches; the block
that comes out, like every register between two chains, lives on the virtual time of the schedule,
from the start of the first chain that touches it to the end of the last. Blocks and registers are
packed again by these spans. So two chains that are meant to run at the same time never share bytes,
and what does share bytes runs one after the other in the schedule anyway: `Packing.before` names
those pairs of chains, and the plan must hold an edge, or a path, for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memory.liveness import align_up, lower_bound
from memory.offsets import OffsetPlan, certificate, plan_offsets

SEARCH_WORK = 40_000
"""Work of the searches for a smaller peak, all blocks together: see `memory.offsets`.

Some 0.7 s at most. Above some 3,600 buffers in a chain first-fit stands alone, which came within
0.3 % of the bound on all graphs of that size that were measured.
"""


@dataclass(frozen=True, slots=True)
class Item:
    """A register to place.

    `chains` touch it: the chain of a temporary, with its live `interval` in launches of that chain;
    or the producer and then the consumers of a register between chains. Without chains it lives as
    long as the plan.
    """

    size_bytes: int
    num_slots: int
    chains: tuple[int, ...]
    interval: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each slot of each item lies.

    `before` are pairs of chains (earlier, later) that use the same bytes one after the other. The
    lower bound holds for this order of launches and this schedule of chains.
    """

    offsets: tuple[tuple[int, ...], ...]
    peak_bytes: int
    lower_bound_bytes: int
    before: tuple[tuple[int, int], ...]
    certificate: str


@dataclass(frozen=True, slots=True)
class _PackedPart:
    """Bytes of the outer level: whole slots of an item, or the block of a chain."""

    size_bytes: int
    span: tuple[int, int]
    chains: tuple[int, ...]


def pack(items: Sequence[Item], spans: Sequence[tuple[int, int]], alignment: int) -> Packing:
    """Place all items; `spans[c]` is chain c's half-open place on virtual time, in ranks."""
    horizon = max([1, *[end for _, end in spans]])
    members: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        if item.interval is not None:
            members.setdefault(item.chains[0], []).append(index)
    num_inner = sum([len(own) for own in members.values()])
    inner = {
        chain: _pack_block(items, own, alignment, SEARCH_WORK * len(own) // num_inner)
        for chain, own in members.items()
    }
    parts: list[_PackedPart] = []
    first_part: dict[int, int] = {}
    for index, item in enumerate(items):
        if item.interval is None:
            first_part[index] = len(parts)
            span = _span(item.chains, spans) or (0, horizon)
            # Credits have no bytes, and there are millions where something is due that seldom.
            num_parts = item.num_slots if item.size_bytes else 1
            parts += [_PackedPart(item.size_bytes, span, item.chains)] * num_parts
    block_part = {chain: len(parts) + i for i, chain in enumerate(inner)}
    parts += [_PackedPart(plan.peak_bytes, spans[chain], (chain,)) for chain, plan in inner.items()]
    lower, upper = [p.span[0] for p in parts], [p.span[1] for p in parts]
    sizes = [p.size_bytes for p in parts]
    outer = plan_offsets(lower, upper, sizes, alignment=alignment, max_work=SEARCH_WORK)
    offsets: list[tuple[int, ...]] = []
    for index, item in enumerate(items):
        first = first_part.get(index, 0)
        own_offsets = outer.offsets[first : first + item.num_slots]
        offsets.append(own_offsets if item.size_bytes else own_offsets[:1] * item.num_slots)
    for chain, own in members.items():
        base = outer.offsets[block_part[chain]]
        for index, offset in zip(own, inner[chain].offsets, strict=True):
            offsets[index] = (base + offset,)
    bound = outer.lower_bound_bytes
    if any([plan.peak_bytes > plan.lower_bound_bytes for plan in inner.values()]):
        least = [p.size_bytes for p in parts]
        for chain, plan in inner.items():
            least[block_part[chain]] = plan.lower_bound_bytes
        rounded = [align_up(size, alignment) for size in least]
        bound = lower_bound(lower, upper, rounded)[0]
    before = _reuse(parts, outer.offsets, spans)
    proof = _proof(outer, tuple(inner.values()), bound)
    return Packing(tuple(offsets), outer.peak_bytes, bound, before, proof)


def _pack_block(items: Sequence[Item], own: list[int], alignment: int, work: int) -> OffsetPlan:
    intervals = [items[i].interval or (0, 0) for i in own]
    return plan_offsets(
        [start for start, _ in intervals],
        [end for _, end in intervals],
        [items[i].size_bytes for i in own],
        alignment=alignment,
        max_work=work,
    )


def _span(chains: tuple[int, ...], spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    if not chains:
        return None
    return min([spans[c][0] for c in chains]), max([spans[c][1] for c in chains])


def _reuse(
    parts: list[_PackedPart], offsets: tuple[int, ...], spans: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return the pairs of chains that use the same bytes, by a sweep over addresses."""
    order = sorted(
        [i for i, part in enumerate(parts) if part.chains and part.size_bytes],
        key=lambda i: offsets[i],
    )
    pairs: dict[tuple[int, int], None] = {}
    active: list[int] = []
    for i in order:
        active = [j for j in active if offsets[j] + parts[j].size_bytes > offsets[i]]
        for j in active:
            earlier, later = sorted([parts[i], parts[j]], key=lambda part: part.span)
            for a in earlier.chains:
                for b in later.chains:
                    if a != b:
                        pairs[a, b] = None
        active.append(i)
    return tuple(sorted(pairs, key=lambda pair: (spans[pair[1]], spans[pair[0]], pair)))


def _proof(outer: OffsetPlan, inner: tuple[OffsetPlan, ...], bound: int) -> str:
    """Say what is proved of both levels together.

    One block under a stack of what lives as long is as small as the block is. With several chains
    all holds for their cut: blocks live for whole chains, and another cut may be smaller.
    """
    is_stack = outer.peak_bytes == outer.lower_bound_bytes
    if outer.peak_bytes == bound or (is_stack and not inner):
        return outer.certificate if len(inner) < 2 else f"{outer.certificate} and cut into chains"
    if is_stack and len(inner) == 1 and inner[0].is_optimal:
        return inner[0].certificate
    return certificate(outer.peak_bytes, bound, bound)
