import numpy as np
import pytest

from compiler.attrs import Attrs
from compiler.graph import Output, SourceLocation, UpdateRule
from compiler.lowering.storage import assign_storage
from compiler.ops.attention import ATTENTION
from compiler.ops.matmul import MATMUL
from compiler.ops.packed_attention import PACKED_ATTENTION
from compiler.ops.reduce import SUM
from compiler.ops.shape import RESHAPE, STOP_GRADIENT, TRANSPOSE
from compiler.ops.slicing import SLICE
from compiler.ops.sources import VARIABLE
from compiler.ops.split import SPLIT
from compiler.ops.update import SGD_UPDATE
from compiler.passes import autodiff, pack_attention, simplify
from compiler.passes.check import check

BATCH, ROWS, HEADS, WIDTH = 2, 4, 3, 5
DIM = HEADS * WIDTH
HERE = SourceLocation("model.py", 12)


def packed(graph):
    return simplify.run(check(pack_attention.run(graph), "pack_attention"))


def launches_of(graph):
    storage = assign_storage(graph)
    return [
        str(n.op) for n, is_launch in zip(graph.nodes, storage.is_launch, strict=True) if is_launch
    ]


def to_heads(b, x):
    """Return [B, T, H D] as [B, H, T, D]."""
    split = b.one(RESHAPE, x, shape=(BATCH, ROWS, HEADS, WIDTH))
    return b.one(TRANSPOSE, split, perm=(0, 2, 1, 3))


def cut_after_a_transpose(b, x):
    together = b.one(RESHAPE, x, shape=(BATCH, ROWS, 3, HEADS, WIDTH))
    parts = b.emit(SPLIT, (b.one(TRANSPOSE, together, perm=(2, 0, 3, 1, 4)),), SPLIT_FIRST)
    return [b.one(RESHAPE, part, shape=(BATCH, HEADS, ROWS, WIDTH)) for part in parts]


def cut_the_last_axis(b, x):
    parts = b.emit(SPLIT, (x,), {"axis": x_rank(b, x) - 1, "sections": 3})
    return [to_heads(b, part) for part in parts]


def slice_the_last_axis(b, x):
    rank = x_rank(b, x)
    shape = b.type_of(x).shape
    cut = []
    for place in range(3):
        starts = (*(0,) * (rank - 1), place * DIM)
        stops = (*shape[:-1], (place + 1) * DIM)
        cut.append(b.one(SLICE, x, starts=starts, stops=stops, steps=(1,) * rank))
    return [to_heads(b, part) for part in cut]


def x_rank(b, x):
    return b.type_of(x).rank


SPLIT_FIRST = {"axis": 0, "sections": 3}

CUTS = {
    "split after a transpose": cut_after_a_transpose,
    "split of the last axis": cut_the_last_axis,
    "slices of the last axis": slice_the_last_axis,
}


def model(sketch, cut, x, swap=(0, 1, 2)):
    """Add attention of heads cut from a projection, and the joined heads; returns them."""
    b = sketch.b
    weight = sketch.variable("weight", (DIM, 3 * DIM))
    parts = cut(b, b.one(MATMUL, x, weight))
    with b.at("blocks.0.attn", HERE):
        y, _ = b.emit(ATTENTION, [parts[i] for i in swap], {"scale": 0.5, "causal": True})
    return b.one(RESHAPE, b.one(TRANSPOSE, y, perm=(0, 2, 1, 3)), shape=(BATCH, ROWS, DIM))


def feeds(shape=(BATCH, ROWS, DIM)):
    rng = np.random.default_rng(0)
    made = {"x": shape, "weight": (DIM, 3 * DIM)}
    return {name: rng.standard_normal(extents) for name, extents in made.items()}


@pytest.mark.parametrize("shape", [(BATCH, ROWS, DIM), (BATCH * ROWS, DIM)], ids=["3-d", "2-d"])
@pytest.mark.parametrize("name", CUTS)
def test_heads_are_read_and_written_where_projections_want_them(name, shape, sketch, evaluate):
    joined = model(sketch, CUTS[name], sketch.input("x", shape))
    sketch.b.outputs = [Output("y", sketch.b.one(MATMUL, joined, sketch.input("w", (DIM, 2))))]
    graph = sketch.b.freeze()
    smaller = packed(graph)
    assert launches_of(smaller) == ["matmul", "packed_attention", "matmul"]
    (node,) = [node for node in smaller.nodes if node.op is PACKED_ATTENTION]
    assert dict(node.attrs) == {"scale": 0.5, "causal": True}
    assert (node.scope, node.source) == ("blocks.0.attn", HERE)
    values = feeds(shape) | {"w": np.random.default_rng(1).standard_normal((DIM, 2))}
    before, after = (evaluate(g, values)[0]["y"] for g in (graph, smaller))
    np.testing.assert_allclose(after, before, rtol=1e-12)


