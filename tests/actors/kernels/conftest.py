"""How tests call a kernel: as a loaded plan would, with garbage in the scratch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import compiler.ops.standard  # noqa: F401  # registers the ops
from actors.kernels import catalogue
from actors.kernels.floating_point import quiet_floating_point
from actors.kernels.interpret import blocks
from actors.kernels.kernel import Operand
from compiler.fusion import fuse
from compiler.fusion.expansion import expand
from compiler.graph import GraphBuilder, Output
from compiler.ops.shape import BROADCAST_TO, RESHAPE
from compiler.ops.sources import INPUT
from compiler.registry import all_ops, find_op
from compiler.types import DType, TensorType


def operand(array):
    return Operand(TensorType(DType(array.dtype.name), array.shape), 0, array.strides)


def garbage(size_bytes):
    raw = np.full(size_bytes + 64, 0xFF, np.uint8)  # NaN as floats, -1 as integers
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes]


def fused(op, attrs, inputs, dtypes=None):
    """Return the op, attributes and operands of a call as a plan has them.

    An op with a program is a fused kernel; rows of its operands that lie unevenly are dense there.
    """
    found = find_op(op) if op in {o.name for o in all_ops()} else None
    if found is None or not expand.has(found):
        return op, attrs, tuple(inputs)
    b = GraphBuilder()
    dtypes = dtypes or [x.dtype.name for x in inputs]
    given = [
        b.one(INPUT, name=str(i), dtype=dtype, shape=x.shape)
        for i, (x, dtype) in enumerate(zip(inputs, dtypes, strict=True))
    ]
    b.outputs = [Output(str(i), v) for i, v in enumerate(b.emit(found, given, attrs))]
    nodes = [n for n in fuse.run(b.freeze()).nodes if n.op not in (INPUT, RESHAPE, BROADCAST_TO)]
    if [n.op.name for n in nodes] != ["fused"]:
        return op, attrs, tuple(inputs)
    (node,) = nodes
    arrays = [inputs[given.index(v)] for v in node.inputs]
    return "fused", dict(node.attrs), tuple([np.asarray(x, order="C") for x in arrays])


def bind(op, attrs, inputs, outputs):
    """Choose and bind; returns (launch, needs, workspace)."""
    op, attrs, inputs = fused(op, attrs, inputs)
    name, needs = catalogue.choose(
        op, attrs, tuple(map(operand, inputs)), tuple(map(operand, outputs))
    )
    workspace = garbage(needs.workspace_bytes) if needs.workspace_bytes else None
    launch = catalogue.binders()[name].bind(attrs, tuple(inputs), tuple(outputs), workspace)
    return launch, needs, workspace


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
    elif kind == "broadcast" and len(shape) >= 1:
        return np.broadcast_to(values[..., :1].astype(dtype), shape)
    else:
        array = np.empty(shape, dtype)
    array[...] = values
    return array


KINDS = ("dense", "transposed", "sliced", "windowed", "permuted", "broadcast")


@pytest.fixture(scope="session")
def harness():
    """The functions above, for tests (importlib mode has no sibling imports)."""
    return SimpleNamespace(
        operand=operand,
        bind=bind,
        fused=fused,
        spoiled=spoiled,
        run=run,
        call=call,
        strided=strided,
    )


@pytest.fixture(autouse=True, scope="module")
def quiet_thread():
    """What a loop thread does before its first launch; undone after the module."""
    settings, size = np.geterr(), np.getbufsize()
    quiet_floating_point()
    yield
    np.seterr(**settings)
    np.setbufsize(size)


@pytest.fixture(params=[96, None], ids=["tiny-blocks", "usual-blocks"])
def block_bytes(request, monkeypatch):
    """Runs a test with blocks of 24 float32 as well, so that small tensors have many."""
    if request.param is not None:
        monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)
