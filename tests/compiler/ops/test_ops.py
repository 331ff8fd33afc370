"""What a user reads when an op cannot take its inputs; sources, costs, writes, the dropout mask."""

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import GraphBuilder, SourceLocation
from compiler.graph.registry import Op, cost, find_op, input_output_aliases, is_source, reference
from compiler.ops.language.program_ops import MOST_WRITTEN
from compiler.ops.primitives.sources import INPUT, constant, constant_array, dropout_mask, scalar
from compiler.pipeline import standard_ops


def typed(text):
    """Read "float32 2 3" as a type."""
    dtype, *shape = text.split()
    return TensorType(DType(dtype), tuple(map(int, shape)))


def emit(name, /, *inputs, **attrs):
    b = GraphBuilder()
    types = [typed(text) for text in inputs]
    values = [b.emit_one(INPUT, name="x", dtype=str(t.dtype), shape=t.shape) for t in types]
    with b.at("blocks.0", SourceLocation("train.py", 41)):
        return b.emit(find_op(name), values, attrs)


SOFT = {"scale": 1.0, "causal": False}
OVER = {"keepdims": False}
LINE = {"strides": (1,), "low": (1,), "high": (1,), "dilation": (2,), "groups": 2}
ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
# fmt: off
ERRORS = (
    (("add", "float32 2", "int64 2"), {}),
    (("add", "float32 2"), {}),
    (("neg", "float32 2", "float32 2"), {}),
    (("add", "float32 2 3", "float32 4"), {}),
    (("mul", "bool 2", "bool 2"), {}),
    (("div", "int64 2", "int64 2"), {}),
    (("exp", "int32 2"), {}),
    (("neg", "uint8 2"), {}),
    (("relu", "bool 2"), {}),
    (("relu_grad", "float32 2", "float32 3"), {}),
    (("cast", "int64"), {"dtype": "bfloat"}),
    (("where", "int64 2", "float32 2", "float32 2"), {}),
    (("where", "bool 2", "float32 2", "float64 2"), {}),
    (("sum", "bool 2"), {"axes": (0,), **OVER}),
    (("sum", "float32 2"), {"axes": (1,), **OVER}),
    (("sum", "float32 2 2"), {"axes": (1, 0), **OVER}),
    (("mean", "int64 2"), {"axes": (0,), **OVER}),
    (("max", "float32 0 2"), {"axes": (0,), **OVER}),
    (("argmax", "float32 2"), {"axis": 3, **OVER}),
    (("reshape", "float32 2 3"), {"shape": (4,)}),
    (("reshape", "float32 2 3"), {"shape": (-1, 6)}),
    (("transpose", "float32 2 3"), {"perm": (0, 0)}),
    (("broadcast_to", "float32 2"), {"shape": (1,)}),
    (("broadcast_to", "float32 2"), {"shape": (3,)}),
    (("slice", "float32 4"), {"starts": (1,), "stops": (5,), "steps": (1,)}),
    (("slice", "float32 4"), {"starts": (1,), "stops": (2,), "steps": (0,)}),
    (("slice", "float32 4"), {"starts": (), "stops": (), "steps": ()}),
    (("pad", "float32 4"), {"low": (-1,), "high": (0,), "steps": (1,)}),
    (("pad", "float32 4"), {"low": (), "high": (), "steps": ()}),
    (("concat",), {"axis": 0}),
    (("concat", "float32"), {"axis": 0}),
    (("concat", "float32 2 3", "float32 3 3"), {"axis": 1}),
    (("matmul", "float32 64 128", "float32 256 128"), {}),
    (("matmul", "float32 128 64", "float32 128 32"), {}),
    (("matmul", "float32 3", "float32 3 2"), {}),
    (("matmul", "float32 2 2 3", "float32 4 3 2"), {}),
    (("softmax", "float32"), SOFT),
    (("softmax", "float32 2"), {**SOFT, "scale": 0.0}),
    (("softmax", "float32 3 2"), {**SOFT, "causal": True}),
    (("attention", "float32 2 3 4", "float32 3 4", "float32 3 4"), SOFT),
    (("attention", "float32 4", "float32 3 4", "float32 3 4"), SOFT),
    (("attention", "float32 3 4", "float32 3 5", "float32 3 4"), SOFT),
    (("attention", "float32 3 4", "float32 3 4", "float32 2 4"), SOFT),
    (("attention", "float32 3 4", "float32 0 4", "float32 0 4"), SOFT),
    (("attention", *["float32 3 4"] * 3, "float32 2 3"), SOFT),
    (("attention", *["float32 3 4"] * 3, "float32 1 3"), {**SOFT, "causal": True}),
    (("attention", *["float32 3 4"] * 3, "int64", "int64"), {**SOFT, "p": 1.0, "key": 0}),
    (("attention", "float32 3 4", "float32 3 4", "float32 3 4"), {**SOFT, "scale": -1.0}),
    (("attention", "float32 3 4", "float64 3 4", "float32 3 4"), SOFT),
    (("attention_grad", *["float32 3 4"] * 5, "float32 4", "float32 3"), SOFT),
    (("conv", "float32 1 4 9", "float32 6 3 3"), LINE),
    (("conv", "float32 1 4 9", "float32 5 2 3"), LINE),
    (("conv", "float32 1 4 9", "float32 6 2 3 3"), LINE),
    (("conv", "float32 1 4 2", "float32 6 2 5"), LINE),
    (("conv", "float32 1 4 2", "float64 6 2 1"), LINE),
    (("conv", "float32 4 9", "float32 6 2"), LINE),
    (("conv_input_grad", "float32 1 6 4", "float32 6 2 3"), LINE | {"spatial": (9,)}),
    (("conv_weight_grad", "float32 1 4 9", "float32 1 6 4"), LINE | {"kernel": (3,)}),
    (("max_pool", "float32 1 4 9"), LINE | {"kernel": (2, 2)}),
    (("max_pool", "float32 1 4 9"), LINE | {"kernel": (2,), "strides": (0,)}),
    (("max_pool", "float32 1 4 9"), LINE | {"kernel": (2,), "low": ()}),
    (("max_pool_grad", "float32 1 4 9", "int64 1 4 9"), LINE | {"kernel": (3,), "spatial": (11,)}),
    (("layer_norm", "float32 2 4", "float32 3", "float32 4"), {"eps": 1e-5}),
    (("layer_norm", "float32 0", "float32 0", "float32 0"), {"eps": 1e-5}),
    (("cross_entropy_rows", "float32 2 3", "float32 2"), {}),
    (("cross_entropy_rows", "float32 0 3", "int64 0"), {}),
    (("embedding", "float32 2", "int64 2"), {}),
    (("embedding", "float32 2 2", "float32 2"), {}),
    (("embedding_grad", "float32 2 2", "int64 3"), {"rows": 4}),
    (("dropout", "float32 2", "int64", "int64"), {"p": 1.0, "key": 0}),
    (("dropout", "float32 2", "int32", "int64"), {"p": 0.5, "key": 0}),
    (("increment", "int32"), {}),
    (("sgd_update", "float32 2", "float32 3", "float32"), {"weight_decay": 0.0}),
    (("momentum_update", "float32 2", "float32 2", "float32 2", "float64"),
     {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}),
    (("adamw_update", *["float32 2"] * 4, "float32", "int64"), {**ADAMW, "beta2": 1.0}),
    (("input",), {"name": "x", "dtype": "float32", "shape": (2, -1)}),
    (("variable",), {"name": "w", "dtype": "float32", "shape": (), "role": "weight", "init": ()}),
    (("constant",), {"dtype": "float32", "shape": (2,), "data": b"\0" * 4}),
)
# fmt: on