@pytest.mark.parametrize("name", CUTS)
def test_gradients_stay_and_no_launch_moves_heads(name, sketch, evaluate):
    b = sketch.b
    x = sketch.variable("x", (BATCH, ROWS, DIM))
    joined = model(sketch, CUTS[name], x)
    square = b.one(MATMUL, joined, b.one(TRANSPOSE, joined, perm=(0, 2, 1)))
    b.objective = b.one(SUM, square, axes=(0, 1, 2), keepdims=False)
    variables = [node.outputs[0] for node in b.nodes if node.op is VARIABLE]
    rate = sketch.constant(np.array(1.0))
    attrs = Attrs({"weight_decay": 0.0})
    b.updates = [UpdateRule(SGD_UPDATE, v, (), (rate,), attrs) for v in variables]
    graph = b.freeze()
    before, after = (autodiff.run(g) for g in (graph, pack_attention.run(graph)))
    moved = {"copy", "concat", "split", "reshape", "pad", "slice", "transpose"}
    assert moved.intersection(launches_of(simplify.run(before)))
    assert not moved.intersection(launches_of(simplify.run(after)))
    expected, written = (evaluate(g, feeds())[1] for g in (before, after))
    assert set(expected) == {"x", "weight"}
    for variable, value in expected.items():
        np.testing.assert_allclose(written[variable], value, rtol=1e-10, err_msg=variable)


LEFT_ALONE = {
    "keys before queries": lambda s, x: model(s, cut_the_last_axis, x, swap=(1, 0, 2)),
    "one part for two": lambda s, x: model(s, cut_the_last_axis, x, swap=(0, 1, 1)),
    "parts behind a stop of the gradient": lambda s, x: model(
        s, lambda b, y: [b.one(STOP_GRADIENT, p) for p in cut_the_last_axis(b, y)], x
    ),
    "heads inside of the parts": lambda s, x: model(s, heads_first, x),
}


def heads_first(b, x):
    """Cut [B, T, H, 3, D], where each head has its own q, k and v beside each other."""
    together = b.one(RESHAPE, x, shape=(BATCH, ROWS, HEADS, 3, WIDTH))
    parts = b.emit(SPLIT, (b.one(TRANSPOSE, together, perm=(3, 0, 2, 1, 4)),), SPLIT_FIRST)
    return [b.one(RESHAPE, part, shape=(BATCH, HEADS, ROWS, WIDTH)) for part in parts]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_layouts_are_left_alone(name, sketch):
    y = LEFT_ALONE[name](sketch, sketch.input("x", (BATCH, ROWS, DIM)))
    sketch.b.outputs = [Output("y", y)]
    graph = sketch.b.freeze()
    assert pack_attention.run(graph) is graph


def test_three_projections_are_left_alone(sketch):
    q, k, v = (sketch.input(name, (BATCH, HEADS, ROWS, WIDTH)) for name in "qkv")
    y, _ = sketch.b.emit(ATTENTION, (q, k, v), {"scale": 1.0, "causal": False})
    sketch.b.outputs = [Output("y", y)]
    graph = sketch.b.freeze()
    assert pack_attention.run(graph) is graph


def test_a_part_of_a_wider_projection_is_left_alone(sketch):
    def cut(b, x):
        wide = b.one(MATMUL, x, sketch.input("wide", (3 * DIM, 4 * DIM)))
        return slice_the_last_axis(b, wide)

    y = model(sketch, cut, sketch.input("x", (BATCH, ROWS, DIM)))
    sketch.b.outputs = [Output("y", y)]
    graph = sketch.b.freeze()
    assert pack_attention.run(graph) is graph


def test_other_readers_of_a_part_keep_what_they_read(sketch, evaluate):
    kept = []

    def cut(b, x):
        parts = cut_after_a_transpose(b, x)
        kept.append(b.one(SUM, parts[1], axes=(2,), keepdims=False))
        return parts

    y = model(sketch, cut, sketch.input("x", (BATCH, ROWS, DIM)))
    sketch.b.outputs = [Output("y", y), Output("kept", kept[0])]
    graph = sketch.b.freeze()
    smaller = packed(graph)
    assert "packed_attention" in launches_of(smaller)
    before, after = (evaluate(g, feeds())[0] for g in (graph, smaller))
    np.testing.assert_allclose(after["y"], before["y"], rtol=1e-12)
    np.testing.assert_array_equal(after["kept"], before["kept"])


def test_a_second_run_changes_nothing(sketch):
    y = model(sketch, cut_the_last_axis, sketch.input("x", (BATCH, ROWS, DIM)))
    sketch.b.outputs = [Output("y", y)]
    once = pack_attention.run(sketch.b.freeze())
    assert any([node.op is PACKED_ATTENTION for node in once.nodes])
    assert pack_attention.run(once) is once
