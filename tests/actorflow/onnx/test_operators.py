"""Operators of ONNX against its own reference evaluator, and its own cases of single nodes."""

import warnings
from itertools import product

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs onnx, of the extra [onnx]")

from onnx.backend.test.runner import (  # noqa: E402
    BackendIsNotSupposedToImplementIt,
    Runner,
    _normalize_tensor,
)
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_models import is_core_case, model, one_node  # noqa: E402

from actorflow.onnx import backend  # noqa: E402


def drawn(*shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(dtype)


def ids(*numbers):
    return np.array(numbers, np.int64)


X4 = drawn(2, 3, 7, 8)

# Name: op, inputs, attributes, opset. Each row is one that a map by name would get wrong.
TRAPS = {
    "HardSigmoid has another slope": ("HardSigmoid", {"x": drawn(9)}, {}),
    "Selu has its own constants": ("Selu", {"x": drawn(9)}, {"alpha": 2.0, "gamma": 3.0}),
    "Div of integers goes toward zero": ("Div", {"a": ids(-3, 3, -4), "b": ids(2, -2, 2)}, {}),
    "Mod of negative numbers": ("Mod", {"a": ids(-3, 3, -4), "b": ids(2, -2, 3)}, {}),
    "Reshape copies an extent": ("Reshape", {"x": drawn(2, 3, 4), "s": ids(0, -1)}, {}),
    "Reshape to nothing": ("Reshape", {"x": drawn(0, 3), "s": ids(3, 0)}, {"allowzero": 1}),
    "no axes are all": ("ReduceSum", {"x": drawn(2, 3), "a": ids()}, {}),
    "no axes are none": ("ReduceSum", {"x": drawn(2, 3), "a": ids()}, {"noop_with_empty_axes": 1}),
    "axes of opset 11": ("ReduceSum", {"x": drawn(2, 3)}, {"axes": [1]}, 11),
    "maximum of nothing": ("ReduceMax", {"x": drawn(0, 3), "a": ids(0)}, {}, 20),
    "Slice backwards past the end": (
        "Slice",
        {"x": drawn(5), "s": ids(-1), "e": ids(-(2**63)), "a": ids(0), "t": ids(-2)},
        {},
    ),
    "Slice to the largest number": ("Slice", {"x": drawn(5), "s": ids(1), "e": ids(2**63 - 1)}, {}),
    "Gather from the end": ("Gather", {"x": drawn(5, 2), "i": ids(-1, 0, -5)}, {}),
    "GatherElements from the end": (
        "GatherElements",
        {"x": drawn(3, 2), "i": np.array([[-1, 0], [1, -3]])},
        {},
    ),
    "OneHot outside": (
        "OneHot",
        {"i": ids(0, -1, 7), "d": np.array(3), "v": np.array([5.0, 2.0], np.float32)},
        {},
    ),
    "CumSum before and backwards": (
        "CumSum",
        {"x": drawn(2, 4), "a": np.array(1)},
        {"exclusive": 1, "reverse": 1},
    ),
    "Pad of one side": ("Pad", {"x": drawn(2, 3), "p": ids(0, 1, 2, 0)}, {}),
    "IsInf above alone": (
        "IsInf",
        {"x": np.array([np.inf, -np.inf, 1], np.float32)},
        {"detect_negative": 0},
    ),
    "Trilu below": ("Trilu", {"x": drawn(3, 4), "k": np.array(-1)}, {"upper": 0}),
    "EyeLike of integers": ("EyeLike", {"x": drawn(3, 4)}, {"dtype": 7, "k": 1}),
    "ScatterND sums": (
        "ScatterND",
        {"x": drawn(4), "i": np.array([[1], [1], [-1]]), "u": drawn(3, seed=2)},
        {"reduction": "add"},
    ),
    "TopK of the smallest": ("TopK", {"x": drawn(3, 5), "k": ids(2)}, {"largest": 0}),
}


def compared(op, arrays, attributes, opset=17, count=1):
    """Hold one node against the reference evaluator."""
    untyped = onnx.helper.make_node(op, list(arrays), [f"y{i}" for i in range(count)], **attributes)
    evaluator = ReferenceEvaluator(untyped, opsets={"": opset})
    expected = evaluator.run(None, arrays)
    proto = one_node(op, arrays, results=expected, opset=opset, **attributes)
    try:
        made = backend.prepare(proto).run(arrays)
    except BackendIsNotSupposedToImplementIt as refusal:
        pytest.fail(str(refusal))
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", TRAPS)
def test_a_node_gives_what_the_reference_does(case):
    op, arrays, attributes, *opset = TRAPS[case]
    compared(op, arrays, attributes, *(opset or [17]), count=2 if op == "TopK" else 1)


def test_softmax_of_old_opsets_is_over_all_axes_from_one_on():
    x = drawn(2, 3, 4)
    (made,) = backend.prepare(one_node("Softmax", {"x": x}, results=[x], opset=11)).run([x])
    raised = np.exp(x - x.max((1, 2), keepdims=True))
    np.testing.assert_allclose(made, raised / raised.sum((1, 2), keepdims=True), rtol=1e-5)


def by_onnxruntime(op, arrays, attributes):
    """Return what onnxruntime gives, which drops last windows of ceil_mode as the standard says."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    node = onnx.helper.make_node(op, list(arrays), ["y"], **attributes)
    float_port = onnx.helper.make_tensor_value_info
    inputs = [float_port(name, onnx.TensorProto.FLOAT, a.shape) for name, a in arrays.items()]
    rank = arrays["x"].ndim
    output = float_port("y", onnx.TensorProto.FLOAT, [None] * rank)
    proto = model([node], inputs, [output], opset=22)
    session = runtime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return proto, session.run(None, arrays)[0]


def held_against_onnxruntime(op, arrays, attributes):
    proto, expected = by_onnxruntime(op, arrays, attributes)
    (made,) = backend.prepare(proto).run(arrays)
    assert made.shape == expected.shape
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-5)


WINDOWS = list(product((2, 3), (1, 2, 3), (1, 2), ((0, 0), (1, 0), (0, 1), (1, 1)), (0, 1)))
OPS = ("AveragePool", "MaxPool", "LpPool", "ConvTranspose")


def check_windows(op, kernel, stride, apart, pads, ceil):
    given = {"strides": [stride] * 2, "dilations": [apart] * 2}
    given["pads"] = [pads[0], pads[1], pads[1], pads[0]]
    arrays = {"x": X4}
    if op == "ConvTranspose":
        arrays["w"] = drawn(3, 2, kernel, kernel, seed=5)
    else:
        given |= {"kernel_shape": [kernel] * 2, "ceil_mode": ceil}
    if max(pads) < kernel:
        held_against_onnxruntime(op, arrays, given)


@pytest.mark.parametrize("op", OPS)
def test_windows_with_uneven_pads_are_those_of_onnxruntime(op):
    check_windows(op, 3, 2, 1, (0, 1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_windows_of_a_grid_are_those_of_onnxruntime(op):
    for windows in WINDOWS:
        if not (op == "ConvTranspose" and windows[-1]):
            check_windows(op, *windows)


# ONNX's own cases.

REFUSED = {
    "test_training_dropout",
    "test_training_dropout_default",
    "test_training_dropout_default_mask",
    "test_training_dropout_mask",
}
"""Cases that ask for the numbers of another generator of random numbers."""

PARTS = 24


@pytest.fixture(scope="module")
def cases():
    """All cases of one node: those of the core, and the others."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases overflow and divide by zero on purpose
        tests = load_model_tests(kind="node")
    single = [t for t in tests if "_expanded" not in t.name and len(t.model.graph.node) == 1]
    core = [t for t in single if is_core_case(t)]
    return core, [t for t in single if t not in core]


def run_case(case):
    """Return whether a case is right; False where it is refused by name."""
    try:
        prepared = backend.prepare(case.model)
        for inputs, outputs in case.data_sets:
            made = prepared.run([_normalize_tensor(x) for x in inputs])
            expected = [_normalize_tensor(x) for x in outputs]
            Runner.assert_similar_outputs(expected, made, case.rtol, case.atol)
    except BackendIsNotSupposedToImplementIt:
        return False
    return True


@pytest.mark.slow
def test_there_are_838_cases_of_the_core(cases):
    assert len(cases[0]) >= 838


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_core_cases_are_right(part, cases):
    refused = {case.name for case in cases[0][part::PARTS] if not run_case(case)}
    assert refused <= REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_of_other_cases_none_is_wrong(part, cases):
    for case in cases[1][part::PARTS]:
        run_case(case)
