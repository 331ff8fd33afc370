"""The ops of groups: what they refuse, what they cost, and how they are shown."""

import pytest
from error_texts import raises

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.program import Kind, ProgramInput
from compiler.contract.spaces import Space
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import GraphBuilder, Output, SourceLocation
from compiler.graph.program_builder import ProgramBuilder
from compiler.graph.registry import OpTypeError, cost, infer_type, recompute
from compiler.ops.language.program_ops import FUSED, REGION, fused_attrs
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline.printer import print_graph

F32 = DType.FLOAT32
FULL, COLUMN = TensorType(F32, (2, 3, 4)), TensorType(F32, (4,))


def biased(rows=6, columns=4):
    """Return the attributes of exp(x + bias)."""
    p = ProgramBuilder(rows, columns)
    x, bias = (p.input(ProgramInput(F32, kind)) for kind in (Kind.FULL, Kind.COLUMN))
    program, _ = p.finish((p.op("exp", p.op("add", x, bias)),))
    return Attrs(fused_attrs(program, Space(rows, columns), ((2, 3, 4),), ("add", "exp")))


def test_the_types_of_a_group_are_its_shapes_and_the_programs_dtypes():
    assert infer_type.get(FUSED)((FULL, COLUMN), biased()) == (FULL,)


@pytest.mark.parametrize(
    "inputs", [(FULL,), (FULL, FULL), (TensorType(DType.FLOAT64, FULL.shape), COLUMN)]
)
def test_operands_that_the_program_does_not_describe_are_refused(inputs):
    with raises(OpTypeError):
        infer_type.get(FUSED)(inputs, biased())


def test_an_output_of_another_size_is_refused():
    attrs = Attrs({**biased(), "shapes": ((2, 4),)})
    with raises(OpTypeError):
        infer_type.get(FUSED)((FULL, COLUMN), attrs)


def test_a_wrong_operand_is_told_with_the_users_line():
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(6, 4))
    wrong = pytest.raises(CompileError, match=r"train\.py:7: fused")
    with b.at("mlp", SourceLocation("train.py", 7)), wrong:
        b.emit(FUSED, (x, x), biased())


def test_a_group_costs_its_operands_and_heavy_instructions_eight_times():
    found = cost.get(FUSED)((FULL, COLUMN), (FULL,), biased())
    assert found.bytes == 4 * (24 + 4 + 24)
    assert found.flops == 24 * (1 + 8)


def test_groups_may_run_again():
    assert recompute.get(FUSED)
    assert recompute.get(REGION)


def test_a_group_is_shown_by_what_it_is_made_of():
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(6, 4))
    bias = b.emit_one(INPUT, name="bias", dtype="float32", shape=(4,))
    b.outputs = [Output("y", b.emit(FUSED, (x, bias), biased())[0])]
    assert "= add + exp(%0, %1) {'rows': 6, 'columns': 4}" in print_graph(b.freeze())[2]
