"""What is exported, onnxruntime computes as a job does; it is read back; ONNX's checker agrees."""

import os

import numpy as np
import pytest
from error_texts import raises

onnx = pytest.importorskip("onnx", reason="needs onnx, of the extra [onnx]")
pytest.importorskip("onnxruntime", reason="needs onnxruntime")

from models.bert import BertForMaskedLM  # noqa: E402
from models.gpt2 import GPT2  # noqa: E402
from models.lenet import LeNet5  # noqa: E402
from models.lstm_lm import LSTMLanguageModel  # noqa: E402
from models.resnet import Bottleneck, ResNet, resnet50  # noqa: E402
from models.vit import VisionTransformer  # noqa: E402
from onnx_models import run_by_onnxruntime  # noqa: E402

import actorflow as af  # noqa: E402
from actorflow import nn  # noqa: E402
from actorflow.onnx.extents import Monomial, merged, sizes_for  # noqa: E402
from actorflow.onnx.program import OnnxError  # noqa: E402

FLOAT, INT = af.DType.FLOAT32, af.DType.INT64

MODELS = {
    "lenet": (LeNet5, (FLOAT, 1, 28, 28)),
    "resnet50": (lambda: resnet50(10), (FLOAT, 3, 64, 64)),
    "resnet": (lambda: ResNet(Bottleneck, (1, 1, 1, 1), 10, width=4), (FLOAT, 3, 64, 64)),
    "vit": (
        lambda: VisionTransformer(10, size=32, patch=8, dim=32, depth=2, heads=2),
        (FLOAT, 3, 32, 32),
    ),
    "gpt2": (lambda: GPT2(50, 32, 32, 2, 2), (INT, 16)),
    "bert": (lambda: BertForMaskedLM(50, 32, 32, 2, 2), (INT, 16)),
    "lstm": (lambda: LSTMLanguageModel(50, 16, 24), (INT, 12)),
}


def scores(model, batch):
    return model(batch.x)


def job_of(function):
    return af.job(train=False, max_plans=20)(function)


def batches(kind, sizes):
    rng = np.random.default_rng(0)
    dtype, *shape = kind
    for size in sizes:
        x = rng.normal(size=(size, *shape)).astype(np.float32)
        yield {"x": x if dtype is FLOAT else rng.integers(0, 50, (size, *shape))}


def check_export(name, folder, opset=17, sizes=(1, 2, 7)):
    """Export a model with a free batch axis, and hold it against onnxruntime."""
    make, kind = MODELS[name]
    model, job, path = make(), job_of(scores), folder / "model.onnx"
    example = next(batches(kind, [3]))
    af.onnx.export(job, model, example, path, opset=opset, dynamic_axes={"x": {0: "batch"}})
    onnx.checker.check_model(str(path), full_check=True)
    given = list(batches(kind, sizes))
    for batch, made in zip(given, run_by_onnxruntime(path, given, folder), strict=True):
        np.testing.assert_allclose(
            made["output"], job.step(model, batch)["output"], rtol=1e-4, atol=1e-4
        )
    return model, job, path, example


