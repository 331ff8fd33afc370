"""No NaN where torch has none: every op of floats, on every path, over the range of every type.

The oracle is torch's results, stored with the script that made them (tests/shared/whole_range.py).
"""

import numpy as np
import pytest
import whole_range as ranges
from graph_oracles import pull, walked
from kernel_calls import bind_to, garbage, launched_op, typed

from actors.kernels.host import catalogue
from compiler.contract.types import DType, numpy_dtype
from compiler.fusion import fuse
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.registry import Op, find_op, reference
from compiler.ops.primitives.shape import cast_to
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline import standard_ops

PATHS = ("reference", "numpy", "native")
VIEWS = ("reshape", "transpose", "broadcast_to", "slice", "constant")
ELSEWHERE = {
    **dict.fromkeys(("attention", "attention_grad"), "test_attention: hidden and huge numbers"),
    **dict.fromkeys(("matmul", "embedding_grad", "accumulate"), "sums of products"),
    **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), "between ranks"),
    **dict.fromkeys(("over_stages", "send", "receive"), "between ranks"),
    "checked_index": "no float comes out",
    **dict.fromkeys(("conv", "conv_input_grad", "conv_weight_grad"), "sums of products"),
    **dict.fromkeys(("max_pool", "max_pool_grad", "max_pool_pick"), "moves"),
    "embedding_sgd_update": "embedding_grad, then sgd_update",
    "softmax_grad": "the gradient of softmax",
    **dict.fromkeys(("tanh_grad", "sigmoid_grad", "relu_grad", "gelu_grad", "silu_grad"), "same"),
    "layer_norm_grad": "same",
    **dict.fromkeys(("fused", "region"), "made of the others"),
    **dict.fromkeys(
        ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "argmax"),
        "no float comes out",
    ),
    **dict.fromkeys(
        ("cond", "scan", "while", "batch_norm", "batch_norm_grad"), "made of the others"
    ),
    **dict.fromkeys(("carry", "carry_sum", "assign", "hold", "handed_on", "last_place"), "moves"),
    **dict.fromkeys(("put_rows", "assign_rows"), "moves"),
    "weighted_mean": "a division by numbers from 0 up",
    **dict.fromkeys(
        (
            "bitwise_and",
            "bitwise_not",
            "bitwise_or",
            "bitwise_xor",
            "shift_left",
            "shift_right",
            "floor_divide",
            "flat_index",
            "random_bits",
            "argsort",
        ),
        "no float comes out",
    ),
    **dict.fromkeys(("floor", "ceil", "trunc", "sign"), "in the table of ops; no slope"),
    **dict.fromkeys(("recurrence", "square_sum"), "sums of products"),
    **dict.fromkeys(
        ("cholesky", "det", "eigh", "fft", "qr", "slogdet", "solve", "svd"), "LAPACK and pocketfft"
    ),
    **dict.fromkeys(
        (
            "adafactor_update",
            "adafactor_vector_update",
            "adagrad_update",
            "adam_update",
            "amsgrad_update",
            "approach",
            "damped_momentum_update",
            "decayed_step",
            "lamb_step",
            "lamb_update",
            "lion_update",
            "muon_step",
            "muon_update",
        ),
        "tests/oracle/test_optimizers.py, for gradients as they are",
    ),
    **dict.fromkeys(
        (
            "bce",
            "bce_with_logits",
            "clamp",
            "elu",
            "hardshrink",
            "hardtanh",
            "leaky_relu",
            "lerp",
            "log_softmax",
            "nll_rows",
            "prelu",
            "rms_norm",
            "round",
            "soft_cross_entropy_rows",
            "softplus",
            "softshrink",
            "standardised",
            "threshold",
            "weighted_cross_entropy_rows",
        ),
        "tests/oracle, for numbers of usual sizes",
    ),
    "atan2": "torch's slope is 0 where the squares of small numbers are",
    "dropout": "multiplies, as torch's does",
    "value_range": "moves and counts",
    "rescale": "one number, in the table of ops up to the largest",
    "joined_updates": "made of updates",
    **dict.fromkeys(("where", "cast", "concat", "pad", "embedding", "increment", "count"), "moves"),
    **dict.fromkeys(("copy", "copy_block", "copy_to", "stop_gradient", "to_sbp"), "moves"),
    **dict.fromkeys(("input", "variable", "non_finite", *VIEWS), "moves"),
}


@pytest.fixture(scope="module")
def torchs():
    with np.load(ranges.TABLE) as table:
        return dict(table)


def differentiated(name, dtype, arrays, attrs):
    """Return the graph of an op on operands cast to dtype, and of its gradients, cast back."""
    b = GraphBuilder()
    inputs = [
        b.emit_one(INPUT, name=str(i), dtype=str(x.dtype), shape=x.shape)
        for i, x in enumerate(arrays)
    ]
    given = [
        cast_to(b, v, DType(dtype)) if x.dtype.kind == "f" else v
        for v, x in zip(inputs, arrays, strict=True)
    ]
    first = len(list(b.nodes))
    made = b.emit(find_op(name), given, attrs)
    shape = b.type_of(made[0]).shape
    seed = b.emit_one(INPUT, name="seed", dtype=ranges.wide(dtype), shape=shape)
    nodes = list(b.nodes)[first:]
    grads = pull(b, nodes, {made[0]: cast_to(b, seed, DType(dtype))})
    wide = DType(ranges.wide(dtype))
    outputs = [made[0], *[grads[v] for v in dict.fromkeys(given) if v in grads]]
    b.outputs = [Output(str(i), cast_to(b, v, wide)) for i, v in enumerate(outputs)]
    feeds = {str(i): x for i, x in enumerate(arrays)}
    return b.freeze(), feeds | {"seed": np.full(shape, 1.0, ranges.wide(dtype))}