@pytest.mark.parametrize(("call", "attrs"), ERRORS)
def test_an_error_says_what_was_expected_and_what_came(call, attrs):
    with raises(CompileError):
        emit(*call, **attrs)


def shipped_ops():
    """Return the ops of the standard families; other tests may have defined more."""
    families = standard_ops.FAMILIES
    found = {op for family in families for op in vars(family).values() if isinstance(op, Op)}
    return sorted(found, key=str)


def test_exactly_the_sources_have_no_launch():
    sources = {op.name for op in shipped_ops() if is_source.get(op)}
    assert sources == {"input", "variable", "constant"}


def test_exactly_the_updates_write_over_their_variables():
    assert {
        op.name: input_output_aliases.get(op)
        for op in shipped_ops()
        if input_output_aliases.get(op)
    } == {
        "assign": ((0, 0),),
        "assign_rows": ((0, 0),),
        "hold": ((0, 0),),
        "carry": ((0, 0),),
        "carry_sum": ((0, 0),),
        "increment": ((0, 0),),
        "count": ((0, 0),),
        "accumulate": ((0, 0),),
        "copy_to": ((0, 1),),
        "sgd_update": ((0, 0),),
        "embedding_sgd_update": ((0, 0),),
        "momentum_update": ((0, 0), (1, 2)),
        "adamw_update": ((0, 0), (1, 2), (2, 3)),
        "rescale": ((0, 0), (1, 1)),
        "joined_updates": tuple([(k, k) for k in range(MOST_WRITTEN)]),
        "damped_momentum_update": ((0, 0), (1, 2)),
        "adam_update": ((0, 0), (1, 2), (2, 3)),
        "amsgrad_update": ((0, 0), (1, 2), (2, 3), (3, 4)),
        "adagrad_update": ((0, 0), (1, 2)),
        "lion_update": ((0, 0), (1, 2)),
        "lamb_update": ((0, 0), (1, 2), (2, 3)),
        "lamb_step": ((0, 0), (1, 2), (2, 3)),
        "adafactor_update": ((0, 0), (1, 2), (2, 3)),
        "adafactor_vector_update": ((0, 0), (1, 2)),
        "muon_update": ((0, 0), (1, 2)),
        "muon_step": ((0, 0), (1, 2)),
        "decayed_step": ((0, 0),),
        "approach": ((0, 0),),
    }


