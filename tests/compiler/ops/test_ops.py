"""What a user reads when an op cannot take its inputs; sources, costs, writes, the dropout mask."""

import numpy as np
import pytest
import tiers
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
    (("add", "float32 2", "int64 2"), {}, "train.py:41: add(float32[2], int64[2]) in "
     "'blocks.0': needs equal dtypes, got float32 and int64; cast one of them with .to(...)"),
    (("add", "float32 2"), {}, "expects 2 inputs (a, b), got 1"),
    (("neg", "float32 2", "float32 2"), {}, "expects 1 input (x), got 2"),
    (("add", "float32 2 3", "float32 4"), {}, "cannot broadcast shapes [2, 3] and [4]: axis -1 "
     "has extents 3 and 4; equal extents or 1 are needed"),
    (("mul", "bool 2", "bool 2"), {}, "needs numbers for a and b, got bool; cast it with "
     ".to('int64')"),
    (("div", "int64 2", "int64 2"), {}, "needs a of a float dtype, got int64; cast it with .to("),
    (("exp", "int32 2"), {}, "needs x of a float dtype, got int32; cast it with .to('float32')"),
    (("neg", "uint8 2"), {}, "needs floats or signed integers, got uint8"),
    (("relu", "bool 2"), {}, "needs floats or signed integers, got bool"),
    (("relu_grad", "float32 2", "float32 3"), {}, "needs y of type float32[2], got float32[3]"),
    (("cast", "int64"), {"dtype": "bfloat"}, "knows no dtype 'bfloat'; one of: float64, float32"),
    (("where", "int64 2", "float32 2", "float32 2"), {}, "needs a bool condition, got int64; comp"),
    (("where", "bool 2", "float32 2", "float64 2"), {}, "needs equal dtypes, got float32 and "
     "float64"),
    (("sum", "bool 2"), {"axes": (0,), **OVER}, "needs numbers for x, got bool"),
    (("sum", "float32 2"), {"axes": (1,), **OVER}, "has axes (1) outside 0..0 of an input of "
     "rank 1"),
    (("sum", "float32 2 2"), {"axes": (1, 0), **OVER}, "needs each axis once and in ascending "
     "order"),
    (("mean", "int64 2"), {"axes": (0,), **OVER}, "needs x of a float dtype, got int64"),
    (("max", "float32 0 2"), {"axes": (0,), **OVER}, "needs at least one element along axes (0,)"),
    (("argmax", "float32 2"), {"axis": 3, **OVER}, "has axes (3) outside 0..0"),
    (("reshape", "float32 2 3"), {"shape": (4,)}, "needs a shape of 6 elements like [2, 3], but "
     "[4] has 4"),
    (("reshape", "float32 2 3"), {"shape": (-1, 6)}, "needs extents of 0 or more, got shape "
     "[-1, 6]"),
    (("transpose", "float32 2 3"), {"perm": (0, 0)}, "needs each of the 2 axes once in perm, "
     "got (0, 0)"),
    (("broadcast_to", "float32 2"), {"shape": (1,)}, "cannot stretch shape [2] to [1]: only "
     "extents"),
    (("broadcast_to", "float32 2"), {"shape": (3,)}, "cannot broadcast shapes [2] and [3]"),
    (("slice", "float32 4"), {"starts": (1,), "stops": (5,), "steps": (1,)},
     "has 1:5 for axis 0, outside 0 <= start <= stop <= 4"),
    (("slice", "float32 4"), {"starts": (1,), "stops": (2,), "steps": (0,)},
     "needs steps of 1 or more, got 0 for axis 0"),
    (("slice", "float32 4"), {"starts": (), "stops": (), "steps": ()}, "needs a start, stop and "
     "step for each of the 1 axes"),
    (("pad", "float32 4"), {"low": (-1,), "high": (0,), "steps": (1,)},
     "needs low and high of 0 or more and steps of 1 or more"),
    (("pad", "float32 4"), {"low": (), "high": (), "steps": ()}, "needs low, high and step for "
     "each"),
    (("concat",), {"axis": 0}, "needs at least one input, got none"),
    (("concat", "float32"), {"axis": 0}, "scalars need a reshape"),
    (("concat", "float32 2 3", "float32 3 3"), {"axis": 1}, "needs equal extents on all axes "
     "but 1: input 0 is [2, 3], input 1 is [3, 3]"),
    (("matmul", "float32 64 128", "float32 256 128"), {}, "needs equal inner extents: 128 "
     "against 256; did you mean to transpose the second operand?"),
    (("matmul", "float32 128 64", "float32 128 32"), {}, "needs equal inner extents: 64 against "
     "128; did you mean to transpose the first operand?"),
    (("matmul", "float32 3", "float32 3 2"), {}, "needs matrices, but a has rank 1; reshape a "
     "vector"),
    (("matmul", "float32 2 2 3", "float32 4 3 2"), {}, "cannot broadcast shapes [2] and [4]"),
    (("softmax", "float32"), SOFT, "needs x of rank 1 or more, got float32[]"),
    (("softmax", "float32 2"), {**SOFT, "scale": 0.0}, "needs a scale above 0, got 0.0"),
    (("softmax", "float32 3 2"), {**SOFT, "causal": True}, "needs at least as many columns as "
     "rows when causal, or the first rows have nothing to attend to; got 3 rows and 2 columns"),
    (("attention", "float32 2 3 4", "float32 3 4", "float32 3 4"), SOFT,
     "needs equal leading axes, got [2] of q, [] of k and [] of v; stretch them with "
     "broadcast_to"),
    (("attention", "float32 4", "float32 3 4", "float32 3 4"), SOFT, "needs matrices, but q has"),
    (("attention", "float32 3 4", "float32 3 5", "float32 3 4"), SOFT, "needs q and k of equal "
     "width, got 4 and 5"),
    (("attention", "float32 3 4", "float32 3 4", "float32 2 4"), SOFT, "needs one row of v for "
     "each of the 3 rows of k, got 2"),
    (("attention", "float32 3 4", "float32 0 4", "float32 0 4"), SOFT, "needs at least one key"),
    (("attention", *["float32 3 4"] * 3, "float32 2 3"), SOFT, "needs a mask of shape [3, 3], "
     "where any extent may be 1, got [2, 3]"),
    (("attention", *["float32 3 4"] * 3, "float32 1 3"), {**SOFT, "causal": True},
     "takes no mask when causal; say both in the mask"),
    (("attention", *["float32 3 4"] * 3, "int64", "int64"), {**SOFT, "p": 1.0, "key": 0},
     "needs 0 < p < 1, got 1.0"),
    (("attention", "float32 3 4", "float32 3 4", "float32 3 4"), {**SOFT, "scale": -1.0},
     "needs a scale above 0, got -1.0"),
    (("attention", "float32 3 4", "float64 3 4", "float32 3 4"), SOFT, "needs equal dtypes, got "
     "float32 and float64"),
    (("attention_grad", *["float32 3 4"] * 5, "float32 4"), SOFT, "needs lse of type "
     "float32[3], got float32[4]"),
    (("conv", "float32 1 4 9", "float32 6 3 3"), LINE, "needs a weight of 2 channels for 4 "
     "channels of x in 2 groups, got [6, 3, 3]"),
    (("conv", "float32 1 4 9", "float32 5 2 3"), LINE, "needs channels and results that groups "
     "divide, got 4 channels, 5 results and groups=2"),
    (("conv", "float32 1 4 9", "float32 6 2 3 3"), LINE, "needs x [N, C, *spatial] and weight"),
    (("conv", "float32 1 4 2", "float32 6 2 5"), LINE, "has windows of 9 elements on spatial axis "
     "0, which with its padding has 4; use a smaller kernel or dilation, or more padding"),
    (("conv", "float32 1 4 2", "float64 6 2 1"), LINE, "needs equal dtypes"),
    (("conv", "float32 4 9", "float32 6 2"), LINE, "needs x with two axes before the spatial ones"),
    (("conv_input_grad", "float32 1 6 4", "float32 6 2 3"), LINE | {"spatial": (9,)},
     "needs dy of type float32[1, 6, 7], got float32[1, 6, 4]"),
    (("conv_weight_grad", "float32 1 4 9", "float32 1 6 4"), LINE | {"kernel": (3,)},
     "needs dy of type float32[1, 6, 7], got float32[1, 6, 4]"),
    (("max_pool", "float32 1 4 9"), LINE | {"kernel": (2, 2)}, "needs x [N, C, *spatial] of 2 spa"),
    (("max_pool", "float32 1 4 9"), LINE | {"kernel": (2,), "strides": (0,)}, "needs a kernel, "
     "strides and dilation of 1 or more"),
    (("max_pool", "float32 1 4 9"), LINE | {"kernel": (2,), "low": ()}, "needs low for each of "),
    (("max_pool_grad", "float32 1 4 9", "int64 1 4 9"), LINE | {"kernel": (3,), "spatial": (11,)},
     "needs tap of type uint8[1, 4, 9], got int64[1, 4, 9]"),
    (("layer_norm", "float32 2 4", "float32 3", "float32 4"), {"eps": 1e-5},
     "needs gamma of type float32[4], got float32[3]"),
    (("layer_norm", "float32 0", "float32 0", "float32 0"), {"eps": 1e-5},
     "needs at least one element along D of x"),
    (("cross_entropy_rows", "float32 2 3", "float32 2"), {}, "needs labels of an integer dtype, "
     "got float32"),
    (("cross_entropy_rows", "float32 0 3", "int64 0"), {}, "needs at least one row and one class"),
    (("embedding", "float32 2", "int64 2"), {}, "needs a weight of shape [rows, width], got [2]"),
    (("embedding", "float32 2 2", "float32 2"), {}, "needs ids of an integer dtype, got float32"),
    (("embedding_grad", "float32 2 2", "int64 3"), {"rows": 4}, "needs dy of the shape of ids "
     "and one"),
    (("dropout", "float32 2", "int64", "int64"), {"p": 1.0, "key": 0}, "needs 0 <= p < 1, got 1.0"),
    (("dropout", "float32 2", "int32", "int64"), {"p": 0.5, "key": 0}, "needs seed of type "
     "int64[], got"),
    (("increment", "int32"), {}, "needs step of type int64[], got int32[]"),
    (("sgd_update", "float32 2", "float32 3", "float32"), {"weight_decay": 0.0},
     "needs grad of type float32[2], got float32[3]"),
    (("momentum_update", "float32 2", "float32 2", "float32 2", "float64"),
     {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
     "needs lr of type float32[], got float64[]"),
    (("adamw_update", *["float32 2"] * 4, "float32", "int64"), {**ADAMW, "beta2": 1.0},
     "needs 0 <= beta2 < 1, got 1.0"),
    (("input",), {"name": "x", "dtype": "float32", "shape": (2, -1)}, "needs extents of 0 or more"),
    (("variable",), {"name": "w", "dtype": "float32", "shape": (), "role": "weight", "init": ()},
     "knows no role 'weight'; one of: parameter, buffer, optimizer, counter"),
    (("constant",), {"dtype": "float32", "shape": (2,), "data": b"\0" * 4},
     "needs 8 bytes of data for float32[2], got 4"),
)
# fmt: on


@pytest.mark.parametrize(("call", "attrs", "text"), ERRORS)
def test_an_error_says_what_was_expected_and_what_came(call, attrs, text):
    with pytest.raises(CompileError) as caught:
        emit(*call, **attrs)
    message = str(caught.value)
    assert text in message
    assert message.startswith(f"train.py:41: {call[0]}(")
    assert " in 'blocks.0': " in message


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
    with pytest.raises(
        IndexError, match=r"embedding: id 9 at position \(1, 0\) is outside 0\.\.3$"
    ):
        run["embedding"](Attrs(), np.ones((4, 2)), np.array([[0, 1], [9, 9]]))
    with pytest.raises(IndexError, match=r"^label -1 at position 2 is outside 0\.\.2$"):
        run["cross_entropy_rows"](Attrs(), np.ones((3, 3)), np.array([0, 1, -1]))
    with pytest.raises(IndexError, match="id 7 "):
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
