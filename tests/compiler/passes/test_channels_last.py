from dataclasses import replace

import numpy as np
import pytest

import actorflow as af
import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from actorflow import nn
from actors.kernels.library import onednn
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import one_device
from compiler.ops.families.arithmetic import ADD, MUL, SUB
from compiler.ops.primitives.convolution import (
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    MAX_POOL,
    MAX_POOL_GRAD,
)
from compiler.ops.primitives.reduce import MEAN, SUM
from compiler.ops.primitives.shape import BROADCAST_TO, COPY, RESHAPE
from compiler.ops.primitives.sources import INPUT
from compiler.passes import channels_last
from compiler.pipeline.rewrites import check

WAYS = {"strides": (1, 1), "low": (1, 1), "high": (1, 1), "dilation": (1, 1)}
POOL = {"kernel": (2, 2), "strides": (2, 2), "low": (0, 0), "high": (0, 0), "dilation": (1, 1)}


def target_that_likes(fake_target, *, channels_last):
    """Return hardware whose convolutions take 1 ns where channels lie as it likes, else 2."""
    (target,) = fake_target.targets

    class Choosy(type(target)):
        def query(self, call):
            image = call.inputs[0]
            is_last = image.layout.strides_bytes[1] == image.type.dtype.itemsize
            info = super().query(call)
            return replace(info, duration_ns=1.0 if is_last == channels_last else 2.0)

    return one_device(Choosy())


def residual_block(b):
    """Return the results of a block with its statistics, pool and gradients, and feeds."""
    x = b.emit_one(INPUT, name="x", dtype="float64", shape=(3, 4, 6, 6))
    weight = b.emit_one(INPUT, name="w", dtype="float64", shape=(4, 4, 3, 3))
    bias = b.emit_one(INPUT, name="b", dtype="float64", shape=(4, 1, 1))
    shift = b.emit_one(INPUT, name="s", dtype="float64", shape=(3, 4, 6, 6))
    y = b.emit_one(ADD, b.emit_one(CONV, x, weight, **WAYS, groups=1), bias)
    flat = b.emit_one(RESHAPE, y, shape=(3, 4, 36))
    mean = b.emit_one(RESHAPE, b.emit_one(MEAN, flat, axes=(0, 2), keepdims=False), shape=(1, 4, 1))
    h = b.emit_one(RESHAPE, b.emit_one(SUB, flat, mean), shape=(3, 4, 6, 6))
    h = b.emit_one(ADD, b.emit_one(MUL, h, h), shift)
    z = b.emit_one(ADD, b.emit_one(CONV, h, weight, **WAYS, groups=1), y)
    pooled, taps = b.emit(MAX_POOL, (z,), POOL)
    each = b.emit_one(MEAN, pooled, axes=(2, 3), keepdims=True)
    spread = b.emit_one(MUL, b.emit_one(BROADCAST_TO, each, shape=(3, 4, 3, 3)), pooled)
    slope = b.emit_one(MAX_POOL_GRAD, spread, taps, **POOL, spatial=(6, 6))
    to_weight = b.emit_one(CONV_WEIGHT_GRAD, h, slope, **WAYS, groups=1, kernel=(3, 3))
    to_input = b.emit_one(CONV_INPUT_GRAD, slope, weight, **WAYS, groups=1, spatial=(6, 6))
    made = {
        "z": z,
        "rows": b.emit_one(RESHAPE, pooled, shape=(3, 36)),
        "kept": b.emit_one(SUM, z, axes=(3,), keepdims=False),
        "sum": b.emit_one(SUM, to_input, axes=(0, 1, 2, 3), keepdims=False),
        "each": each,
        "weight": to_weight,
        "input": b.emit_one(MUL, to_input, y),
    }
    b.outputs = [Output(name, value) for name, value in made.items()]
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 4, 6, 6), "w": (4, 4, 3, 3), "b": (4, 1, 1), "s": (3, 4, 6, 6)}
    return b.freeze(), {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_a_graph_with_channels_last_has_the_same_values(fake_target, evaluate):
    graph, feeds = residual_block(GraphBuilder())
    likes = target_that_likes(fake_target, channels_last=True)
    after = check(channels_last.put_channels_last(graph, likes), "channels_last")
    got, expected = evaluate(after, feeds)[0], evaluate(graph, feeds)[0]
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, 1e-9, 1e-9)
    for op in (ADD, MUL, SUB):
        shapes = [after.types[n.outputs[0]].shape for n in after.nodes if n.op is op]
        assert shapes
        assert all([shape[-1] == 4 for shape in shapes])
    windows = (CONV, CONV_INPUT_GRAD, MAX_POOL, MAX_POOL_GRAD)
    made = [v for n in after.nodes if n.op in windows for v in n.outputs]
    assert len([n for n in after.nodes if n.op is COPY]) <= len(made)


def test_a_graph_stays_as_it_is_where_kernels_like_it_so(fake_target):
    graph, _ = residual_block(GraphBuilder())
    assert (
        channels_last.put_channels_last(graph, target_that_likes(fake_target, channels_last=False))
        is graph
    )


class Block(nn.Module):
    def __init__(self):
        self.convs = [nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(3)]
        self.norms = [nn.BatchNorm2d(32) for _ in range(3)]
        self.head = nn.Linear(32, 5)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = af.relu(norm(conv(x)) + x)
        return self.head(af.max_pool2d(x, 2).mean((2, 3)))


@pytest.mark.usefixtures("native")
def test_a_chain_of_convolutions_moves_nothing_but_what_it_is_fed():
    if not onednn.is_available():
        pytest.skip("convolutions of hosts are oneDNN's, which is not here")

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    class Batches:
        def spec(self):
            image = af.TensorType(af.DType.FLOAT32, (8, 32, 16, 16))
            return {"x": image, "y": af.TensorType(af.DType.INT64, (8,))}

    plan = train.compile(Block(), Batches())
    launches = [launch for actor in plan.actors for launch in actor.launches]
    kernels = [launch.kernel for launch in launches]
    assert kernels.count("onednn.conv") == 3
    assert [launch.op for launch in launches].count("copy") <= 1
