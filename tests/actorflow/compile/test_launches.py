"""Every launch again through its op, its kernel, and the bytes of its operands."""

from dataclasses import replace

import pytest
from error_texts import raises

from actorflow.compile.check_launches import check_launches
from compiler.contract.errors import PlanFormatError
from compiler.contract.types import DType, TensorType

F32 = DType.FLOAT32


def refused(plan):
    with raises(PlanFormatError):
        check_launches(plan)


def test_a_plan_of_the_compiler_is_taken(plan):
    check_launches(plan)


def test_a_moment_larger_than_its_parameter_is_refused_by_the_ops_types(edit):
    refused(edit.with_operand("adamw_update", 2, type=TensorType(F32, (999,)), strides_bytes=(4,)))


def test_moments_in_each_others_places_are_refused(edit):
    param, grad, m, v, *rest = edit.step.launches[edit.launch("adamw_update")].inputs
    swapped = edit.with_launch("adamw_update", inputs=(param, grad, v, m, *rest))
    refused(swapped)


def test_an_output_that_stands_still_is_refused(edit):
    launch = edit.step.launches[edit.launch("fused")]
    view = edit.plan.views[launch.outputs[0]]
    refused(edit.with_view(launch.outputs[0], strides_bytes=(0,) * view.type.rank))


def test_a_result_of_another_type_is_refused(edit):
    launch = edit.step.launches[edit.launch("matmul")]
    view = edit.plan.views[launch.outputs[0]]
    smaller = TensorType(F32, (view.type.shape[0], view.type.shape[1] - 1))
    refused(edit.with_view(launch.outputs[0], type=smaller))


def test_ids_that_are_no_integers_are_refused(edit):
    launch = edit.step.launches[edit.launch("embedding")]
    type_ = replace(edit.plan.views[launch.inputs[1]].type, dtype=F32)
    refused(edit.with_operand("embedding", 1, type=type_))


@pytest.mark.parametrize("kernel", ["numpy.no_such", "numpy.concat", "c.fused"])
def test_a_kernel_of_another_op_is_refused(edit, kernel):
    refused(edit.with_launch("matmul", kernel=kernel))


@pytest.mark.parametrize("op", ["no_such_op", "variable", "all_reduce"])
def test_an_op_that_no_kernel_computes_is_refused(edit, op):
    refused(edit.with_launch("matmul", op=op))


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        ("fused", "rows", "small"),
        ("fused", "columns", -1),
        ("adamw_update", "beta1", 2.0),
        ("adamw_update", "eps", None),
        ("embedding_grad", "rows", 10**12),
        ("embedding_grad", "rows", True),
        ("embedding_grad", "rows", -1),
    ],
)
def test_attributes_that_make_no_sense_are_refused(edit, op, name, value):
    refused(edit.with_attr(op, name, value))


def test_too_small_a_workspace_is_refused(edit):
    launch = next(x for x in edit.step.launches if x.workspace is not None)
    refused(edit.with_launch(launch.op, workspace=None))
    block = edit.plan.views[launch.workspace]
    small = replace(block, type=TensorType(DType.UINT8, (1,)))
    smaller = edit.with_launch(launch.op, workspace=len(edit.plan.views))
    refused(replace(smaller, views=(*smaller.views, small)))


def test_a_constant_or_a_foreign_register_is_not_written(edit):
    kernel = edit.step.launches[edit.launch("fused")]
    home = edit.plan.views[edit.plan.variables[0].view].register
    changed = edit.with_view(kernel.outputs[0], register=home)
    refused(changed)


def test_an_output_over_an_input_that_the_kernel_reads_later_is_refused(edit):
    matmul = edit.step.launches[edit.launch("matmul")]
    given, made = (edit.plan.views[v] for v in (matmul.inputs[0], matmul.outputs[0]))
    changed = edit.with_view(
        matmul.outputs[0], register=given.register, offset_bytes=given.offset_bytes
    )
    assert made.register != given.register
    refused(changed)
