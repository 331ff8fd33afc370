"""Columns of ops that say how to run on parts of tensors, and how most cells are written.

A `SbpSignature` promises, along one axis of a mesh: if each rank has its part of the operands, and
runs the op on them as the column `project` says, then each has its part of the results. The cells
are of primitive ops; of an op that is a program, signatures follow from the program
(`compiler.sbp.derive`). Every op takes operands that each rank has whole (`whole`).

A signature over several axes of a mesh is one of these for each axis: what holds of an op on any
shapes holds of the op on parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.placement import Mesh
from compiler.contract.sbp import BROADCAST, PARTIAL, NdSbp, Partial, Sbp, Shape, Split, local_shape
from compiler.contract.types import ValueId
from compiler.graph.graph import GraphBuilder, Node, gradient
from compiler.graph.registry import Array, Cost, Op, OpAttr, Types, cost, reference


@dataclass(frozen=True, slots=True)
class SbpSignature:
    """How operands must lie, and how the results lie then."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all operands and results are whole."""
        return {*self.inputs, *self.outputs} <= {BROADCAST}

    def __str__(self) -> str:
        sides = [", ".join(map(str, side)) for side in (self.inputs, self.outputs)]
        return " -> ".join(sides)


SignaturesOf = Callable[[Types, Types, Attrs, int], Sequence[SbpSignature]]
"""The signatures of a call, beside that of whole operands: (inputs, outputs, attrs, parts).

Types are those of the whole tensors. Where extents are no multiples of the `parts`, a split may be
uneven; whatever a signature says holds of uneven ones, too.
"""

Labels = Sequence[str]
"""A name for each axis of an operand; "" where it cannot be split."""

sbp_signatures = OpAttr[SignaturesOf](
    "sbp_signatures",
    "what the op makes of operands that lie on several ranks; read by the choice of SBP. Without a"
    " cell: what follows from the op's program, or whole operands alone",
)


def whole(inputs: Types, outputs: Types) -> SbpSignature:
    """Return the signature that every op has."""
    return SbpSignature((BROADCAST,) * len(inputs), (BROADCAST,) * len(outputs))


def by_axes(
    inputs: Sequence[Labels], outputs: Sequence[Labels], *, sums: bool = False
) -> list[SbpSignature]:
    """Return the signatures of an op whose axes correspond by name, as in einsum.

    Along a name, whoever has it is split, and other operands are whole. With `sums`, results that
    do not have it are partial; without, all results must have it.
    """
    names = dict.fromkeys([name for labels in inputs for name in labels if name])
    signatures = []
    for name in names:
        outs = [_word(labels, name, PARTIAL if sums else None) for labels in outputs]
        if None not in outs:
            ins = [_word(labels, name, BROADCAST) for labels in inputs]
            signatures.append(SbpSignature(tuple(filter(None, ins)), tuple(filter(None, outs))))
    return signatures


def linear_in(number: int, inputs: int, outputs: int = 1, by: Partial = PARTIAL) -> SbpSignature:
    """Return the signature of an op that is linear in one operand, the others being whole."""
    sbps = [by if i == number else BROADCAST for i in range(inputs)]
    return SbpSignature(tuple(sbps), (by,) * outputs)


def _word(labels: Labels, name: str, other: Sbp | None) -> Sbp | None:
    return Split(list(labels).index(name)) if name in labels else other


def last_labels(names: Sequence[str], shape: Sequence[int], wide: Sequence[int]) -> Labels:
    """Return the names of the axes of an operand that numpy's rule stretches to a wide shape."""
    labels = names[len(names) - len(shape) :]
    last = wide[len(wide) - len(shape) :]
    return [name if n == m else "" for name, n, m in zip(labels, shape, last, strict=True)]


# Decorators by which most cells of ops with one output are written.

Grads = tuple[ValueId | None, ...]
"""One gradient per input of a node; None where nothing flows."""

Values = tuple[ValueId, ...]
"""Inputs of a node, or replacements of its outputs."""

Rule = Callable[[GraphBuilder, Node, ValueId], Grads]


def gradient_of(*ops: Op) -> Callable[[Rule], Rule]:
    """Return a decorator that registers the gradient of ops with one output.

    The rule gets the gradient of that output, which is never None.
    """

    def decorate(rule: Rule) -> Rule:
        def pull(b: GraphBuilder, node: Node, grads: Grads) -> Grads:
            (dy,) = grads
            return (None,) * len(node.inputs) if dy is None else rule(b, node, dy)

        for op in ops:
            gradient.register(op, pull, rule.__code__.co_filename)
        return rule

    return decorate


def reference_of(*ops: Op) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Return a decorator that registers the array of (attrs, *arrays) as reference of ops."""

    def decorate(function: Callable[..., Array]) -> Callable[..., Array]:
        def run(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
            return (np.asarray(function(attrs, *inputs)),)

        for op in ops:
            reference.register(op, run, function.__code__.co_filename)
        return function

    return decorate


def streaming_cost(*ops: Op, flops: float = 0.0) -> None:
    """Let ops cost `flops` per element of the first input, and move all operands once."""

    def work(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
        moved_bytes = sum([t.size_bytes for t in (*inputs, *outputs)])
        return Cost(flops * inputs[0].num_elements, float(moved_bytes))

    for op in ops:
        cost.register(op, work, sys._getframe(1).f_code.co_filename)


# Projection: what one rank does of a node, on its parts of the operands.
#
# The default is the node's op with its own attributes. An op whose attributes or meaning depend on
# extents says in the column `project` what a rank does in its place; of an op that is a program it
# follows from the program (`compiler.sbp.local_form`).


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A node of the graph of whole tensors, as one rank sees it.

    `inputs` are the rank's parts in the builder; `whole_inputs` and `whole_outputs` the types of
    the whole tensors. `signatures` are what was chosen along each axis of the mesh: with the
    `coordinates` of the rank there, which part of each tensor it has follows from them. `shared`
    are values that the rank's graph has once for all who want them, by what they are.
    """

    node: Node
    inputs: tuple[ValueId, ...]
    whole_inputs: Types
    whole_outputs: Types
    signatures: tuple[SbpSignature, ...]
    mesh: Mesh
    coordinates: tuple[int, ...]
    shared: dict[object, ValueId] = field(default_factory=dict)

    def input_sbp(self, index: int = 0) -> NdSbp:
        """Return how an operand lies."""
        return tuple([signature.inputs[index] for signature in self.signatures])

    def output_sbp(self, index: int = 0) -> NdSbp:
        """Return how a result lies."""
        return tuple([signature.outputs[index] for signature in self.signatures])

    def output_shape(self, index: int = 0) -> Shape:
        """Return the shape of the rank's part of a result."""
        shape = self.whole_outputs[index].shape
        return local_shape(shape, self.output_sbp(index), self.mesh.shape, self.coordinates)


Project = Callable[[GraphBuilder, LocalCall], tuple[ValueId, ...]]
"""Emits what a rank does; returns one value per output, of the shapes of its parts."""

project = OpAttr[Project](
    "project", "what a rank does of a node whose operands it has parts of; read by projection"
)


LocalAttrs = Callable[[Attrs, Shape], Attrs]
"""Attributes of a call on a part of the walked tensor, from those of the whole and its shape."""

local_attrs = OpAttr[LocalAttrs](
    "local_attrs", "attributes of a call on parts; read by projection", lambda attrs, shape: attrs
)


def with_local_shape(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit an op that has the shape of its result in its attribute `shape`."""
    return b.emit(call.node.op, call.inputs, {**call.node.attrs, "shape": call.output_shape()})