def test_a_constant_gives_back_what_was_put_in():
    b = GraphBuilder()
    array = np.arange(6, dtype=np.int16).reshape(2, 3).T
    value = constant(b, array)
    assert b.type_of(value) == TensorType(DType.INT16, (3, 2))
    np.testing.assert_array_equal(constant_array(b.producer_of(value)), array)
    one = scalar(b, 1.5, DType.FLOAT32)
    assert b.type_of(one) == TensorType(DType.FLOAT32, ())
    assert constant_array(b.producer_of(one)) == 1.5


def test_a_matmul_costs_two_operations_per_product():
    inputs = (TensorType(DType.FLOAT32, (8, 2, 3)), TensorType(DType.FLOAT32, (3, 5)))
    outputs = (TensorType(DType.FLOAT32, (8, 2, 5)),)
    work = cost.get(find_op("matmul"))(inputs, outputs, Attrs())
    assert work.flops == 2 * 8 * 2 * 3 * 5
    assert work.bytes == 4 * (8 * 2 * 3 + 3 * 5 + 8 * 2 * 5)


def test_an_embedding_costs_only_the_rows_it_reads():
    inputs = (TensorType(DType.FLOAT32, (50_000, 8)), TensorType(DType.INT64, (4,)))
    outputs = (TensorType(DType.FLOAT32, (4, 8)),)
    assert cost.get(find_op("embedding"))(inputs, outputs, Attrs()).bytes == 2 * 128 + 32


def test_an_index_out_of_range_raises_and_names_value_position_and_bound():
    run = {name: reference.get(find_op(name)) for name in ("embedding", "cross_entropy_rows")}
    with raises(IndexError):
        run["embedding"](Attrs(), np.ones((4, 2)), np.array([[0, 1], [9, 9]]))
    with raises(IndexError):
        run["cross_entropy_rows"](Attrs(), np.ones((3, 3)), np.array([0, 1, -1]))
    with raises(IndexError):
        reference.get(find_op("embedding_grad"))(
            Attrs({"rows": 7}), np.ones((1, 2)), np.array([7], np.uint64)
        )


SEEDS = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=tiers.examples(50), deadline=None)
@given(seed=SEEDS, step=st.integers(0, 2**62), key=st.integers(0, 2**31), n=st.integers(1, 40))
def test_a_dropout_mask_is_a_prefix_of_any_longer_one(seed, step, key, n):
    long = dropout_mask(seed, step, key, 0.5, 64)
    np.testing.assert_array_equal(dropout_mask(seed, step, key, 0.5, n), long[:n])


def test_a_dropout_mask_is_what_numpys_uniform_floats_say():
    keys, counter = np.array([5, 3], np.uint64), np.array([0, 0, 11, 0], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=keys, counter=counter))
    uniform = generator.random(1001, np.float32)
    for p in (0.0, 0.1, 0.5, 0.999):
        np.testing.assert_array_equal(dropout_mask(5, 11, 3, p, 1001), uniform >= p)


def test_a_dropout_mask_depends_on_seed_step_and_key_and_keeps_the_right_share():
    base = dropout_mask(5, 11, 3, 0.3, 10_000)
    assert abs(base.mean() - 0.7) < 0.02
    for other in ((6, 11, 3), (5, 12, 3), (5, 11, 4)):
        assert abs((dropout_mask(*other, 0.3, 10_000) == base).mean() - 0.58) < 0.03
    bigger = dropout_mask(5, 11, 3, 0.6, 10_000)
    assert not (bigger & ~base).any()
