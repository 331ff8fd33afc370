"""Where a product's kernel goes on from what the backward pass keeps, and where it does not."""

import numpy as np
import pytest
from graphs import Net, descend

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.fusion import fuse
from compiler.fusion.fuse import epilogue_saved_values
from compiler.fusion.members import FusionCandidates
from compiler.fusion.regions import fuse_products
from compiler.ops.families.activation import GELU, SILU
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check

M, K, N = 6, 5, 8


def goes_on(device):
    return ("gelu",)


class Layers(Net):
    """Two layers, trained; what comes between the products is added to by `between`."""

    def trained(self, between):
        w, bias, v = self.variable(K, N), self.variable(N), self.variable(N, K)
        self.h = self.b.emit_one(ADD, self.b.emit_one(MATMUL, self.input(M, K), w), bias)
        out = self.b.emit_one(MATMUL, between(self.h), v)
        loss = self.b.emit_one(MEAN, out, axes=(0, 1), keepdims=False)
        descend(self.b, loss, [w, bias, v], every=1)
        self.feeds["batches"] = np.array(0)
        return batches.copy_outputs(
            batches.split_rates(simplify.simplify_graph(autodiff.differentiate(self.b.freeze())))
        )


def prepared(graph):
    """Return the graph as `fuse` gets it."""
    return fuse.stage_reductions(graph)


@pytest.fixture
def net():
    return Layers()


def launches_of(graph):
    return [n.attrs["members"] for n in graph.nodes if n.op.name in ("fused", "region")]


def test_a_product_goes_on_to_what_a_device_says_and_runs_as_one_launch(net, evaluate):
    graph = net.trained(lambda h: net.b.emit_one(GELU, h))
    ends = fuse.fuse_launches(prepared(graph), ends_at_saved=True)
    assert launches_of(ends)[:2] == [("add",), ("gelu",)]
    after = check(fuse.fuse_launches(prepared(graph), ends_at_saved=True, finishes=goes_on), "fuse")
    assert launches_of(after)[0] == ("add", "gelu")
    assert launches_of(fuse_products(after))[0] == ("matmul", "add", "gelu")
    for got, expected in zip(evaluate(after, net.feeds), evaluate(graph, net.feeds), strict=True):
        for name, array in expected.items():
            np.testing.assert_allclose(got[name], array, 1e-12, err_msg=name)


def test_devices_that_end_at_what_is_kept_say_so_and_the_graph_is_that_of_before(net):
    graph = prepared(net.trained(lambda h: net.b.emit_one(GELU, h)))
    assert epilogue_saved_values(FusionCandidates(graph), lambda device: ()) == frozenset()
    assert epilogue_saved_values(FusionCandidates(graph), lambda device: ("silu",)) == frozenset()
    assert len(epilogue_saved_values(FusionCandidates(graph), goes_on)) == 1


OTHERWISE = {
    "another op": lambda net, h: net.b.emit_one(SILU, h),
    "a gate beside it": lambda net, h: net.b.emit_one(
        MUL, net.b.emit_one(GELU, h), net.input(M, N)
    ),
    "another reader of what is kept": lambda net, h: net.b.emit_one(
        ADD, net.b.emit_one(GELU, h), h
    ),
    "no sum with a product": lambda net, h: net.b.emit_one(GELU, net.b.emit_one(MUL, h, h)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_else_a_cluster_ends_at_what_is_kept(net, name):
    graph = prepared(net.trained(lambda h: OTHERWISE[name](net, h)))
    assert epilogue_saved_values(FusionCandidates(graph), goes_on) == frozenset()
