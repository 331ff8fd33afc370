"""All that an op makes of parts, and what a rank does of it: primitives and programs alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from compiler.attrs import Attrs
from compiler.errors import InternalError
from compiler.graph import GraphBuilder
from compiler.ops.signature import SIGNED
from compiler.registry import Op, Types
from compiler.sbp.derive import Found, call_of, derived
from compiler.sbp.local_form import MakeWhole, emit_local
from compiler.sbp.project import LocalCall, project, shape_of
from compiler.sbp.signatures import SbpSignature, sbp_signatures, whole
from compiler.sbp.words import BROADCAST, Partial, Split
from compiler.types import TensorType, ValueId


@lru_cache(maxsize=4096)
def ways_of(op: Op, inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> tuple[Found, ...]:
    """Return the signatures of a call along one axis of a mesh with so many parts.

    The first is that of whole operands. Of tensors that are split each rank has a row at least.
    """
    found = {whole(inputs, outputs): Found(whole(inputs, outputs), -1)}
    if sbp_signatures.has(op):
        for signature in sbp_signatures.get(op)(inputs, outputs, attrs, parts):
            found.setdefault(signature, Found(signature, -1))
    for way in derived(op, inputs, outputs, attrs):
        completed = _completed(way, inputs)
        found.setdefault(completed.signature, completed)
    types = (*inputs, *outputs)
    return tuple([way for signature, way in found.items() if is_possible(signature, types, parts)])


def _completed(way: Found, inputs: Types) -> Found:
    """Return a way with words for operands that are none of the program: all have them."""
    given = way.signature.inputs
    more = (BROADCAST,) * (len(inputs) - len(given))
    return replace(way, signature=replace(way.signature, inputs=given + more)) if more else way


def is_possible(signature: SbpSignature, types: Types, parts: int) -> bool:
    """Whether all parts of what is split have rows, and what is partial can be summed.

    `types` are those of inputs and outputs; of parts that are not alike, of the least.
    """
    for word, type_ in zip((*signature.inputs, *signature.outputs), types, strict=True):
        if isinstance(word, Split) and type_.shape[word.axis] < parts:
            return False
        if isinstance(word, Partial) and not (type_.dtype.is_float or type_.dtype in SIGNED):
            return False
    return True


def emit_part(
    b: GraphBuilder, call: LocalCall, ways: Sequence[tuple[int, Found]], make_whole: MakeWhole
) -> tuple[ValueId, ...]:
    """Emit what a rank does of a node, by the way chosen along each axis of the mesh.

    Raises InternalError where that makes other types than those of the rank's parts.
    """
    node = call.node
    call = replace(call, signatures=tuple([found.signature for _, found in ways]))
    if project.has(node.op):
        made = project.get(node.op)(b, call)
    else:
        whole_call = call_of(node.op, call.whole_inputs, call.whole_outputs, node.attrs)
        if whole_call is None:
            made = b.emit(node.op, call.inputs, node.attrs)
        else:
            made = emit_local(b, call, whole_call, ways, make_whole)
    came = [b.type_of(value) for value in made]
    wanted = [
        TensorType(t.dtype, shape_of(part))
        for t, part in zip(call.whole_outputs, call.output_parts, strict=True)
    ]
    if came != wanted:
        raise InternalError(
            f"{node.op} at {node.source} makes {came} of a rank's parts, where {wanted} was said"
        )
    return made
