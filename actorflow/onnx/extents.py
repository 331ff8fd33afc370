"""Extents that follow from named axes: found by tracing a job at several sizes.

Shapes are static in a trace, so a graph says 96 where it means 32 * batch. Traced at other sizes,
the same places of the graph have other numbers, and from these the rule follows: a number times
powers of named extents, or a sum of such a multiple and a number. The sizes are primes, so that no
extent is equal to another by accident; a last trace, with all of them changed, proves the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actorflow.onnx.program import OnnxError
from compiler.contract.attrs import Attrs
from compiler.graph.graph import Graph, Node
from compiler.ops.primitives.body import Body

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83)


@dataclass(frozen=True, slots=True)
class Monomial:
    """offset + coefficient * the product of powers of named extents."""

    coefficient: int
    powers: tuple[tuple[str, int], ...]
    offset: int = 0


Extent = int | Monomial


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of named extents in each trace: the base, one with each changed, one with all."""

    names: tuple[str, ...]
    traces: tuple[Mapping[str, int], ...]


def sizes_for(extents: Mapping[str, int]) -> Sizes:
    """Return what to trace at for named extents that are as given in an example.

    They are no larger than in the example, where so many primes are left: a table of positions may
    have no more.
    """
    free, three = list(_PRIMES), {}
    for name, extent in sorted(extents.items(), key=lambda item: item[1]):
        below = [prime for prime in free if prime <= extent]
        chosen = below[-3:] if len(below) >= 3 else free[:3]
        if len(chosen) < 3:
            raise OnnxError(f"export knows no more than {len(_PRIMES) // 3} named axes")
        free = [prime for prime in free if prime not in chosen]
        three[name] = chosen
    names = tuple(sorted(three))
    base = {name: three[name][0] for name in names}
    changed = [{**base, name: three[name][1]} for name in names]
    return Sizes(names, (base, *changed, {name: three[name][2] for name in names}))


def merged(values: Sequence[int], sizes: Sizes, where: str) -> Extent:
    """Return the rule of a number that was seen in each trace. Raises OnnxError where none is."""
    first = values[0]
    if all(value == first for value in values):
        return first
    for rule in (_monomial(values, sizes), _affine(values, sizes)):
        if rule is not None and [_at(rule, sizes_) for sizes_ in sizes.traces] == list(values):
            return rule
    shown = ", ".join(f"{dict(s)}: {v}" for s, v in zip(sizes.traces, values, strict=True))
    raise OnnxError(
        f"{where}: an extent follows no rule of the free axes that is known here ({shown}); export"
        " without these dynamic_axes"
    )


def _at(rule: Monomial, sizes: Mapping[str, int]) -> int:
    each: list[int] = [sizes[name] ** power for name, power in rule.powers]
    return rule.offset + rule.coefficient * math.prod(each)


def _monomial(values: Sequence[int], sizes: Sizes) -> Monomial | None:
    first, base, powers = values[0], sizes.traces[0], []
    for name, value, at in zip(sizes.names, values[1:], sizes.traces[1:], strict=False):
        power = next(
            (p for p in range(4) if value * base[name] ** p == first * at[name] ** p), None
        )
        if power is None:
            return None
        if power:
            powers.append((name, power))
    product = math.prod([base[name] ** power for name, power in powers])
    return None if first % product else Monomial(first // product, tuple(powers))


def _affine(values: Sequence[int], sizes: Sizes) -> Monomial | None:
    base = sizes.traces[0]
    moved = [i for i in range(len(sizes.names)) if values[i + 1] != values[0]]
    if len(moved) != 1:
        return None
    name, at = sizes.names[moved[0]], sizes.traces[moved[0] + 1]
    step = at[name] - base[name]
    if (values[moved[0] + 1] - values[0]) % step:
        return None
    slope = (values[moved[0] + 1] - values[0]) // step
    return Monomial(slope, ((name, 1),), values[0] - slope * base[name])


class Symbolic:
    """A graph whose numbers are extents: the same graph in each trace, walked side by side."""

    def __init__(self, graphs: Sequence[Graph], sizes: Sizes) -> None:
        self.graph = graphs[0]
        self._graphs = graphs
        self._sizes = sizes
        self._check()

    def _check(self) -> None:
        first = self.graph
        for graph in self._graphs[1:]:
            for one, other in zip(first.nodes, graph.nodes, strict=False):
                if (one.op, one.inputs, one.outputs) != (other.op, other.inputs, other.outputs):
                    self._refuse(one)
            if len(first.nodes) != len(graph.nodes) or first.outputs != graph.outputs:
                self._refuse(first.nodes[-1])

    def _refuse(self, node: Node) -> None:
        raise OnnxError(
            f"{node.source}: the job has other ops at other sizes of the free axes"
            f" {list(self._sizes.names)}, from {node.op} on; export without these dynamic_axes"
        )

    def shape(self, value: int) -> tuple[Extent, ...]:
        """Return the shape of a value."""
        shapes = [graph.types[value].shape for graph in self._graphs]
        if all(shape == shapes[0] for shape in shapes):
            return shapes[0]
        node = self.graph.nodes[self.graph.producers()[value]]
        return self._merged(shapes, f"{node.source}: {node.op}")

    def _merged(self, rows: Sequence[Sequence[int]], where: str) -> tuple[Extent, ...]:
        return tuple([merged(each, self._sizes, where) for each in zip(*rows, strict=True)])

    def ints(self, place: int, name: str) -> tuple[Extent, ...]:
        """Return a sequence of integers among the attributes of a node."""
        nodes = [graph.nodes[place] for graph in self._graphs]
        return self._merged([n.attrs.ints(name) for n in nodes], f"{nodes[0].source}: {name}")

    def int_(self, place: int, name: str) -> Extent:
        """Return an integer among the attributes of a node."""
        nodes = [graph.nodes[place] for graph in self._graphs]
        return merged(
            [n.attrs.int_(name) for n in nodes], self._sizes, f"{nodes[0].source}: {name}"
        )

    def body(self, place: int, name: str) -> Symbolic:
        """Return a body among the attributes of a node."""
        bodies = [graph.nodes[place].attrs[name] for graph in self._graphs]
        return Symbolic([b.graph for b in bodies if isinstance(b, Body)], self._sizes)

    def check_same(self, place: int, but: Sequence[str]) -> None:
        """Raise OnnxError where an attribute differs between traces, but for those of `but`."""
        nodes = [graph.nodes[place] for graph in self._graphs]
        kept = [Attrs({k: v for k, v in n.attrs.items() if k not in but}) for n in nodes]
        if any(attrs != kept[0] for attrs in kept):
            raise OnnxError(
                f"{nodes[0].source}: {nodes[0].op} has other settings, or constants, at other sizes"
                f" of the free axes {list(self._sizes.names)}; export without these dynamic_axes"
            )

    def node_in_each(self, place: int) -> list[Node]:
        """Return a node as it is in each trace."""
        return [graph.nodes[place] for graph in self._graphs]


def with_sizes(
    spec: Mapping[str, object], axes: Mapping[str, Mapping[int, str]], sizes: Mapping[str, int]
) -> dict[str, object]:
    """Return the types of a batch whose named axes have given sizes."""
    made = dict(spec)
    for name, named in axes.items():
        type_ = made[name]
        shape = list(type_.shape)  # type: ignore[attr-defined]  # a TensorType
        for axis, symbol in named.items():
            shape[axis] = sizes[symbol]
        made[name] = replace(type_, shape=tuple(shape))  # type: ignore[type-var]  # as above
    return made
