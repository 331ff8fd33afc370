"""Where values come from: inputs of the job, variables, constants. No launch and no kernel."""

from __future__ import annotations

from typing import cast

import numpy as np

from compiler.attrs import Attrs
from compiler.bfloat16 import decoded, encoded
from compiler.graph import GraphBuilder, Node
from compiler.ops.signature import Array, Types, expect_inputs
from compiler.registry import (
    Cost,
    OpTypeError,
    cost,
    define,
    infer_type,
    is_source,
    reference,
)
from compiler.sbp.project import LocalCall, project
from compiler.sbp.signatures import SbpSignature, sbp_signatures
from compiler.sbp.words import PARTIAL, Split
from compiler.types import DType, PartOf, TensorType, ValueId

INPUT = define("input")
"""() -> x. A tensor of the batch. Attrs: name, dtype, shape; of a rank's part, whole and splits."""

VARIABLE = define("variable")
"""() -> x. Persistent state. Attrs: name, dtype, shape, role, init (pairs); of a rank's part, whole
(the extents of the whole tensor) and splits (pairs of an axis of the mesh and one of it)."""

CONSTANT = define("constant")
"""() -> x. Attrs: dtype, shape, data (bytes, dense and row-major)."""

SCRATCH = "scratch"
"""The role of a variable whose value means nothing between two steps: it is never saved."""

ROUNDED = "rounded"
"""The role of a variable that is another one, `of` its init, in bfloat16: it is never saved."""

PACKED = "packed"
"""The role of what a launch keeps of a variable, `of` its init, from step to step."""

NUMBERS = "numbers"
"""The role of a variable that holds 0, 1, 2, ...: of one rank's part of it the first says where the
rank's rows begin, so that ranks with equal graphs tell their rows apart. It is never saved."""

OF_MODEL = ("parameter", "buffer")
"""Roles of what a model keeps itself: what is trained, and what is not."""

ROLES = (*OF_MODEL, "optimizer", "counter", SCRATCH, ROUNDED, PACKED, NUMBERS)
"""What a variable is for: the model's, state of an optimizer, a count, scratch, or a copy."""

UNSAVED = (SCRATCH, ROUNDED, PACKED, NUMBERS)
"""Roles of what is no state: it means nothing between two steps, or follows from another one."""

MOST_AT_FIRST = 1e30
"""What an initialiser's numbers stay below, so that what is drawn is finite."""

for _op in (INPUT, VARIABLE, CONSTANT):
    is_source.register(_op, True)


def constant(b: GraphBuilder, array: Array) -> ValueId:
    """Emit a constant that holds a copy of `array`."""
    return b.one(CONSTANT, dtype=str(array.dtype), shape=tuple(array.shape), data=array.tobytes())


def scalar(b: GraphBuilder, value: float, dtype: DType) -> ValueId:
    """Emit a constant of shape () and the given dtype."""
    return b.one(CONSTANT, dtype=dtype.value, shape=(), data=encoded(np.array(value), dtype))


def constant_array(node: Node) -> Array:
    """Return what a constant node holds, as a read-only array; bfloat16 as float32."""
    return _held(node.attrs)


def _held(attrs: Attrs) -> Array:
    array = decoded(cast("bytes", attrs["data"]), declared_dtype(attrs))
    return array.reshape(attrs.ints("shape"))


def is_scalar_constant(b: GraphBuilder, value: ValueId, number: float) -> bool:
    """Whether `value` is a constant of one element with exactly these bits: 0.0 is not -0.0."""
    node = b.producer_of(value)
    if node.op is not CONSTANT or b.type_of(value).num_elements != 1:
        return False
    return node.attrs["data"] == encoded(np.array(number), b.type_of(value).dtype)


def declared_type(attrs: Attrs) -> TensorType:
    """Return the type that attrs `dtype` and `shape` declare. Raises OpTypeError."""
    shape = attrs.ints("shape")
    if any(extent < 0 for extent in shape):
        raise OpTypeError(f"needs extents of 0 or more, got shape {list(shape)}")
    return TensorType(declared_dtype(attrs), shape)


def declared_part(attrs: Attrs) -> PartOf | None:
    """Return what attrs `whole` and `splits` declare of an input or variable of one rank."""
    if "whole" not in attrs:
        return None
    splits = cast("tuple[tuple[str, int], ...]", attrs["splits"])
    return PartOf(attrs.ints("whole"), splits)


def declared_dtype(attrs: Attrs) -> DType:
    """Return the dtype that attr `dtype` names. Raises OpTypeError."""
    name = attrs.str_("dtype")
    try:
        return DType(name)
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        raise OpTypeError(f"knows no dtype {name!r}; one of: {known}") from None


@infer_type.of(INPUT)
def _input_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs)
    return (declared_type(attrs),)


@infer_type.of(VARIABLE)
def _variable_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs)
    if attrs["role"] not in ROLES:
        raise OpTypeError(f"knows no role {attrs['role']!r}; one of: {', '.join(ROLES)}")
    return (declared_type(attrs),)


@infer_type.of(CONSTANT)
def _constant_type(inputs: Types, attrs: Attrs) -> Types:
    expect_inputs(inputs)
    type_ = declared_type(attrs)
    came = len(cast("bytes", attrs["data"]))
    if came != type_.size_bytes:
        raise OpTypeError(f"needs {type_.size_bytes} bytes of data for {type_}, got {came}")
    return (type_,)


@reference.of(CONSTANT)
def _constant_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    return (_held(attrs).copy(),)


@cost.of(INPUT, VARIABLE, CONSTANT)
def _no_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    return Cost(0.0, 0.0)


@sbp_signatures.of(INPUT, VARIABLE, CONSTANT)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    """Have any slice: each rank is given its own. What sums over batches may sum shares."""
    found = [SbpSignature((), (Split(axis),)) for axis in range(outputs[0].rank)]
    is_sum = attrs.get("role") == SCRATCH and outputs[0].dtype.is_float
    return [*found, SbpSignature((), (PARTIAL,))] if is_sum else found


@project.of(INPUT, VARIABLE)
def _own_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    """Emit a rank's part, which says of what it is one, but not whose: other ranks' look alike."""
    attrs = {name: value for name, value in call.node.attrs.items() if name != "sbp"}
    if splits := call.output_splits[0]:
        whole = call.whole_outputs[0].shape
        attrs |= {"shape": call.output_shape(), "whole": whole, "splits": splits}
    return b.emit(call.node.op, (), attrs)


@project.of(CONSTANT)
def _constant_of_part(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    array = constant_array(call.node)
    if call.output_shape() == array.shape:
        return b.emit(CONSTANT, (), call.node.attrs)
    return (constant(b, np.ascontiguousarray(array[call.output_parts[0]])),)