def test_lenet_is_exported_with_a_free_batch(tmp_path):
    model, job, path, example = check_export("lenet", tmp_path)
    proto = onnx.load(path)
    weights = {t.name for t in proto.graph.initializer}
    assert {name for name, _ in model.named_parameters()} <= weights
    assert "fc1/Gemm" in " ".join(node.name for node in proto.graph.node)
    read = af.onnx.load(path)
    assert read.state().keys() == model.state().keys()
    np.testing.assert_allclose(
        job.step(read, example)["output"], job.step(model, example)["output"], rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("opset", [17, 20, 23])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_exported_with_a_free_batch(name, opset, tmp_path):
    if name == "resnet50" and opset != 17:
        pytest.skip("one opset of the large one is enough")
    model, job, path, example = check_export(name, tmp_path, opset, (1, 7))
    read = af.onnx.load(path)
    assert read.state().keys() <= model.state().keys()  # less what inference does not read
    np.testing.assert_allclose(
        job.step(read, example)["output"], job.step(model, example)["output"], atol=1e-5
    )


@pytest.mark.parametrize("name", ["bert", "lstm"])
def test_the_length_of_texts_is_free_too(name, tmp_path):
    make, _ = MODELS[name]
    model, job, path = make(), job_of(scores), tmp_path / "model.onnx"
    spec = {"x": af.TensorType(INT, (2, 16))}
    axes = {"x": {0: "batch", 1: "length"}}
    af.onnx.export(job, model, spec, path, dynamic_axes=axes)
    given = [{"x": np.arange(n * t).reshape(n, t) % 50} for n, t in ((1, 4), (3, 9))]
    for batch, made in zip(given, run_by_onnxruntime(path, given, tmp_path), strict=True):
        np.testing.assert_allclose(made["output"], job.step(model, batch)["output"], atol=1e-4)


def test_an_imported_model_trains_as_the_original(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

        def __call__(self, x):
            return self.down(af.gelu(self.up(x)))

    def loss(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(5, 4)).astype(np.float32), "y": rng.integers(0, 3, 5)}
    model, path = Net(), tmp_path / "net.onnx"
    af.onnx.export(job_of(scores), model, {"x": batch["x"]}, path)
    read = af.onnx.load(path)
    losses = []
    for each in (model, read):
        job = af.job(optimizer=af.optim.SGD(0.1))(loss)
        losses.append([float(job.step(each, batch)["loss"]) for _ in range(3)])
        job.close(each)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    np.testing.assert_allclose(read.state()["up.weight"], model.state()["up.weight"], rtol=1e-5)


OPS = {
    "elementwise": lambda x: af.silu(x) + af.elu(x) * af.softplus(x) - af.mish(x) / (x * x + 1),
    "gelu": lambda x: af.gelu(x) + af.gelu(x, approximate="tanh") + af.hardswish(x),
    "rounding": lambda x: af.floor(x) + af.trunc(x * 3) + af.round(x * 2) + af.remainder(x, 0.7),
    "logic": lambda x: af.where((x > 0) & ~(x > 1) | (x != x), x, -x),
    "reductions": lambda x: x.sum(0) + x.mean(1).mean() + x.amax((0, 1)) + x.amin(0),
    "order": lambda x: x.sort(-1)[0] + x.topk(2, -1)[0][..., :1],
    "places": lambda x: x.argmax(-1).to("float32"),
    "cumulative": lambda x: x.cumsum(-1) + af.flip(x, 0),
    "norms": lambda x: af.rms_norm(x, 4) + af.layer_norm(x, 4) + af.log_softmax(x),
    "attention": lambda x: af.scaled_dot_product_attention(x, x, x, is_causal=True),
    "masked": lambda x: af.scaled_dot_product_attention(x, x, x, x[0, :, :1].T[:, :3] > 9),
    "picking": lambda x: x[:, [0, 2]].flatten() + x.gather(1, (x[:, :1] > 0).to("int64")).mean(),
    "adding": lambda x: x.index_add(0, np.array([1, 1]), x * 2),
    "branch": lambda x: af.cond(x.sum() > 0, lambda: x * 2, lambda: x - 1),
    "padding": lambda x: af.pad(x, (1, 2)) + af.pad(x, (2, 1), "constant", 1.5),
    "integers": lambda x: ((x * 9).to("int64") // 4 + (x * 9).to("int64") % 5).to("float32"),
}


@pytest.mark.parametrize("opset", [17, 23])
def test_functions_are_exported(opset, tmp_path):
    def all_of_them(model, batch):
        return {name: function(batch.x) for name, function in OPS.items()}

    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    job, path = job_of(all_of_them), tmp_path / "ops.onnx"
    af.onnx.export(job, nn.Module(), {"x": x}, path, opset=opset)
    onnx.checker.check_model(str(path), full_check=True)
    (made,) = run_by_onnxruntime(path, [{"x": x}], tmp_path)
    expected = job.step(nn.Module(), {"x": x})
    for name in OPS:
        np.testing.assert_allclose(made[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
    back = job_of(lambda m, b: m(b)).step(af.onnx.load(path), {"x": x})
    for name in OPS:
        np.testing.assert_allclose(back[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_large_weights_lie_beside_the_file(tmp_path):
    model, path = nn.Linear(300, 20), tmp_path / "net.onnx"
    x = np.ones((1, 300), np.float32)
    af.onnx.export(job_of(scores), model, {"x": x}, path, external_bytes=1000)
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.data"]
    assert (tmp_path / "net.onnx.data").stat().st_size == 300 * 20 * 4
    (made,) = run_by_onnxruntime(path, [{"x": x}], tmp_path)
    expected = job_of(scores).step(model, {"x": x})["output"]
    np.testing.assert_allclose(made["output"], expected, rtol=1e-4)
    np.testing.assert_allclose(
        job_of(scores).step(af.onnx.load(path), {"x": x})["output"], expected, rtol=1e-5
    )


# What is refused.


class Counter(nn.Module):
    def __init__(self):
        self.seen = nn.Buffer((), dtype="int64")

    def __call__(self, x):
        self.seen.assign(self.seen + 1)
        return x + 1.0


def by_size(model, batch):
    return batch.x + (1.0 if len(batch.x) > 4 else 2.0) * (batch.x if len(batch.x) > 4 else 1.0)


def positions(model, batch):
    return batch.x + np.arange(batch.x.shape[1], dtype=np.float32)


def drawing(model, batch):
    return batch.x + af.randn(4)


X = np.ones((3, 4), np.float32)
BATCH = {"x": {0: "batch"}}

REFUSED = {
    "an op that is not known": (lambda m, b: af.erfc(b.x), nn.Module, {}),
    "random numbers": (drawing, nn.Module, {}),
    "an assigned buffer": (scores, Counter, {}),
    "other ops at other sizes": (by_size, nn.Module, {"dynamic_axes": BATCH}),
    "numbers of a free length": (positions, nn.Module, {"dynamic_axes": {"x": {1: "length"}}}),
    "an axis that is not there": (scores, nn.Identity, {"dynamic_axes": {"x": {2: "n"}}}),
    "an old opset": (scores, nn.Identity, {"opset": 11}),
    "an output named as an input": (lambda m, b: {"x": b.x * 2}, nn.Module, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_named(case, tmp_path):
    function, model, options = REFUSED[case]
    with raises(OnnxError):
        af.onnx.export(job_of(function), model(), {"x": X}, tmp_path / "m.onnx", **options)
    assert os.listdir(tmp_path) == []


def test_a_training_job_is_not_exported(tmp_path):
    job = af.job(optimizer=af.optim.SGD(0.1))(lambda m, b: m(b.x).mean())
    with raises(OnnxError):
        af.onnx.export(job, nn.Linear(4, 2), {"x": X}, tmp_path / "m.onnx")


def test_extents_follow_from_traces_at_primes():
    sizes = sizes_for({"batch": 8, "length": 16})
    by_name = [dict(s) for s in sizes.traces]
    value = [s["batch"] * s["length"] * 4 for s in by_name]
    assert merged(value, sizes, "here") == Monomial(4, (("batch", 1), ("length", 1)))
    moved = [2 * s["length"] + 1 for s in by_name]
    assert merged(moved, sizes, "here") == Monomial(2, (("length", 1),), 1)
    assert merged([7] * len(by_name), sizes, "here") == 7
    with raises(OnnxError):
        merged([s["batch"] % 3 + 5 for s in by_name], sizes, "here")


def test_a_batch_norm_is_one_node_and_comes_back_with_its_statistics(tmp_path):
    model, path = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), tmp_path / "net.onnx"
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    af.job(optimizer=af.optim.SGD(0.1))(lambda m, b: (m(b.x) ** 2.0).mean()).step(model, {"x": x})
    af.onnx.export(job_of(scores), model, {"x": x}, path, dynamic_axes={"x": {0: "batch"}})
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("BatchNormalization") == kinds.count("Conv") == 1
    assert not {"Add", "Reshape"} & {*kinds}
    read = af.onnx.load(path)
    assert {name for name, _ in read.named_buffers()} == {"1.running_mean", "1.running_var"}
    (made,) = run_by_onnxruntime(path, [{"x": x}], tmp_path)
    expected = job_of(scores).step(model, {"x": x})["output"]
    np.testing.assert_allclose(made["output"], expected, rtol=1e-4, atol=1e-5)
