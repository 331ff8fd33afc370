"""Which values exist by the chunk, and that a region computes what its nodes did."""

import numpy as np
import pytest
from graphs import Net, WideFrom

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.region import TileStepKind
from compiler.fusion import fuse, regions
from compiler.graph.graph import Output, gradient
from compiler.graph.target import WIDE_IN_CACHE
from compiler.ops.families.activation import GELU
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.families.loss import CROSS_ENTROPY_ROWS
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN, SUM
from compiler.ops.primitives.shape import reshape_to, swap_last_axes
from compiler.ops.primitives.transfer import ALL_REDUCE
from compiler.pipeline.rewrites import check

ROWS, WIDTH, COLUMNS = 12, 3, 20


def loss(net, results, *, bias=False, turned=False, factor=None):
    """A loss with its gradients; `factor` of the losses' gradient may be their own mean."""
    b = net.b
    x, w = net.input(3, ROWS // 3, WIDTH), net.input(COLUMNS, WIDTH)
    labels = net.labels(ROWS, below=COLUMNS)
    wide = b.emit_one(MATMUL, x, swap_last_axes(b, w))
    wide = b.emit_one(ADD, wide, net.input(COLUMNS)) if bias else wide
    logits = reshape_to(b, wide, (ROWS, COLUMNS))
    losses, *_ = b.emit(CROSS_ENTROPY_ROWS, (logits, labels))
    results["loss"] = b.emit_one(MEAN, losses, axes=(0,), keepdims=False)
    seed = net.input(ROWS)
    seed = b.emit_one(MUL, seed, results["loss"]) if factor == "loss" else seed
    d, _ = gradient.get(CROSS_ENTROPY_ROWS)(b, b.producer_of(losses), (seed, None, None))
    flat = reshape_to(b, x, (ROWS, WIDTH))
    results["dx"] = b.emit_one(MATMUL, d, w)
    if turned:
        results["dw"] = b.emit_one(MATMUL, swap_last_axes(b, flat), d)
    else:
        results["dw"] = b.emit_one(MATMUL, swap_last_axes(b, d), flat)
    if bias:
        results["db"] = b.emit_one(SUM, d, axes=(0,), keepdims=False)
    return logits


def hidden(net, results):
    """A wide hidden layer between two products."""
    wide = net.b.emit_one(MATMUL, net.input(ROWS, WIDTH), net.input(WIDTH, COLUMNS))
    results["y"] = net.b.emit_one(MATMUL, net.b.emit_one(GELU, wide), net.input(COLUMNS, WIDTH))
    return wide


def chunked(net, results, evaluate, limit=0):
    """Run the pass, compare all results, and return the regions."""
    net.b.outputs = [Output(name, value) for name, value in results.items()]
    graph = fuse.run(net.b.freeze())
    after = check(regions.run(graph, WideFrom(limit, 5)), "chunk_wide")
    want, _ = evaluate(graph, net.feeds)
    got, _ = evaluate(after, net.feeds)
    for name in results:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, atol=1e-12)
    return [node.attrs["region"] for node in after.nodes if node.op.name == "region"]


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"turned": True}], ids=str)
def test_a_loss_and_its_gradients_are_one_region(options, evaluate):
    net, results = Net(), {}
    loss(net, results, **options)
    (region,) = chunked(net, results, evaluate)
    assert (region.rows, region.columns, region.chunk_rows) == (ROWS, COLUMNS, 5)
    kinds = [step.kind for step in region.steps]
    assert kinds.count(TileStepKind.PROGRAM) == 1
    assert (TileStepKind.COLUMN_SUM in kinds) == bool(options.get("bias"))


def test_a_gradient_that_needs_the_loss_is_a_second_region(evaluate):
    net, results = Net(), {}
    loss(net, results, factor="loss")
    first, second = chunked(net, results, evaluate)
    assert [step.kind for step in first.steps] == [TileStepKind.PRODUCT, TileStepKind.PROGRAM]
    assert len(second.steps) == 4


def test_a_wide_hidden_layer_is_a_region(evaluate):
    net, results = Net(), {}
    hidden(net, results)
    (region,) = chunked(net, results, evaluate)
    assert len(region.steps) == 3


@pytest.mark.parametrize("make", [loss, hidden])
def test_a_value_that_something_else_needs_has_to_exist(make, evaluate):
    for reader in ("output", "other rows"):
        net, results = Net(), {}
        wide = make(net, results)
        if reader == "other rows":
            results["read"] = net.b.emit_one(MATMUL, net.input(2, ROWS), net.b.emit_one(
                ADD, wide, net.input(ROWS, COLUMNS)))  # fmt: skip
        else:
            results["read"] = wide
        assert not [r for r in chunked(net, results, evaluate) if r.columns == COLUMNS]


def test_a_region_that_reads_what_is_made_after_its_first_node_may_be_that_of_a_rank():
    net, results = Net(), {}
    loss(net, results)
    turn = {"num_ranks": 2, "group": "data", "bucket": 0, "order": 0, "by": "sum"}
    net.b.outputs = [
        Output("dw", results["dw"]),
        Output("dx", net.b.emit_one(ALL_REDUCE, results["dx"], **turn)),
    ]
    after = check(regions.run(fuse.run(net.b.freeze()), WideFrom(0, 5)), "chunk_wide")
    assert [node.op.name for node in after.nodes].count("region") == 1


def test_small_values_stay(evaluate):
    net, results = Net(), {}
    loss(net, results)
    assert not chunked(net, results, evaluate, limit=ROWS * COLUMNS * 8)


@pytest.mark.parametrize(
    ("rows", "row_bytes", "chosen"),
    [
        (1024, 50_257 * 4, 205),  # 48 MiB at most, and five even chunks
        (4096, 8_192 * 4, 512),
        (4096, 64, 4096),  # 4 MiB at least
        (7, 1 << 40, 1),
    ],
)
def test_chunks_are_even_and_bounded_by_bytes(rows, row_bytes, chosen):
    assert WIDE_IN_CACHE.choose_chunk_rows(rows, row_bytes) == chosen


def test_what_is_wide_follows_from_the_device_of_the_product(evaluate):
    for wide_on, count in ((0, 1), (1, 0)):
        net, results = Net(), {}
        loss(net, results)
        net.b.outputs = [Output(name, value) for name, value in results.items()]
        graph = fuse.run(net.b.freeze())
        limits = {wide_on: WideFrom(0, 5), 1 - wide_on: WideFrom(1 << 40, 5)}
        after = regions.run(graph, limits.get)
        assert [node.op.name for node in after.nodes].count("region") == count
