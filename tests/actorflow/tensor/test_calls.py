"""What is recorded of a trace's calls: the user's functions, and nothing inside an operation."""

import sys

import actorflow as af
from actorflow.tensor.calls import pause_recording, record_calls
from compiler.contract.attrs import NO_ATTRS
from compiler.graph.registry import infer_type
from compiler.ops.primitives.matmul import MATMUL

SPEC = {"x": af.TensorType(af.DType.FLOAT32, (2,))}
SQUARE = af.TensorType(af.DType.FLOAT32, (2, 2))


def twice(x):
    return x * 2.0


def late(x):
    return x


@af.op("x -> y")
def doubled(x):
    return twice(x)


def recorded(function):
    """The names of the functions that a trace of a job calls."""

    @af.job(train=False)
    def job(model, batch):
        return function(batch.x)

    with record_calls() as called:
        job.graph(af.nn.Sequential(), SPEC)
    assert sys.gettrace() is None
    return {code.co_qualname for code, _, _ in called.values()}


def test_functions_of_the_user_are_recorded_after_an_operation_as_before_it():
    assert {"twice", "late"} <= recorded(lambda x: late(twice(x) + 1.0))


def test_what_an_operation_does_inside_is_not_recorded():
    """The hook slows each instruction down, and most of those of a trace are there."""
    infer = infer_type.get(MATMUL).__qualname__
    assert infer not in recorded(lambda x: twice(x).reshape(1, 2) @ x.reshape(2, 1))
    with record_calls() as called:
        infer_type.get(MATMUL)((SQUARE, SQUARE), NO_ATTRS)
    assert infer in {code.co_qualname for code, _, _ in called.values()}


def test_the_functions_of_an_op_of_ones_own_are_recorded():
    assert {"doubled", "twice"} <= recorded(doubled)


def test_an_operation_that_is_refused_resumes_the_recording():
    def caught(x):
        try:
            return x.reshape(3)
        except af.CompileError:
            return late(x)

    assert "late" in recorded(caught)


def test_the_hook_of_a_debugger_is_not_paused():
    def hook(frame, event, argument):
        return None

    sys.settrace(hook)
    try:
        assert pause_recording() is None
        assert sys.gettrace() is hook
        with record_calls() as called:
            assert called is None
    finally:
        sys.settrace(None)