def evaluated(graph, feeds, path):
    """Return the outputs of a graph, launch by launch on a path."""
    if path == "reference":
        with np.errstate(all="ignore"):
            held = walked(graph.nodes, feeds)
        return [held[output.value] for output in graph.outputs]
    graph, held = fuse.run(graph), {}
    for node in graph.nodes:
        inputs = [held[v] for v in node.inputs]
        if node.op is INPUT:
            made = [feeds[node.attrs["name"]]]
        elif node.op.name in VIEWS:
            made = [np.array(x, order="C") for x in reference.get(node.op)(node.attrs, *inputs)]
        else:
            made = launched(node, [graph.types[v] for v in node.inputs], inputs, graph)
        held.update(zip(node.outputs, made, strict=True))
    return [held[output.value] for output in graph.outputs]


def launched(node, types, inputs, graph):
    results = [graph.types[v] for v in node.outputs]
    made = [t.dtype for t in results]
    outputs = [np.zeros(t.shape, numpy_dtype(t.dtype)) for t in results]
    given = typed([t.dtype for t in types], inputs)
    attrs = dict(node.attrs)
    name, needs = catalogue.select_kernel(launched_op(node.op), attrs, given, typed(made, outputs))
    space = garbage(needs.workspace_bytes)[0] if needs.workspace_bytes else None
    bind_to(catalogue.kernels_by_name()[name], attrs, tuple(inputs), tuple(outputs), space)()
    return outputs


def check(results, wanted, arrays, where):
    """Compare with torch: NaN only where it has one or where no number came, finite where it is."""
    for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
        lost = np.isnan(got) & ~np.isnan(want)
        rows = [tuple(x[i] for x in arrays) for i in np.unique(np.nonzero(lost)[0])[:6]]
        assert not lost.any(), f"{where}: NaN in result {number} of {rows}"
        least = np.finfo(got.dtype).max / 8 if got.dtype != np.float16 else 8000
        finite = np.isfinite(want) & (np.abs(want) < least)
        grown = finite & ~np.isfinite(got)
        rows = [tuple(x[i] for x in arrays) for i in np.unique(np.nonzero(grown)[0])[:6]]
        assert not grown.any(), f"{where}: infinite in result {number} of {rows}"


@pytest.mark.parametrize("dtype", ranges.DTYPES)
@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_a_nan_appears_only_where_torch_has_one(path, dtype, torchs):
    for name in ranges.NAMES:
        arrays = ranges.operands(name, dtype)
        wanted = [torchs[f"{name}/{dtype}/{i}"] for i in range(1 + len(arrays))]
        attrs = ranges.ROWS.get(name, {})
        if name == "layer_norm":
            ones = np.ones(3, arrays[0].dtype)
            arrays = (*arrays, ones, 0 * ones)
        if name == "cross_entropy_rows":
            arrays = (*arrays, np.ones(len(arrays[0]), np.int64))
        if (name, dtype, path == "reference") == ("pow", "float16", False):
            # Kernels compute halves in float32: there 6e-5 - 1 is no whole exponent.
            kept = (arrays[1] == 0) | ~(np.abs(arrays[1]) < 1e-3)
            arrays, wanted = [x[kept] for x in arrays], [y[kept] for y in wanted]
        graph, feeds = differentiated(name, dtype, arrays, attrs)
        results = evaluated(graph, feeds, path)
        check(results[: len(wanted)], wanted, arrays[:2], f"{name} of {dtype} on {path}")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("path", ["reference", "numpy", "native"], indirect=True)
@pytest.mark.parametrize("name", ranges.UPDATES)
def test_an_update_makes_no_nan_where_torchs_makes_none(name, path, dtype, torchs):
    param, grad = ranges.operands(name, dtype)
    states = {"sgd_update": 0, "momentum_update": 1, "adamw_update": 2}[name]
    b = GraphBuilder()
    arrays = [param, grad, *[np.zeros_like(param)] * states, np.array(0.1, dtype)]
    if name == "adamw_update":
        arrays.append(np.array(0, np.int64))
    values = [
        b.emit_one(INPUT, name=str(i), dtype=str(x.dtype), shape=x.shape)
        for i, x in enumerate(arrays)
    ]
    b.outputs = [Output("0", b.emit(find_op(name), values, ranges.UPDATES[name])[0])]
    feeds = {str(i): x.copy() for i, x in enumerate(arrays)}
    results = evaluated(b.freeze(), feeds, path)
    check(results, [torchs[f"{name}/{dtype}/0"]], (param, grad), f"{name} of {dtype} on {path}")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_gated_units_are_0_at_minus_infinity_and_have_slopes_of_0_or_1_far_out(name, path, dtype):
    largest = 3e38 if dtype != "float64" else 1e308
    x = np.array([-np.inf, -largest, -1e18, -1e13, 1e13, 1e18, largest, np.inf])
    x = x.astype(ranges.wide(dtype))
    graph, feeds = differentiated(name, dtype, (x,), {})
    y, slopes = evaluated(graph, feeds, path)
    np.testing.assert_array_equal(y[:4], 0)
    np.testing.assert_allclose(y[4:], x[4:], rtol=1e-2 if dtype == "bfloat16" else 1e-6)
    np.testing.assert_array_equal(slopes, [0, 0, 0, 0, 1, 1, 1, 1])


def test_every_op_of_floats_is_here_or_somewhere_else():
    families = standard_ops.FAMILIES
    ops = {op.name for family in families for op in vars(family).values() if isinstance(op, Op)}
    assert sorted(ops - {*ranges.NAMES, *ranges.UPDATES, *ELSEWHERE}) == []
