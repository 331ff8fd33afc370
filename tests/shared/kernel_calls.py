"""How tests call a kernel: as a plan would, among guard bytes, with garbage in the scratch."""

from __future__ import annotations

import numpy as np

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from actors.kernels.common.kernel import Operand, require_plan
from actors.kernels.cuda.kernel import DeviceView
from actors.kernels.host import catalogue
from compiler.contract.types import DType, TensorType, numpy_dtype
from compiler.fusion import fuse
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.program_builder import expand
from compiler.graph.registry import all_ops, find_op, kernel_op
from compiler.ops.language.define import update
from compiler.ops.primitives.shape import BROADCAST_TO, RESHAPE
from compiler.ops.primitives.sources import INPUT

GUARD = 0x5A
MARGIN = 128


def operand(array, dtype=None):
    return Operand(TensorType(dtype or DType(array.dtype.name), array.shape), 0, array.strides)


def low_operand(array):
    """Return the operand of an array where 16 bits are bfloat16."""
    return operand(array, DType.BFLOAT16 if array.dtype == np.uint16 else None)


def garbage(size_bytes):
    """Scratch of 0xFF, NaN as floats, aligned to 64 bytes; and the guard bytes behind it."""
    raw = np.full(size_bytes + 64 + MARGIN, GUARD, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + size_bytes] = 0xFF
    return raw[start : start + size_bytes], raw[start + size_bytes :]


def guarded(array):
    """Return a copy with the same strides among guard bytes, and a check that those still stand.

    Bytes between the elements are guards as well.
    """
    spans = [(n - 1) * abs(s) for n, s in zip(array.shape, array.strides, strict=True) if n]
    size = (sum(spans) + array.itemsize) if array.size else 0
    raw = np.full(size + 2 * MARGIN, GUARD, np.uint8)
    copy = np.ndarray(array.shape, array.dtype, raw, MARGIN, array.strides)
    used = np.zeros(raw.size, bool)
    for byte in range(array.itemsize):
        flags = np.ndarray(array.shape, bool, used, MARGIN + byte, array.strides)
        flags[...] = True
    copy[...] = array

    def check():
        assert (raw[~used] == GUARD).all(), "bytes outside of the output were written"

    return copy, check


def launched_op(op):
    """Return the op whose kernels compute an op."""
    return kernel_op.get(op) or op.name


def fused(op, attrs, inputs, dtypes=None):
    """Return the op, attributes and operands of a call as a plan has them.

    An op with a program is a fused kernel; rows of its operands that lie unevenly are dense there.
    """
    registered = find_op(op) if op in {o.name for o in all_ops()} else None
    is_update = registered is not None and update.has(registered)
    if registered is None or not (is_update or expand.has(registered)):
        return op, attrs, tuple(inputs)
    b = GraphBuilder()
    dtypes = dtypes or [x.dtype.name for x in inputs]
    values = [
        b.emit_one(INPUT, name=str(i), dtype=dtype, shape=x.shape)
        for i, (x, dtype) in enumerate(zip(inputs, dtypes, strict=True))
    ]
    b.outputs = [Output(str(i), v) for i, v in enumerate(b.emit(registered, values, attrs))]
    nodes = [n for n in fuse.run(b.freeze()).nodes if n.op not in (INPUT, RESHAPE, BROADCAST_TO)]
    if [n.op.name for n in nodes] != [op if is_update else "fused"]:
        return op, attrs, tuple(inputs)
    (node,) = nodes
    arrays = [inputs[values.index(v)] for v in node.inputs]
    return launched_op(node.op), dict(node.attrs), tuple([np.asarray(x, order="C") for x in arrays])


def chosen(op, attrs, inputs, outputs, of=operand):
    """Return the kernel that the catalogue chooses, and what it needs."""
    name, needs = catalogue.select_kernel(
        op, attrs, tuple(map(of, inputs)), tuple(map(of, outputs))
    )
    return catalogue.kernels_by_name()[name], needs


def needs_of(kernel, attrs, inputs, outputs):
    """Return what a kernel needs for a call on operands; None where it does not take it."""
    plan = kernel.plan(attrs, inputs, outputs)
    return None if plan is None else plan.needs


def bind_to(kernel, attrs, inputs, outputs, workspace):
    """Bind a kernel to arrays, in which 16 bits are bfloat16, or to views on a device."""
    operands = [
        tuple([x.as_operand if isinstance(x, DeviceView) else low_operand(x) for x in places])
        for places in (inputs, outputs)
    ]
    return require_plan(kernel, attrs, *operands).bind(tuple(inputs), tuple(outputs), workspace)


def bind(op, attrs, inputs, outputs):
    """Choose and bind; returns (launch, needs, workspace)."""
    op, attrs, inputs = fused(op, attrs, inputs)
    kernel, needs = chosen(op, attrs, inputs, outputs)
    workspace = garbage(needs.workspace_bytes)[0] if needs.workspace_bytes else None
    plan = kernel.plan(attrs, tuple(map(operand, inputs)), tuple(map(operand, outputs)))
    return plan.bind(tuple(inputs), tuple(outputs), workspace), needs, workspace


def spoiled(shape, dtype):
    """Return an array whose content shows when a kernel leaves a hole."""
    out = np.empty(shape, dtype)
    out.view(np.uint8 if out.ndim else out.dtype)[...] = 0x7E if out.ndim else 77
    return out


