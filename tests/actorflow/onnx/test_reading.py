"""Files that anyone may have made: refused with a text, in little time, or read right."""

import contextlib
import os
import time

import numpy as np
import pytest
from error_texts import raises

onnx = pytest.importorskip("onnx", reason="needs onnx, of the extra [onnx]")
helper, TensorProto = onnx.helper, onnx.TensorProto

from onnx_models import model, one_node, port  # noqa: E402  # imports onnx

import actorflow as af  # noqa: E402
from actorflow.onnx.program import OnnxError  # noqa: E402

X = port("x", [2])
Y = port("y", [2])


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs, outputs, **attributes)


def constant(name, array):
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def computed(source, **batch):
    """Return what a model gives in a job."""
    loaded = af.onnx.load(source)
    job = af.job(train=False)(lambda m, b: m(b))
    made = job.step(loaded, batch)
    return next(iter(made.values()))


def huge():
    """An initialiser of 2^60 elements with 8 bytes."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 60])
    tensor.raw_data = b"\0" * 8
    return model([node("Add", ["x", "w"], ["y"])], [X], [Y], initializer=[tensor])


def negative():
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-2])
    return model([node("Add", ["x", "w"], ["y"])], [X], [Y], initializer=[tensor])


def deep(depth=30):
    """Branches inside branches."""
    inner = helper.make_graph([node("Identity", ["x"], ["r0"])], "g", [], [port("r0", [2])])
    for level in range(1, depth):
        branch = helper.make_node(
            "If", ["c"], [f"r{level}"], then_branch=inner, else_branch=empty(f"e{level}")
        )
        inner = helper.make_graph([branch], "g", [], [port(f"r{level}", [2])])
    last = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=empty("e"))
    return model([last], [X, port("c", [], "bool")], [Y])


def empty(name):
    return helper.make_graph([node("Identity", ["x"], [name])], "g", [], [port(name, [2])])


def doubling(levels=24):
    """Functions that each call the next twice."""
    functions = []
    for level in range(levels):
        last = level == levels - 1
        called = ("Identity", "") if last else (f"f{level + 1}", "own")
        nodes = [
            helper.make_node(called[0], ["a"], ["m"], domain=called[1]),
            helper.make_node(called[0], ["m"], ["b"], domain=called[1]),
        ]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        functions.append(helper.make_function("own", f"f{level}", ["a"], ["b"], nodes, opsets))
    return model([node("f0", ["x"], ["y"], domain="own")], [X], [Y], functions=functions)


def calls_itself():
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = [helper.make_node("f", ["a"], ["b"], domain="own")]
    function = helper.make_function("own", "f", ["a"], ["b"], body, opsets)
    return model([node("f", ["x"], ["y"], domain="own")], [X], [Y], functions=[function])


def call_each_other():
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function(
            "own", name, ["a"], ["b"], [helper.make_node(other, ["a"], ["b"], domain="own")], opsets
        )
        for name, other in (("f", "g"), ("g", "f"))
    ]
    return model([node("f", ["x"], ["y"], domain="own")], [X], [Y], functions=functions)


def branch_ahead(*inner):
    """A branch that reads what is made of its own result."""
    graph = helper.make_graph(inner, "g", [], [port("r", [2])])
    branch = helper.make_node("If", ["c"], ["m"], then_branch=graph, else_branch=empty("e"))
    nodes = [branch, node("Neg", ["m"], ["later"]), node("Neg", ["later"], ["y"])]
    return model(nodes, [X, port("c", [], "bool")], [Y])


def shaped(*dims):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=b"")
    return model([node("Add", ["x", "w"], ["y"])], [X], [Y], initializer=[tensor])


def string_input():
    text = helper.make_tensor_value_info("x", TensorProto.STRING, [2])
    return model([node("Identity", ["x"], ["y"])], [text], [text])


def ill_typed():
    bad = helper.make_node("Softmax", ["x"], ["y"], axis="one")
    return model([bad], [X], [Y])


HOSTILE = {
    "cycle": lambda: model([node("Add", ["x", "z"], ["y"]), node("Neg", ["y"], ["z"])], [X], [Y]),
    "a cycle of one node": lambda: model([node("Neg", ["y"], ["y"])], [X], [Y]),
    "a cycle through a branch": lambda: branch_ahead(node("Add", ["x", "later"], ["r"])),
    "a cycle in a branch": lambda: branch_ahead(
        node("Add", ["x", "q"], ["r"]), node("Neg", ["r"], ["q"])
    ),
    "functions that call each other": call_each_other,
    "extents that wrap": lambda: shaped(1 << 32, 1 << 32),
    "no elements of a huge shape": lambda: shaped(0, 1 << 62, 4),
    "a hundred axes": lambda: shaped(*[1] * 100),
    "two nodes with one output": lambda: model([node("Neg", ["x"], ["y"])] * 2, [X], [Y]),
    "unknown op": lambda: model([node("Frobnicate", ["x"], ["y"])], [X], [Y]),
    "unknown attribute": lambda: model([node("Relu", ["x"], ["y"], slope=1.0)], [X], [Y]),
    "ill-typed attribute": ill_typed,
    "more elements than bytes": huge,
    "negative extent": negative,
    "branches nested too deep": deep,
    "functions that double": doubling,
    "a function that calls itself": calls_itself,
    "unknown domain": lambda: model([node("Relu", ["x"], ["y"], domain="own")], [X], [Y]),
    "opset of the future": lambda: model([node("Relu", ["x"], ["y"])], [X], [Y], opset=999),
    "texts": string_input,
    "not a model": lambda: b"\xff" * 100,
    "a number": lambda: 7,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_model_is_refused_in_no_time(case):
    begin = time.process_time()
    with pytest.raises(OnnxError) as caught:
        af.onnx.load(HOSTILE[case]())
    assert len(str(caught.value)) > 10
    assert time.process_time() - begin < 5


TRACED = {
    "a range of 10^12": lambda: model(
        [node("Range", ["a", "b", "d"], ["r"]), node("Slice", ["r", "s", "e"], ["y"])],
        [X],
        [port("y", [1], "int64")],
        initializer=[
            constant(name, np.int64(value)) for name, value in (("a", 0), ("b", 10**12), ("d", 1))
        ]
        + [constant("s", [np.int64(0)]), constant("e", [np.int64(1)])],
    ),
    "six tiles by 2^13": lambda: model(
        [node("Tile", [f"t{i}", "n"], [f"t{i + 1}"]) for i in range(6)]
        + [node("Add", ["t6", "x"], ["y"])],
        [X],
        [Y],
        initializer=[constant("n", [np.int64(1 << 13)]), constant("t0", np.zeros(1, np.float32))],
    ),
    "a loop of 10^15 turns": lambda: model(
        [
            helper.make_node(
                "Loop",
                ["n", "", "x"],
                ["y"],
                body=helper.make_graph(
                    [node("Identity", ["c"], ["c_out"]), node("Neg", ["v"], ["v_out"])],
                    "b",
                    [port("i", [], "int64"), port("c", [], "bool"), port("v", [2])],
                    [port("c_out", [], "bool"), port("v_out", [2])],
                ),
            )
        ],
        [X],
        [Y],
        initializer=[constant("n", np.int64(10**15))],
    ),
    "a unit matrix of 10^9": lambda: model(
        [
            node("ConstantOfShape", ["s"], ["c"]),
            node("EyeLike", ["c"], ["e"]),
            node("ReduceSum", ["e"], ["r"], keepdims=0),
            node("Add", ["x", "r"], ["y"]),
        ],
        [X],
        [Y],
        initializer=[constant("s", [np.int64(10**9), np.int64(900)])],
    ),
    "one of 10^12": lambda: model(
        [node("OneHot", ["i", "d", "v"], ["h"]), node("Add", ["x", "h"], ["y"])],
        [X],
        [Y],
        initializer=[
            constant("i", [np.int64(3)]),
            constant("d", np.int64(10**12)),
            constant("v", np.zeros(2, np.float32)),
        ],
    ),
    "a shape that depends on data": lambda: model(
        [node("Reshape", ["x", "s"], ["y"])], [X, port("s", [1], "int64")], [Y]
    ),
    "rounding to bfloat16 inside": lambda: model(
        [node("Cast", ["x"], ["b"], to=16), node("Cast", ["b"], ["y"], to=1)], [X], [Y]
    ),
}


@pytest.mark.parametrize("case", TRACED)
def test_what_only_a_trace_can_tell_is_refused_there(case):
    loaded = af.onnx.load(TRACED[case]())
    spec = {"x": af.TensorType(af.DType.FLOAT32, (2,))}
    if "s" in loaded.inputs:
        spec["s"] = af.TensorType(af.DType.INT64, (1,))
    with raises(OnnxError):
        af.job(train=False)(lambda m, b: m(b)).graph(loaded, spec)


def test_a_constant_of_a_large_shape_takes_no_bytes():
    huge_shape = constant("s", [np.int64(1 << 38)])
    nodes = [
        node("ConstantOfShape", ["s"], ["c"]),
        node("ReduceSum", ["c"], ["r"], keepdims=0),
        node("Add", ["x", "r"], ["y"]),
    ]
    loaded = af.onnx.load(model(nodes, [X], [Y], initializer=[huge_shape]))
    graph = af.job(train=False)(lambda m, b: m(b)).graph(
        loaded, {"x": af.TensorType(af.DType.FLOAT32, (2,))}
    )
    assert max(len(n.attrs.get("data", b"")) for n in graph.nodes) < 100


# Tensors beside the file.


def with_external(folder, location, array=None, **entries):
    """Write a model whose weight is said to lie in `location`; return its path."""
    array = np.arange(2, dtype=np.float32) if array is None else array
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    proto = model([node("Add", ["x", "w"], ["y"])], [X], [Y], initializer=[tensor])
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder with weights in it, and some outside of it."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for at in (tmp_path / "outside.bin", inside / "w.bin"):
        at.write_bytes(np.arange(2, dtype=np.float32).tobytes())
    return inside


def test_weights_beside_the_file_are_read(folder):
    x = np.ones(2, np.float32)
    path = with_external(folder, "w.bin", offset=0, length=8)
    np.testing.assert_array_equal(computed(path, x=x), [1, 2])


def make_fifo(folder):
    os.mkfifo(folder / "link.bin")


BESIDE = {
    "above": ("../outside.bin", {}, None),
    "absolute": ("/etc/hostname", {}, None),
    "up and down": ("a/../../outside.bin", {}, None),
    "symbolic link": ("link.bin", {}, lambda f: (f / "link.bin").symlink_to("../outside.bin")),
    "a folder that is a link": ("ld/outside.bin", {}, lambda f: (f / "ld").symlink_to("..")),
    "backslashes": ("..\\outside.bin", {}, None),
    "a zero byte": ("w.bin\0", {}, None),
    "an endless device": ("/dev/zero", {}, None),
    "hard link": ("link.bin", {}, lambda f: os.link(f.parent / "outside.bin", f / "link.bin")),
    "fifo": ("link.bin", {}, make_fifo),
    "missing": ("none.bin", {}, None),
    "a folder": (".", {}, None),
    "nothing": ("", {}, None),
    "offset beyond the end": ("w.bin", {"offset": 4}, None),
    "negative offset": ("w.bin", {"offset": -4}, None),
    "length beyond the end": ("w.bin", {"length": 80}, None),
    "length too short": ("w.bin", {"length": 4}, None),
    "length that is no number": ("w.bin", {"length": "all"}, None),
}


@pytest.mark.parametrize("case", BESIDE)
def test_weights_elsewhere_are_refused(case, folder):
    location, entries, prepare = BESIDE[case]
    if prepare is not None:
        prepare(folder)
    path = with_external(folder, location, **entries)
    with pytest.raises(OnnxError, match="'w'"):
        af.onnx.load(path)


def test_a_model_in_memory_has_no_weights_beside_it(folder):
    data = with_external(folder, "w.bin").read_bytes()
    with raises(OnnxError):
        af.onnx.load(data)


def test_a_larger_file_than_asked_for_is_refused(folder):
    path = with_external(folder, "w.bin")
    with pytest.raises(OnnxError, match="max_bytes"):
        af.onnx.load(path, max_bytes=10)


def test_names_are_labels_and_no_paths(tmp_path):
    name = "../../etc/y"
    proto = model([node("Neg", ["x"], [name])], [X], [port(name, [2])])
    assert computed(proto.SerializeToString(), x=np.ones(2, np.float32)).tolist() == [-1, -1]
    assert [*tmp_path.iterdir()] == []


def test_functions_of_a_model_are_called():
    opsets = [helper.make_opsetid("", 17)]
    body = [
        helper.make_node("Add", ["a", "a"], ["m"]),
        helper.make_node("LeakyRelu", ["m"], ["b"]),
    ]
    reference = body[1].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "alpha", "slope", 1
    function = helper.make_function("own", "f", ["a"], ["b"], body, opsets, ["slope"])
    nodes = [
        helper.make_node("f", ["x"], ["m"], domain="own", slope=0.5),
        helper.make_node("f", ["m"], ["y"], domain="own", slope=0.25),
    ]
    proto = model(nodes, [X], [Y], functions=[function])
    assert computed(proto, x=np.array([-1, 1], np.float32)).tolist() == [-0.5, 4]


@pytest.mark.parametrize("seed", range(20))
def test_changed_bytes_are_refused_or_read(seed):
    rng = np.random.default_rng(seed)
    x = np.ones(2, np.float32)
    data = bytearray(one_node("Relu", {"x": x}, results=[x]).SerializeToString())
    for place in rng.integers(0, len(data), 3):
        data[place] = rng.integers(256)
    with contextlib.suppress(af.CompileError):
        af.onnx.load(bytes(data))


def test_functions_have_opsets_and_overloads_of_their_own():
    functions = []
    for overload, axis in (("rows", 1), ("columns", 2)):
        body = [helper.make_node("Softmax", ["a"], ["b"], axis=axis)]
        functions.append(
            helper.make_function(
                "own", "f", ["a"], ["b"], body, [helper.make_opsetid("", 11)], overload=overload
            )
        )
    nodes = [
        helper.make_node("f", ["x"], ["y"], domain="own", overload="rows"),
        helper.make_node("f", ["x"], ["z"], domain="own", overload="columns"),
    ]
    shape = [1, 2, 3]
    outputs = [port("y", shape), port("z", shape)]
    proto = model(nodes, [port("x", shape)], outputs, functions=functions)
    del proto.opset_import[0]  # the model itself says nothing of ONNX's own operators
    made = af.job(train=False)(lambda m, b: m(b)).step(
        af.onnx.load(proto), {"x": np.zeros(shape, np.float32)}
    )
    np.testing.assert_allclose(made["y"], np.full(shape, 1 / 6), rtol=1e-6)  # of opset 11: of both
    np.testing.assert_allclose(made["z"], np.full(shape, 1 / 3), rtol=1e-6)
