"""Loops over steps on many ranks: each runs all steps on its rows of the batch.

Steps follow each other, so the axis of steps stays whole. Weights are whole, their gradients shares
of a sum that meets once, after the loop.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.errors import InternalError
from compiler.graph import GraphBuilder
from compiler.ops.scan import SCAN, ScanParts
from compiler.ops.signature import Types
from compiler.sbp.in_bodies import BodyLayout, body_layout, local_body, stacked, unstacked
from compiler.sbp.project import LocalCall, project
from compiler.sbp.signatures import SbpSignature, sbp_signatures
from compiler.sbp.words import Split
from compiler.types import ValueId


@sbp_signatures.of(SCAN)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Split an axis of a carry or of an entry, and whatever follows from that."""
    cut, found = ScanParts.of(attrs), dict[SbpSignature, None]()
    for number, type_ in enumerate(cut.body.operand_types[: cut.first_constant]):
        for axis, extent in enumerate(type_.shape):
            layout = None
            if extent >= parts:
                layout = body_layout(cut.body, parts, [(number, Split(axis))], cut.carries)
            if layout is not None:
                found[_outside(cut, layout)] = None
    return list(found)


def _outside(cut: ScanParts, layout: BodyLayout) -> SbpSignature:
    given = [layout.words[v] for v in cut.body.operands]
    made = [layout.words[v] for v in cut.body.results]
    entries = range(cut.carries, cut.first_constant)
    return SbpSignature(
        tuple([stacked(word) if i in entries else word for i, word in enumerate(given)]),
        tuple([stacked(word) if i >= cut.carries else word for i, word in enumerate(made)]),
    )


@project.of(SCAN)
def _own_steps(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit all steps on the rank's rows."""
    cut, attrs = ScanParts.of(call.node.attrs), call.node.attrs
    if all([signature.is_whole for signature in call.signatures]):
        return b.emit(SCAN, call.inputs, attrs)
    pairs = zip(call.signatures, call.mesh.shape, strict=True)
    layouts = [_layout_of(cut, signature, parts) for signature, parts in pairs]
    own = local_body(cut.body, layouts, call.mesh, call.coordinates)
    return b.emit(SCAN, call.inputs, {**attrs, "body": own})


def _layout_of(cut: ScanParts, signature: SbpSignature, parts: int) -> BodyLayout:
    """Return the layout of the body that a signature was made of."""
    entries = range(cut.carries, cut.first_constant)
    words = [unstacked(w) if i in entries else w for i, w in enumerate(signature.inputs)]
    layout = body_layout(cut.body, parts, list(enumerate(words)), cut.carries)
    if layout is None:
        raise InternalError(f"no layout of a loop's body follows from {signature}")
    return layout
