"""Mixed precision casts what a user calls a product; pools and resizing are none."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.tensor.tracer import PRODUCTS as PRODUCTS_BY_NAME
from compiler.contract.errors import CompileError
from compiler.graph.registry import all_ops
from compiler.passes.precision import Width
from compiler.passes.precision import precision as precision_of

PIXELS = (np.arange(3 * 16 * 16).reshape(1, 3, 16, 16) % 256).astype(np.float32)

RESIZED = {
    "avg_pool1d": lambda x: af.avg_pool1d(x.flatten(2), 3, 1, 1),
    "avg_pool2d": lambda x: af.avg_pool2d(x, 3, 1, 1),
    "avg_pool3d": lambda x: af.avg_pool3d(x.reshape(1, 3, 4, 8, 8), 2),
    "adaptive": lambda x: af.adaptive_avg_pool2d(x, 4),
    "adaptive of odd windows": lambda x: af.adaptive_avg_pool2d(x, 5),
    "linear": lambda x: af.interpolate(x.flatten(2), size=50, mode="linear"),
    "bilinear": lambda x: af.interpolate(x, size=7, mode="bilinear"),
    "bicubic": lambda x: af.interpolate(x, size=7, mode="bicubic"),
    "trilinear": lambda x: af.interpolate(x.reshape(1, 3, 4, 8, 8), size=3, mode="trilinear"),
    "area": lambda x: af.interpolate(x, size=7, mode="area"),
    "mean": lambda x: x.mean((2, 3)),
}


class Net(nn.Module):
    def __init__(self):
        self.w = nn.Linear(1, 1)


def outputs(precision, function):
    """Return what a training job computes, and the gradient of a sum of squares of it."""

    def train(model, b):
        y = function(b.x)
        slope = af.grad((y * y).sum(), [b.x])[0]
        return {"loss": model.w(b.x[0, 0, 0, :1]).sum() * 0, "y": y, "dx": slope}

    scale = {"loss_scale": 1.0} if precision == "fp16" else {}
    job = af.job(train, optimizer=af.optim.SGD(0.0), precision=precision, **scale)
    model = Net()
    made = job.step(model, {"x": PIXELS})
    job.close(model)
    return {name: np.asarray(made[name]) for name in ("y", "dx")}


@pytest.mark.parametrize("name", RESIZED)
def test_pools_and_resizing_are_float32_in_every_precision(name):
    whole = outputs("fp32", RESIZED[name])
    for precision in ("bf16", "fp16"):
        for what, y in outputs(precision, RESIZED[name]).items():
            where = f"{what} in {precision}"
            np.testing.assert_allclose(y, whole[what], 1e-6, 1e-3, err_msg=where)


def test_products_of_the_user_are_rounded_by_a_constant_too():
    table = np.eye(16, dtype=np.float32) * np.float32(1.001)
    found = [outputs(p, lambda x: x @ table)["y"] for p in ("fp32", "bf16")]
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_a_pool_of_large_numbers_does_not_overflow_float16():
    class Pooled(nn.Module):
        def __init__(self):
            self.c = nn.Conv2d(3, 2, 1)

        def __call__(self, x):
            return af.avg_pool2d(af.relu(self.c(x)) + 500.0, 16).flatten(1)

    @af.job(optimizer=af.optim.SGD(1e-6), precision="fp16", loss_scale=1.0)
    def train(model, b):
        wide = af.interpolate(b.x + 1e5, size=7, mode="bilinear")
        return {
            "loss": model(b.x).mean() * 1e-3,
            "pool": af.avg_pool2d(b.x + 500.0, 16)[0, 0],
            "wide": wide[0, 0],
        }

    model = Pooled()
    made = train.step(model, {"x": np.zeros((2, 3, 32, 32), np.float32)})
    train.close(model)
    np.testing.assert_allclose(made["pool"], 500.0)
    np.testing.assert_allclose(made["wide"], 1e5)
    assert made["loss"] == pytest.approx(0.5, abs=0.01)


MATRIX = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
IMAGE = np.random.default_rng(1).standard_normal((3, 3, 3, 3)).astype(np.float32)


def attended(x):
    q = x.reshape(3, 16, 16) * 0.01
    return af.softmax(q @ q.transpose(-1, -2), -1) @ q


PRODUCTS = {
    "matmul": lambda x: x @ MATRIX,
    "conv2d": lambda x: af.conv2d(x, IMAGE),
    "conv_transpose2d": lambda x: af.conv_transpose2d(x, IMAGE),
    "attention": lambda x: af.scaled_dot_product_attention(x * 0.01, x * 0.01, x),
    "attention of products": attended,
    "in a scan": lambda x: af.scan(lambda c, row: (c, row @ MATRIX), None, x[0])[1],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_a_region_are_float32_in_every_precision(name):
    def kept(x):
        with af.precision("fp32"):
            return PRODUCTS[name](x)

    whole, rounded = outputs("fp32", PRODUCTS[name]), outputs("bf16", PRODUCTS[name])
    for precision in ("bf16", "fp16"):
        for what, y in outputs(precision, kept).items():
            where = f"{what} in {precision}"
            np.testing.assert_allclose(y, whole[what], 1e-5, 1e-3, err_msg=where)
    assert np.abs(rounded["dx"] - whole["dx"]).max() > 1e-3  # or the region would show nothing


def test_a_region_ends_where_it_ends():
    def half(x):
        with af.precision("fp32"):
            y = x @ MATRIX
        return y @ MATRIX

    whole, kept = [outputs(precision, half)["y"] for precision in ("fp32", "bf16")]
    assert np.abs(whole - kept).max() > 0.1


def test_the_ops_that_a_region_keeps_are_those_that_a_job_in_16_bits_rounds():
    rounded = {op.name for op in all_ops() if precision_of.get(op).width is Width.LOW}
    assert {*PRODUCTS_BY_NAME, "attention_grad"} == rounded  # emitted by the gradient of one


def test_a_region_of_another_precision_is_an_error():
    with raises(CompileError):
        af.precision("bf16")
    with raises(CompileError), af.precision("fp32"):
        pass
