"""What causal attention hides stays hidden, NaN and infinities too, on every path.

torch 2.13's scaled_dot_product_attention on the CPU lets NaN in a hidden value through to every
query; here it is a promise that it does not.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from actors.kernels import catalogue
from actors.kernels.interpret import attention_blocks
from actors.kernels.kernel import Operand
from actors.kernels.native import attention as native_attention
from compiler.attrs import Attrs
from compiler.ops import attention as _ops  # noqa: F401  # registers the ops
from compiler.registry import find_op, reference
from compiler.types import DType, TensorType

ATTRS = {"scale": 0.5, "causal": True}
BATCH, ROWS, COLUMNS, WIDTH, OUT = 2, 41, 45, 5, 7
BAD = (np.nan, np.inf, -np.inf)


@pytest.fixture(
    params=["reference", "numpy", "numpy, tiny blocks", "native", "native, tiny blocks"]
)
def path(request, monkeypatch):
    if request.param.startswith("native"):
        request.getfixturevalue("native")
    if "tiny" in request.param:
        monkeypatch.setattr(attention_blocks, "STRIPS", (4, 8))
        monkeypatch.setattr(attention_blocks, "CHUNKS", (4, 8))
        monkeypatch.setattr(attention_blocks, "ONE_THREAD", 1)
        monkeypatch.setattr(native_attention, "_KEYS", 16)
    return request.param


def operands(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (BATCH, ROWS, OUT),
        (BATCH, ROWS, WIDTH),
        (BATCH, COLUMNS, WIDTH),
        (BATCH, COLUMNS, OUT),
    ]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def bits_of(x):
    """Round float32 to bfloat16, as bits; NaN stays NaN."""
    return np.where(np.isnan(x), np.uint16(0x7FC0), (x.view(np.uint32) >> 16).astype(np.uint16))


def run(op, inputs, shapes, path, dtype="float32"):
    """Return the outputs in float32."""
    if path == "reference":
        with np.errstate(all="ignore"):
            return reference.get(find_op(op))(Attrs(ATTRS), *inputs)
    is_half = [dtype == "bfloat16" and x.ndim == 3 for x in inputs]
    given = [bits_of(x) if half else x for x, half in zip(inputs, is_half, strict=True)]
    types = [DType.BFLOAT16 if half else DType.FLOAT32 for half in is_half]
    wanted = [DType(dtype) if len(shape) == 3 else DType.FLOAT32 for shape in shapes]
    made = [
        np.zeros(shape, np.uint16 if t is DType.BFLOAT16 else np.float32)
        for shape, t in zip(shapes, wanted, strict=True)
    ]
    taken = tuple(
        Operand(TensorType(t, x.shape), 0, x.strides) for t, x in zip(types, given, strict=True)
    )
    results = tuple(
        Operand(TensorType(t, x.shape), 0, x.strides) for t, x in zip(wanted, made, strict=True)
    )
    name, needs = catalogue.choose(op, ATTRS, taken, results)
    assert name.startswith("c." if path.startswith("native") else "numpy.")
    raw = np.full(needs.workspace_bytes + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    space = raw[start : start + needs.workspace_bytes]
    catalogue.binders()[name].bind(ATTRS, tuple(given), tuple(made), space)()
    return [
        (y.astype(np.uint32) << 16).view(np.float32) if t is DType.BFLOAT16 else y
        for t, y in zip(wanted, made, strict=True)
    ]


def both_ways(dy, q, k, v, path, dtype="float32"):
    shapes = [(BATCH, ROWS, OUT), (BATCH, ROWS)]
    y, lse = run("attention", [q, k, v], shapes, path, dtype)
    shapes = [q.shape, k.shape, v.shape]
    dq, dk, dv = run("attention_grad", [dy, q, k, v, y, lse], shapes, path, dtype)
    return SimpleNamespace(y=y, lse=lse, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", [44, 30, 13, 6])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_queries_that_do_not_see_a_bad_position_do_not_feel_it(where, bad, key, dtype, path):
    if dtype == "bfloat16" and path == "reference":
        pytest.skip("references have no bfloat16 arrays")
    dy, q, k, v = operands()
    clean = both_ways(dy, q, k, v, path, dtype)
    if where in ("key", "both"):
        k[:, key] = bad
    if where in ("value", "both"):
        v[:, key] = bad
    got = both_ways(dy, q, k, v, path, dtype)
    unseen = slice(0, key - (COLUMNS - ROWS))
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    for name in ("y", "lse", "dq"):
        old, new = getattr(clean, name)[:, unseen], getattr(got, name)[:, unseen]
        np.testing.assert_allclose(new, old, rtol=tolerance, atol=tolerance, err_msg=name)
    if where != "key":
        assert not np.isfinite(got.y[:, unseen.stop :]).any()
    if where == "both" and np.isnan(bad):
        assert np.isnan(got.y[:, unseen.stop :]).all()
        assert np.isnan(got.dq[:, unseen.stop :]).all()


def test_a_bad_value_of_one_head_leaves_the_others_alone(path):
    dy, q, k, v = operands()
    clean = both_ways(dy, q, k, v, path)
    v[0, 20] = np.nan
    got = both_ways(dy, q, k, v, path)
    for name in ("y", "lse", "dq", "dk", "dv"):
        old, new = getattr(clean, name)[1], getattr(got, name)[1]
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5, err_msg=name)
