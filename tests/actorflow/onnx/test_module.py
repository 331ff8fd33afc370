"""A model that was read is a module: names, statistics, inputs, old opsets, training."""

from pathlib import Path

import numpy as np
import pytest
from error_texts import raises

onnx = pytest.importorskip("onnx", reason="needs onnx, of the extra [onnx]")

from onnx_models import model, port  # noqa: E402

import actorflow as af  # noqa: E402
from actorflow.onnx.program import OnnxError  # noqa: E402

node, array = onnx.helper.make_node, onnx.numpy_helper.from_array


def weights(name, *shape):
    values = np.random.default_rng(len(name)).normal(size=shape)
    return array(np.abs(values).astype(np.float32), name)


def call(model_, batch):
    return model_(batch)


def computed(loaded, **batch):
    return af.job(train=False)(call).step(loaded, batch)


def test_names_that_a_module_has_for_itself_are_told_apart():
    names = ["state", "step", "onnx::MatMul_3", "a.b", "__call__", "inputs"]
    nodes = [node("Add", [f"v{i}" if i else "x", n], [f"v{i + 1}"]) for i, n in enumerate(names)]
    proto = model(
        nodes, [port("x", [2])], [port("v6", [2])], initializer=[weights(n, 2) for n in names]
    )
    loaded = af.onnx.load(proto)
    assert loaded.paths.keys() == {*names}
    assert loaded.paths["onnx::MatMul_3"] == "onnx::MatMul_3"
    assert loaded.paths["a.b"] == "a.b"
    assert loaded.state().keys() == {*loaded.paths.values()}
    total = sum(onnx.numpy_helper.to_array(w) for w in proto.graph.initializer)
    made = computed(loaded, x=np.zeros(2, np.float32))["output"]
    np.testing.assert_allclose(made, total, rtol=1e-6)


def test_a_module_shows_its_ports_its_steps_and_what_it_trains():
    nodes = [node("Add", ["x", "a"], ["v"]), node("Add", ["v", "b"], ["y"])]
    proto = model(
        nodes,
        [port("x", ["n", 2])],
        [port("y", ["n", 2])],
        initializer=[weights(n, 2) for n in "ab"],
    )
    lines = repr(af.onnx.load(proto)).splitlines()
    assert lines[0].startswith("OnnxModule(x float32['n', 2] -> y)")
    assert lines[1:] == ["  steps: 2 Add", "4 parameters in 2 arrays"]


def test_statistics_are_buffers_and_numbers_of_shapes_are_constants():
    nodes = [
        node("BatchNormalization", ["x", "scale", "b", "mean", "var"], ["n"]),
        node("Shape", ["n"], ["s"]),
        node("Gather", ["s", "zero"], ["rows"], axis=0),
        node("Concat", ["rows", "rest"], ["shape"], axis=0),
        node("Reshape", ["n", "shape"], ["r"]),
        node("Mul", ["r", "half"], ["y"]),
    ]
    stored = [weights(name, 3) for name in ("scale", "b", "mean", "var")]
    stored += [array(np.array([0]), "zero"), array(np.array([-1]), "rest")]
    stored += [array(np.float32(0.5), "half")]
    proto = model(
        nodes, [port("x", ["N", 3, 2])], [port("y", ["N", 6])], opset=9, initializer=stored
    )
    loaded = af.onnx.load(proto)
    assert [name for name, _ in loaded.named_parameters()] == ["scale", "b"]
    assert [name for name, _ in loaded.named_buffers()] == ["mean", "var"]
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    scale, b, mean, var = [onnx.numpy_helper.to_array(w)[:, None] for w in stored[:4]]
    expected = (x - mean) / np.sqrt(var + 1e-5) * scale + b
    made = computed(loaded, x=x)["output"]
    np.testing.assert_allclose(made, expected.reshape(4, 6) / 2, rtol=1e-4, atol=1e-5)

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(m, batch):
        return (m(batch) ** 2.0).mean()

    losses = [float(train.step(loaded, {"x": x})["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]
    np.testing.assert_array_equal(loaded.state()["mean"], mean[:, 0])


def two_inputs():
    a, b = port("a", ["N", 2]), port("b", ["N", 2])
    return af.onnx.load(model([node("Add", ["a", "b"], ["y"])], [a, b], [port("y", ["N", 2])]))


A = np.ones((3, 2), np.float32)

WRONG = {
    "two sizes of one name": lambda m, b: m(b.x, b.x[:2]),
    "another rank": lambda m, b: m(b.x, b.x[0]),
    "another dtype": lambda m, b: m(b.x, b.x.to("float64")),
    "one input too few": lambda m, b: m(b.x),
    "one input too many": lambda m, b: m(b.x, b.x, b.x),
    "an unknown input": lambda m, b: m(b.x, c=b.x),
}


@pytest.mark.parametrize("case", WRONG)
def test_inputs_that_do_not_fit_are_named(case):
    with raises(OnnxError):
        af.job(train=False)(WRONG[case]).step(two_inputs(), {"x": A})


def test_inputs_come_in_order_or_by_name():
    loaded = two_inputs()
    for function in (lambda m, b: m(b.x, b.x), lambda m, b: m(b=b.x, a=b.x)):
        made = af.job(train=False)(function).step(loaded, {"x": A})["output"]
        np.testing.assert_array_equal(made, A + A)


def test_several_outputs_come_by_name():
    nodes = [node("Split", ["x"], ["first", "second"], axis=0, split=[1, 2])]
    outputs = [port("first", [1]), port("second", [2])]
    loaded = af.onnx.load(model(nodes, [port("x", [3])], outputs, opset=11))
    made = computed(loaded, x=np.arange(3, dtype=np.float32))
    assert {name: value.tolist() for name, value in made.items()} == {
        "first": [0.0],
        "second": [1.0, 2.0],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "shufflenet"])
def test_models_of_onnxs_own_data_give_what_is_stored(name):
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    loaded = af.onnx.load(folder / f"light_{name}.onnx")
    x = (np.arange(3 * 224 * 224).reshape(1, 3, 224, 224) / (3 * 224 * 224)).astype(np.float32)
    stored = onnx.TensorProto()
    stored.ParseFromString((folder / f"light_{name}_output_0.pb").read_bytes())
    made = computed(loaded, **{loaded.inputs[0]: x})["output"]
    np.testing.assert_allclose(made, onnx.numpy_helper.to_array(stored), rtol=1e-3)
