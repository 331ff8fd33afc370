"""What causal attention hides stays hidden, NaN and infinities too, on every path.

torch 2.13's scaled_dot_product_attention on the CPU lets NaN in a hidden value through to every
query; here it is a promise that it does not.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from kernel_calls import bind_kernel, chosen, low_operand

from actors.kernels.common import attention_blocks
from actors.kernels.native import attention as native_attention
from compiler.contract.attrs import Attrs
from compiler.contract.types import from_bits, to_bits
from compiler.graph.registry import find_op, reference
from compiler.ops.families import attention as _ops  # noqa: F401  # registers the ops

ATTRS = {"scale": 0.5, "causal": True}
BATCH, ROWS, COLUMNS, WIDTH, OUT = 2, 41, 45, 5, 7
BAD = (np.nan, np.inf, -np.inf)


PATHS = ("reference", "numpy", "numpy, tiny blocks", "native", "native, tiny blocks")
TYPED_PATHS = [(path, "float32") for path in PATHS] + [(path, "bfloat16") for path in PATHS[1:]]
"""References have no bfloat16 arrays."""


@pytest.fixture(params=PATHS)
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


def run(op, inputs, shapes, path, dtype="float32"):
    """Return the outputs in float32."""
    if path == "reference":
        with np.errstate(all="ignore"):
            return reference.get(find_op(op))(Attrs(ATTRS), *inputs)

    def stored(x):  # statistics stay in float32
        return to_bits(x) if dtype == "bfloat16" and x.ndim == 3 else x

    given = [stored(x) for x in inputs]
    made = [stored(np.zeros(shape, np.float32)) for shape in shapes]
    kernel, _ = chosen(op, ATTRS, given, made, low_operand)
    assert kernel.name.startswith("c." if path.startswith("native") else "numpy.")
    launch, _, check = bind_kernel(kernel, ATTRS, given, made, low_operand)
    launch()
    check()
    return [from_bits(y) if y.dtype == np.uint16 else y for y in made]


def both_ways(dy, q, k, v, path, dtype="float32"):
    shapes = [(BATCH, ROWS, OUT), (BATCH, ROWS)]
    y, lse = run("attention", [q, k, v], shapes, path, dtype)
    shapes = [q.shape, k.shape, v.shape]
    dq, dk, dv = run("attention_grad", [dy, q, k, v, y, lse], shapes, path, dtype)
    return SimpleNamespace(y=y, lse=lse, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize(("path", "dtype"), TYPED_PATHS, indirect=["path"])
@pytest.mark.parametrize("key", [44, 30, 13, 6])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_queries_that_do_not_see_a_bad_position_do_not_feel_it(where, bad, key, dtype, path):
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
