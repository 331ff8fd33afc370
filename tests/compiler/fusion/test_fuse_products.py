import numpy as np
import pytest
from graphs import Net, launches

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.program import Kind
from compiler.contract.region import TileStepKind
from compiler.fusion import fuse
from compiler.fusion.regions import fuse_products
from compiler.graph.graph import Output
from compiler.ops.families.activation import GELU, RELU
from compiler.ops.families.arithmetic import ADD, MUL, SUB
from compiler.ops.families.normalisation import LAYER_NORM
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import RESHAPE
from compiler.pipeline.rewrites import check
from compiler.storage import order

M, K, N = 6, 5, 8


def product(net):
    return net.b.emit_one(MATMUL, net.input(M, K), net.input(K, N))


@pytest.fixture
def net():
    return Net()


def fused(net, evaluate, **results):
    """Run the pass with products, check all results, and return the ops of the launches."""
    net.b.outputs = [Output(name, value) for name, value in results.items()]
    graph = net.b.freeze()
    after = check(fuse_products(fuse.run(graph)), "fuse")
    got, expected = evaluate(after, net.feeds)[0], evaluate(graph, net.feeds)[0]
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, 1e-10, 1e-12, err_msg=name)
    check(order.run(after), "order")
    return after


def names(graph):
    return [n.op.name for n in launches(graph)]


def test_bias_and_activation_go_along_with_the_product(net, evaluate):
    h = net.b.emit_one(GELU, net.b.emit_one(ADD, product(net), net.input(N)))
    after = fused(net, evaluate, h=h)
    (node,) = launches(after)
    assert node.op.name == "region"
    assert node.attrs["members"] == ("matmul", "add", "gelu")
    region = node.attrs["region"]
    assert [step.kind for step in region.steps] == [TileStepKind.PRODUCT, TileStepKind.PROGRAM]
    assert (region.rows, region.columns, region.chunk_rows) == (M, N, 0)
    assert [i.kind for i in region.steps[1].program.inputs] == [Kind.FULL, Kind.COLUMN]


def test_the_product_goes_along_wherever_the_program_reads_it(net, evaluate):
    first = net.b.emit_one(GELU, net.input(M, N))
    second = net.b.emit_one(MATMUL, net.b.emit_one(MATMUL, first, net.input(N, K)), net.input(K, N))
    after = fused(net, evaluate, h=net.b.emit_one(SUB, first, second))
    assert names(after) == ["fused", "matmul", "region"]
    node = launches(after)[-1]
    assert node.attrs["members"] == ("matmul", "sub")
    region = node.attrs["region"]
    assert region.steps[1].reads.index(region.num_inputs) == 1


def test_residual_norm_and_column_sums_go_along_too(net, evaluate):
    x = net.b.emit_one(
        ADD, net.b.emit_one(RESHAPE, product(net), shape=(2, 3, N)), net.input(2, 3, N)
    )
    y, *_, rstd = net.b.emit(LAYER_NORM, (x, net.input(N), net.input(N)), {"eps": 1e-5})
    total = net.b.emit_one(SUM, x, axes=(0, 1), keepdims=False)
    after = fused(net, evaluate, x=x, y=y, rstd=rstd, total=total)
    assert names(after) == ["region"]


def test_a_flat_group_takes_the_rows_and_columns_of_its_product(net, evaluate):
    after = fused(net, evaluate, h=net.b.emit_one(RELU, product(net)))
    (node,) = launches(after)
    assert (node.attrs["region"].rows, node.attrs["region"].columns) == (M, N)


def test_of_two_products_one_stays(net, evaluate):
    after = fused(net, evaluate, h=net.b.emit_one(MUL, product(net), product(net)))
    assert names(after) == ["matmul", "region"]


def test_a_product_that_others_read_stays(net, evaluate):
    y = product(net)
    h = net.b.emit_one(GELU, y)
    after = fused(net, evaluate, h=h, again=net.b.emit_one(MATMUL, y, net.input(N, K)))
    assert sorted(names(after)) == ["fused", "matmul", "matmul"]


def test_a_product_that_the_job_returns_stays(net, evaluate):
    y = product(net)
    assert names(fused(net, evaluate, y=y, h=net.b.emit_one(GELU, y))) == ["matmul", "fused"]


def test_products_of_batches_and_repeated_ones_stay(net, evaluate):
    batch = net.b.emit_one(MATMUL, net.input(2, M, K), net.input(2, K, N))
    tall = net.b.emit_one(ADD, net.input(3, M, N), product(net))
    after = fused(net, evaluate, h=net.b.emit_one(GELU, batch), tall=tall)
    assert sorted(names(after)) == ["fused", "fused", "matmul", "matmul"]


def test_without_the_switch_products_stay(net):
    net.b.outputs = [Output("h", net.b.emit_one(GELU, product(net)))]
    assert names(fuse.run(net.b.freeze())) == ["matmul", "fused"]
