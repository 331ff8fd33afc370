"""Weights of files, runs and other libraries in a model: matched, renamed, cast, reported."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.errors import CheckpointError
from compiler.contract.errors import CompileError


class Net(nn.Module):
    def __init__(self, width=4):
        self.embed = nn.Embedding(7, width)
        self.layers = [nn.Linear(width, width) for _ in range(3)]
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight  # tied


def values(model, seed=1):
    draw = np.random.default_rng(seed)
    return {
        path: draw.standard_normal(s.shape).astype(s.dtype.value)
        for path, s in model.named_stored()
    }


def assert_holds(model, expected):
    state = model.state()
    assert list(state) == list(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(state[path], array)


class Torchlike:
    """A tensor as torch's: exported by DLPack, unless it requires gradients or is on a GPU.

    Of bfloat16 it has the bits, and no library but its own reads them.
    """

    def __init__(self, array, *, requires_grad=False, device=1, dtype=None):
        self.array = array
        self.requires_grad = requires_grad
        self.device = device
        self.dtype = dtype or f"torch.{array.dtype}"
        self.shape = array.shape

    def detach(self):
        return Torchlike(self.array, device=self.device, dtype=self.dtype)

    def cpu(self):
        return Torchlike(self.array, requires_grad=self.requires_grad, dtype=self.dtype)

    def float(self):
        words = (self.array.astype(np.uint32) << 16).view(np.float32)
        return Torchlike(words, requires_grad=self.requires_grad, device=self.device)

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **kwargs):
        if self.requires_grad or self.device != 1 or "bfloat16" in self.dtype:
            raise BufferError("cannot be exported")
        return self.array.__dlpack__()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", None])
@pytest.mark.parametrize("shard_bytes", [None, 100])
def test_a_model_is_saved_and_loaded_in_any_dtype_and_number_of_files(tmp_path, dtype, shard_bytes):
    model = Net()
    # Numbers of a few bits are exact in each dtype.
    exact = {p: np.round(a * 8).astype(a.dtype) / 8 if a.dtype.kind == "f" else a
             for p, a in values(model).items()}  # fmt: skip
    model.load(exact)
    path = model.save(tmp_path, dtype=dtype, shard_bytes=shard_bytes)
    for where in (tmp_path, path, str(path)):
        other = Net()
        report = other.load(where)
        assert_holds(other, exact)
        assert (report.missing, report.unused) == ((), ())
        assert report.loaded == tuple(exact)
    assert other.embed.weight.dtype is af.DType.FLOAT32


def test_the_newest_checkpoint_of_a_run_is_loaded_without_its_optimizer(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))

    @af.job(optimizer=af.optim.Adam(1e-2))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    model, other = make(), make()
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    data = af.data.ArraySource({"x": x, "y": np.arange(8) % 2}, batch=4)
    train.fit(model, data, steps=3, checkpoint=tmp_path / "run", progress=False)
    other.load(tmp_path / "run")
    trained = model.state()
    assert_holds(other, trained)
    assert sorted(af.load(tmp_path / "run")) == sorted(trained)
    (step,) = (tmp_path / "run").glob("step-*")
    assert sorted(af.load(step)) == sorted(trained)
    shard = next(step.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with (
        pytest.raises(CheckpointError, match="no valid one"),
        pytest.warns(RuntimeWarning, match="damaged"),
    ):
        af.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="damaged"):
        af.load(step)


def test_an_array_of_a_file_is_the_one_that_the_model_has(tmp_path, monkeypatch):
    model = nn.Linear(300, 300)
    model.save(tmp_path)
    made = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    other = nn.Linear(300, 300)
    other.load(tmp_path)
    for array in (other.weight.data, other.bias.data):
        # A large one lies in a block that begins somewhat before it.
        assert any([array is one or array.base is one for one in made])


def test_either_path_of_a_tied_weight_will_do_and_both_if_they_are_equal():
    model, good = Net(), values(Net())
    tied = good.pop("embed.weight")
    good["layers.1.weight"] = good["layers.1.weight"].astype(np.float64)
    model.load({**good, "head.weight": tied})
    np.testing.assert_array_equal(model.state()["embed.weight"], tied)
    model.load({**good, "head.weight": tied, "embed.weight": tied.astype(np.float64)})
    with raises(CompileError):
        model.load({**good, "head.weight": tied, "embed.weight": tied + 1})
    rename = {"^head.weight$": "head.weight"}
    model.load({**good, "head.weight": tied + 1}, rename=rename)
    model.load(
        {**good, "head.weight": tied, "embed.weight": tied + 1},
        rename=lambda name: None if name == "head.weight" else name,
    )
    np.testing.assert_array_equal(model.state()["embed.weight"], tied + 1)


def test_names_are_renamed_by_expressions_in_turn_or_by_a_function():
    model, good = Net(), values(Net())
    published = {f"model.{n.replace('layers.', 'h_')}": a for n, a in good.items()}
    with raises(CompileError):
        model.load(published)
    report = model.load(published, rename={r"^model\.": "", r"^h_(\d+)": r"layers.\1"})
    assert report.loaded == tuple(good)
    assert_holds(model, good)
    model.load({p.upper(): a for p, a in good.items()}, rename=str.lower)


@pytest.mark.parametrize(
    "rename",
    [
        {r"layers\.\d": "layers.0"},
        lambda name: "norm.weight",
        lambda name: 3,
        {"(": "x"},
        {"(a)": r"\2"},
        {3: "x"},
        {"x": None},
    ],
    ids=["two names", "all one", "a number", "no expression", "no group", "no text", "no new text"],
)
def test_a_rename_that_cannot_be_is_an_error(rename):
    with raises(CompileError):
        Net().load(values(Net()), rename=rename)


def test_what_is_missing_and_unused_is_told_with_the_likeliest_rename():
    model, good = Net(), values(Net())
    for change in (
        lambda name: f"transformer.{name}",
        lambda name: name.replace("layers", "layer"),
        lambda name: name.replace("layers.2", "other.thing"),
    ):
        with raises(CompileError):
            model.load({change(name): array for name, array in good.items()})
    with raises(CompileError):
        Inner(model).load(good)
    report = model.load(
        {n: a for n, a in good.items() if "norm" not in n} | {"extra": np.zeros(3)}, strict=False
    )
    assert report.unused == ("extra",)
    assert report.missing == tuple(n for n in good if "norm" in n)
    assert str(report).startswith("7 loaded, missing ['norm.weight', 'norm.bias', 'norm.running_")
    with raises(CompileError):  # of which nothing fits is a mistake, also if it need not all fit
        model.load({"extra": np.zeros(3)}, strict=False)


class Inner(nn.Module):
    def __init__(self, model):
        self.net = model


def test_several_wrong_shapes_are_told_at_once_and_nothing_is_read():
    model, good = Net(), values(Net())
    wide = values(Net(5))
    del wide["norm.num_batches_tracked"]
    with raises(CompileError):
        model.load({**good, **wide})
    with raises(CompileError):
        model.load({**good, **wide}, strict=False)


def test_a_model_of_another_dtype_is_made_by_the_load(tmp_path):
    model, good = Net(), values(Net())
    doubles = {p: a.astype(np.float64) * (1 + 2**-40) if a.dtype.kind == "f" else a
               for p, a in good.items()}  # fmt: skip
    model.load(good)
    step = af.job(lambda m, b: {"y": m.layers[0](b.x)}, train=False)
    x = np.ones((2, 4), np.float32)
    assert step.step(model, {"x": x})["y"].dtype == np.float32
    model.load(doubles, dtype="float64")
    assert_holds(model, doubles)
    assert model.norm.num_batches_tracked.dtype is af.DType.INT64
    y = step.step(model, {"x": x.astype(np.float64)})["y"]
    expected = x @ doubles["layers.0.weight"].T + doubles["layers.0.bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-14)
    for dtype in ("bfloat16", "int8", "text"):
        with raises(CompileError):
            model.load(good, dtype=dtype)


def test_a_model_in_training_is_not_given_another_dtype():
    model, good = nn.Linear(2, 1), values(nn.Linear(2, 1))
    train = af.job(lambda m, b: m(b.x).mean(), optimizer=af.optim.SGD(0.1))
    data = af.data.ArraySource({"x": np.ones((4, 2), np.float32)}, batch=2)
    for _ in train.stream(model, data, steps=1):
        with raises(CompileError):
            model.load(good, dtype="float64")
        model.load(good)
    assert model.weight.dtype is af.DType.FLOAT32


def test_tensors_of_torch_are_taken_as_values_and_as_entries_of_batches():
    model, good = nn.Linear(3, 2), values(nn.Linear(3, 2))
    bits = np.array([0x3F80, 0xC010], np.uint16)  # 1 and -2.25
    model.load(
        {
            "weight": Torchlike(good["weight"].astype(np.float64), requires_grad=True, device=2),
            "bias": Torchlike(bits, requires_grad=True, dtype="torch.bfloat16"),
        }
    )
    np.testing.assert_array_equal(model.state()["bias"], [1, -2.25])
    np.testing.assert_array_equal(model.state()["weight"], good["weight"])
    job = af.job(lambda m, b: {"y": b.x * 2.0}, train=False)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for batch in ({"x": Torchlike(x)}, {"x": Torchlike(x, requires_grad=True, device=2)}):
        np.testing.assert_array_equal(job.step(model, batch)["y"], 2 * x)
    halves = {"x": Torchlike(bits.reshape(1, 2), dtype="torch.bfloat16")}
    np.testing.assert_array_equal(job.step(model, halves)["y"], [[2, -4.5]])
    source = af.data.ArraySource({"x": Torchlike(x)}, batch=2, shuffle=False)
    (outputs,) = job.stream(model, source, steps=1)
    np.testing.assert_array_equal(outputs["y"], 2 * x)


class TensorSource:
    """Batches of tensors of torch, as a loader of torch gives them."""

    def spec(self):
        return {"x": af.TensorType(af.DType.FLOAT32, (2, 3))}

    def __next__(self):
        return {"x": Torchlike(np.ones((2, 3), np.float32))}

    def state(self):
        return {}

    def restore(self, state):
        pass

    def fingerprint(self):
        return "ones"


def test_a_source_may_return_tensors_of_torch():
    job = af.job(lambda m, b: {"y": b.x.sum()}, train=False)
    (outputs,) = job.stream(nn.Linear(1, 1), TensorSource(), steps=1)
    assert outputs["y"] == 6


def test_values_are_exported_to_numpy_and_by_dlpack_and_never_shared_to_be_written():
    layer = nn.Linear(3, 2)
    for export in (np.asarray, np.from_dlpack):
        with raises(CompileError):
            export(layer.weight)
    good = values(layer)
    layer.load(good)
    np.testing.assert_array_equal(np.asarray(layer.weight), good["weight"])
    assert not np.asarray(layer.weight).flags.writeable
    assert np.array(layer.weight, np.float64).dtype == np.float64
    assert np.array(layer.weight).flags.writeable
    taken = np.from_dlpack(layer.weight)
    np.testing.assert_array_equal(taken, good["weight"])
    assert not np.shares_memory(taken, layer.weight.data)
    with pytest.raises(BufferError, match="as a copy only"):
        layer.weight.__dlpack__(copy=False)
    other = nn.Linear(3, 2)
    other.load({"weight": layer.weight, "bias": layer.bias})
    assert_holds(other, good)

    @af.job(train=False)
    def job(model, batch):
        return {"y": batch.x * np.asarray(model.weight).sum()}

    with raises(CompileError):
        job.step(layer, {"x": np.ones(1, np.float32)})