def run(op, attrs, inputs, outputs, launches=2):
    """Run a kernel on given arrays; returns the outputs. Checks that inputs are left alone."""
    before = [x.copy() for x in inputs]
    launch, _, workspace = bind(op, attrs, inputs, outputs)
    for _ in range(launches):
        if workspace is not None:
            workspace[:] = 0xFF
        launch()
    for x, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, old)
    return outputs


def call(op, attrs, inputs, types):
    """Run a kernel into fresh dense outputs of these (shape, dtype) pairs."""
    return run(op, attrs, inputs, tuple(spoiled(shape, dtype) for shape, dtype in types))


def bind_kernel(kernel, attrs, inputs, outputs, of=operand):
    """Bind one kernel; returns (launch, needs, check), where each launch finds garbage in scratch.

    The check is that no byte behind the scratch was written.
    """
    plan = require_plan(kernel, attrs, tuple(map(of, inputs)), tuple(map(of, outputs)))
    needs = plan.needs
    workspace, behind = garbage(needs.workspace_bytes)
    scratch = workspace if needs.workspace_bytes else None
    bound = plan.bind(tuple(inputs), tuple(outputs), scratch)

    def launch():
        workspace[:] = 0xFF
        bound()

    def check():
        assert (behind == GUARD).all(), "bytes behind the scratch were written"

    return launch, needs, check


def call_kernel(kernel, attrs, inputs, outputs, launches=2, of=operand):
    """Run one kernel into outputs laid out like the given ones; returns copies of them.

    Checks that the inputs, and all bytes around outputs and scratch, are left alone.
    """
    before = [x.copy() for x in inputs]
    guards = [guarded(out) for out in outputs]
    arrays = tuple(array for array, _ in guards)
    launch, _, check_scratch = bind_kernel(kernel, attrs, inputs, arrays, of)
    for _ in range(launches):
        launch()
    for check in (check_scratch, *[check for _, check in guards]):
        check()
    for x, old in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, old)
    return arrays


class Declined(AssertionError):
    """A kernel does not take the call."""


def typed(dtypes, arrays):
    """Return the operands that arrays are with these element types."""
    return tuple([operand(a, d) for d, a in zip(dtypes, arrays, strict=True)])


def run_typed(
    kernel, attrs, dtypes, arrays, results, *, in_place=(), launches=2, outputs=None, between=None
):
    """Query, bind and run a kernel as a plan does; returns (outputs, needs).

    `results` are the types of the outputs, which may be given; pairs of `in_place` lay an output
    over an input; `between` is called before the launch is bound. Checks that inputs, and all bytes
    around outputs and scratch, are left alone.
    """
    before = [x.copy() for x in arrays]
    guards = [guarded(spoiled(t.shape, numpy_dtype(t.dtype))) for t in results]
    outs = [array for array, _ in guards] if outputs is None else outputs
    operands = before if in_place else arrays
    for out, index in in_place:
        outs[out] = operands[index]
    plan = kernel.plan(attrs, typed(dtypes, operands), typed([t.dtype for t in results], outs))
    if plan is None:
        raise Declined(f"{kernel.name} does not take the call")
    needs = plan.needs
    assert {*in_place} <= {*needs.in_place}
    if between is not None:
        between()
    workspace, behind = garbage(needs.workspace_bytes)
    scratch = workspace if needs.workspace_bytes else None
    launch = plan.bind(tuple(operands), tuple(outs), scratch)
    for _ in range(1 if in_place else launches):
        workspace[:] = 0xFF
        launch()
    assert (behind == GUARD).all(), "bytes behind the scratch were written"
    for _, check in guards:
        check()
    if not in_place:
        for x, old in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(x, old)
    return outs, needs


def strided(rng, shape, dtype=np.float32, kind="dense", values=None):
    """Return random values in an array of the layout `kind`."""
    values = rng.standard_normal(shape) if values is None else np.asarray(values)
    if kind == "transposed" and len(shape) >= 2:
        array = np.empty((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2)
    elif kind == "sliced" and len(shape) >= 1:
        array = np.empty((*shape[:-1], shape[-1] * 2 + 3), dtype)[..., 1 : 1 + 2 * shape[-1] : 2]
    elif kind == "windowed" and len(shape) >= 1:
        array = np.empty((*shape[:-1], shape[-1] + 5), dtype)[..., 2 : 2 + shape[-1]]
    elif kind == "permuted" and len(shape) >= 3:
        array = np.empty((shape[1], shape[0], *shape[2:]), dtype).swapaxes(0, 1)
    elif kind == "apart" and len(shape) >= 2:  # rows and columns of a larger matrix
        array = np.empty((*shape[:-2], shape[-2] + 1, shape[-1] + 5), dtype)
        array = array[..., 1:, 2 : 2 + shape[-1]]
    elif kind == "turned" and len(shape) >= 3:  # as heads lie in a projection
        array = np.moveaxis(np.empty((shape[-2], *shape[:-2], shape[-1]), dtype), 0, -2)
    elif kind == "last" and len(shape) >= 3:  # channels last
        array = np.moveaxis(np.empty((shape[0], *shape[2:], shape[1]), dtype), -1, 1)
    elif kind == "reversed" and len(shape) >= 8:  # no axis joins its neighbour
        array = np.empty(shape[::-1], dtype).T
    elif kind == "broadcast" and len(shape) >= 1:
        return np.broadcast_to(values[..., :1].astype(dtype), shape)
    else:
        array = np.empty(shape, dtype)
    array[...] = values
    return array
