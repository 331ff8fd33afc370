"""Projection: what one rank does of a node, on its parts of the operands.

The default is the node's op with its own attributes. An op whose attributes or meaning depend on
extents says in the column `project` what a rank does in its place; of an op that is a program it
follows from the program (`compiler.sbp.local_form`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder, Node
from compiler.mesh import Mesh
from compiler.registry import OpAttr, Types
from compiler.sbp.parts import Splits
from compiler.sbp.signatures import SbpSignature
from compiler.sbp.words import Shape
from compiler.types import ValueId

_NO_MESH = Mesh((), ())

Part = tuple[slice, ...]
"""Which elements of a whole tensor a rank has: all of them where it is partial."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A node of the graph of whole tensors, as one rank sees it.

    `inputs` are the rank's parts in the builder; `whole_inputs` and `whole_outputs` the types of
    the whole tensors, and the parts which elements of these the rank has and makes.
    `input_splits` and `output_splits` say by which axes of the mesh each is split. `shared` are
    values that the rank's graph has once for all who want them, by what they are; `coordinates`
    those of the rank in the mesh. `signatures` are what was chosen along each axis of it.
    """

    node: Node
    inputs: tuple[ValueId, ...]
    whole_inputs: Types
    whole_outputs: Types
    input_parts: tuple[Part, ...]
    output_parts: tuple[Part, ...]
    input_splits: tuple[Splits, ...] = ()
    output_splits: tuple[Splits, ...] = ()
    mesh: Mesh = _NO_MESH
    coordinates: tuple[int, ...] = ()
    shared: dict[object, ValueId] = field(default_factory=dict)
    signatures: tuple[SbpSignature, ...] = ()

    def output_shape(self, index: int = 0) -> Shape:
        """Return the shape of the rank's part of a result."""
        return shape_of(self.output_parts[index])


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


def shape_of(part: Part) -> Shape:
    """Return the extents of a part."""
    return tuple([own.stop - own.start for own in part])


def with_local_shape(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit an op that has the shape of its result in its attribute `shape`."""
    return b.emit(call.node.op, call.inputs, {**call.node.attrs, "shape": call.output_shape()})
