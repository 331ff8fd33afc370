"""Which calls of attention go to cuDNN; what comes of them: `test_conformance`."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from emulated_run import loaded, stored
from kernel_calls import bind_to, needs_of

import compiler.ops.families.attention  # noqa: F401  # registers the ops
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import FillBytes, RunCudnn
from actors.kernels.cuda.catalogue import kernels_by_name, kernels_on
from actors.kernels.cuda.cudnn_library import ORDERED_GRADIENT
from actors.kernels.cuda.kernel import DeviceView, gpu_named, known_gpus
from actors.testing.emulated import library_calls
from compiler.contract.attrs import Attrs
from compiler.contract.types import DType, TensorType, contiguous_strides
from compiler.graph.registry import find_op, reference

GPU = gpu_named("h200")
FORWARD, BACKWARD = kernels_on(GPU)["cudnn.attention"], kernels_on(GPU)["cudnn.attention_grad"]
ORDERED = kernels_on(GPU)[ORDERED_GRADIENT]
LIMITS = {"float16": 3e-3, "bfloat16": 2e-2}
both_types = pytest.mark.parametrize("dtype", LIMITS)


def with_scores(scores_bytes):
    """Return the gradient with room for so many bytes of scores."""
    return replace(BACKWARD, plan=partial(BACKWARD.plan, scores_bytes=scores_bytes))


def packed(arrays):
    """Return tensors of one shape as windows of one, as a projection has its heads."""
    *batch, rows, width = arrays[0].shape
    whole = np.empty((rows, len(arrays), *batch, width), arrays[0].dtype)
    windows = [np.moveaxis(whole[:, i], 0, -2) for i in range(len(arrays))]
    for window, array in zip(windows, arrays, strict=True):
        window[...] = array
    return windows


def operands(case, dtype):
    """Return q, k, v and dy, stored."""
    batch, rows, columns, width, out = case
    shapes = (rows, width), (columns, width), (columns, out), (rows, out)
    return [
        stored(np.random.default_rng(i).standard_normal((*batch, *end)), dtype)
        for i, end in enumerate(shapes)
    ]


def asked(kernel, dtype, case, attrs=None, gpu=None, **changes):
    """Return what a kernel says of a call on dense tensors; `changes` are by operand's number."""
    batch, rows, columns, width, out = case
    q, k, v = [(*batch, n, w) for n, w in ((rows, width), (columns, width), (columns, out))]
    y, row = (*batch, rows, out), (*batch, rows)
    gradient_shapes = [y, q, k, v, y, row, row, q, k, v]
    names = gradient_shapes if kernel.op == "attention_grad" else [q, k, v, y, row, row]
    given = []
    for shape in names:
        kind = DType("float32" if shape == row else dtype)
        strides = contiguous_strides(shape, kind.itemsize)
        given.append(Operand(TensorType(kind, shape), 0, strides))
    for place, change in changes.items():
        index = int(place.removeprefix("at"))
        given[index] = replace(given[index], **change)
    count = 7 if kernel.op == "attention_grad" else 3
    attrs = {"scale": 0.5, "causal": False} | (attrs or {})
    kernel = kernel if gpu is None else kernels_by_name(gpu)[kernel.name]
    return needs_of(kernel, attrs, tuple(given[:count]), tuple(given[count:]))


def types_of(dtype, *shapes):
    return tuple([TensorType(DType(dtype), shape) for shape in shapes])


def forward(emulated_run, dtype, q, k, v, attrs, **more):
    types = types_of(dtype, (*q.shape[:-1], v.shape[-1])) + types_of("float32", *[q.shape[:-1]] * 2)
    dtypes = [DType(dtype)] * 3
    return emulated_run(FORWARD, attrs, (q, k, v), types, dtypes=dtypes, **more)


def expected(op, attrs, *inputs):
    return reference.get(find_op(op))(Attrs(attrs), *[loaded(x) for x in inputs])


def agree(got, wanted, limit):
    for array, right in zip(got, wanted, strict=True):
        scale = max(1.0, float(np.abs(right).max(initial=0)))
        np.testing.assert_allclose(loaded(array), right, rtol=limit, atol=limit * scale)


@both_types
def test_heads_of_a_projection_are_read_and_written_where_they_lie(emulated_run, dtype):
    attrs = {"scale": 0.3, "causal": True}
    q, k, v, dy = operands(((2, 3), 20, 20, 8, 8), dtype)
    there = forward(emulated_run, dtype, *packed([q, k, v]), attrs)
    agree(there.outputs, expected("attention", attrs, q, k, v), LIMITS[dtype])
    (call,) = [call for call in there.calls if isinstance(call, RunCudnn)]
    assert {tensor.strides for tensor in call.record.tensors[:3]} == {(24, 8, 144, 1)}
    assert not there.outputs[2].any()
    strides = [x.strides for x in packed([q, k, v])]
    back = emulated_run(
        BACKWARD,
        attrs,
        (dy, *packed([q, k, v]), *there.outputs),
        types_of(dtype, *[q.shape] * 3),
        dtypes=[*[DType(dtype)] * 5, *[DType.FLOAT32] * 2],
        output_strides=strides,
    )
    wanted = expected("attention_grad", attrs, dy, q, k, v, *there.outputs)
    agree(back.outputs, wanted, 2 * LIMITS[dtype])


def test_the_call_of_the_library_follows_one_that_clears_the_tail(emulated_run):
    attrs = {"scale": 0.3, "causal": False}
    calls = {}
    for dtype in LIMITS:
        q, k, v, _ = operands(((2,), 4, 4, 8, 8), dtype)
        calls[dtype] = [type(c) for c in forward(emulated_run, dtype, q, k, v, attrs).calls]
    assert calls == {"bfloat16": [FillBytes, RunCudnn], "float16": [FillBytes, RunCudnn]}


@pytest.mark.parametrize(
    ("kernel", "dtype", "case"),
    [
        (FORWARD, "float32", ((2,), 4, 4, 8, 8)),
        (FORWARD, "bfloat16", ((2,), 4, 4, 12, 8)),
        (FORWARD, "bfloat16", ((2,), 4, 4, 8, 20)),
        (FORWARD, "bfloat16", ((2,), 4, 4, 136, 8)),
        (BACKWARD, "float16", ((2,), 4, 4, 8, 136)),
        (FORWARD, "bfloat16", ((2,), 0, 4, 8, 8)),
        (BACKWARD, "bfloat16", ((0,), 4, 4, 8, 8)),
        (FORWARD, "bfloat16", ((70_000,), 1, 1, 8, 8)),
    ],
    ids=str,
)
def test_what_the_library_does_not_take_is_composed(kernel, dtype, case):
    assert asked(kernel, dtype, case) is None
    composed = (
        kernels_on(GPU)["cuda.attention"]
        if kernel is FORWARD
        else kernels_on(GPU)["cuda.attention_grad"]
    )
    assert asked(composed, dtype, case) is not None


CASE = (2, 3), 16, 16, 8, 8


@pytest.mark.parametrize(
    "change",
    [
        {"at0": {"offset_bytes": 8}},
        {"at1": {"strides_bytes": (768, 256, 2, 32)}},
        {"at1": {"strides_bytes": (780, 260, 16, 2)}},
        {"at2": {"strides_bytes": (0, 256, 16, 2)}},
        {"at3": {"strides_bytes": (768, 256, 20, 2)}},
        {"at4": {"strides_bytes": (256, 80, 4)}},
    ],
    ids=str,
)
def test_operands_that_lie_otherwise_than_the_library_loads_them_are_composed(change):
    assert asked(FORWARD, "bfloat16", CASE) is not None
    assert asked(FORWARD, "bfloat16", CASE, **change) is None


def test_the_gradient_is_the_librarys_where_it_can_be_repeated_within_bounded_scratch():
    for kernel in (BACKWARD, ORDERED):
        takes = [gpu for gpu in known_gpus() if asked(kernel, "bfloat16", CASE, gpu=gpu)]
        assert takes == ["h100", "h200"]
    assert all(asked(FORWARD, "bfloat16", CASE, gpu=gpu) is not None for gpu in known_gpus())


MARGIN = 16 << 20


def gpt2(batch, rows=1024):
    return (batch, 12), rows, rows, 64, 64


def test_scratch_is_fixed_by_shapes_small_or_that_of_dq_or_of_scores():
    assert asked(FORWARD, "bfloat16", gpt2(64)).workspace_bytes == 1 << 20
    assert asked(FORWARD, "float16", gpt2(64)).workspace_bytes == 1 << 20
    dq = 4 * 64 * 12 * 1024 * 64
    assert asked(ORDERED, "bfloat16", gpt2(64)).workspace_bytes == dq + dq // 64 + MARGIN
    for batch in (1, 8):
        scores = 2 * batch * 12 * 1024 * 1024
        sums = 4 * batch * 12 * 1024
        assert asked(BACKWARD, "bfloat16", gpt2(batch)).workspace_bytes == scores + sums + MARGIN
    eight = asked(BACKWARD, "bfloat16", gpt2(8)).workspace_bytes
    assert asked(BACKWARD, "bfloat16", gpt2(64)).workspace_bytes == eight
    padded = 2 * 6 * 64 * 64 + 4 * 6 * 128 + MARGIN
    assert asked(BACKWARD, "bfloat16", ((2, 3), 17, 17, 8, 8)).workspace_bytes == padded


def test_scores_of_more_than_there_is_room_for_are_left_to_the_gradient_in_order():
    assert asked(BACKWARD, "bfloat16", ((1,), 11_584, 11_584, 64, 64)) is not None
    for kernel in (BACKWARD, ORDERED):
        took = asked(kernel, "bfloat16", ((1,), 11_648, 11_648, 64, 64))
        assert (took is None) is (kernel is BACKWARD)
    faster, slower = [
        asked(kernel, "bfloat16", gpt2(64)).duration_ns for kernel in (BACKWARD, ORDERED)
    ]
    assert faster < slower


def gradient(emulated_run, kernel, q, k, v, dy, y, lse, tail, attrs):
    """Return what a gradient gives, for operands that lie as they are."""
    strides = [x.strides for x in (q, k, v)]
    return emulated_run(
        kernel,
        attrs,
        (dy, q, k, v, y, lse, tail),
        types_of("bfloat16", q.shape, k.shape, v.shape),
        dtypes=[*[DType.BFLOAT16] * 5, *[DType.FLOAT32] * 2],
        output_strides=strides,
    )


HEAD = 2 * 64 * 64
"""Bytes of the scores of a head of few rows."""


@pytest.mark.parametrize(
    ("most_heads", "portions"),
    [
        (12, [(4, 3)]),
        (11, [(2, 3)] * 2),
        (5, [(1, 3)] * 4),
        (2, [(1, 2), (1, 1)] * 4),
        (1, [(1, 1)] * 12),
    ],
    ids=str,
)
def test_portions_of_heads_give_the_bits_of_the_whole(emulated_run, most_heads, portions):
    attrs = {"scale": 0.3, "causal": True}
    q, k, v, dy = operands(((4, 3), 20, 20, 8, 8), "bfloat16")
    results = forward(emulated_run, "bfloat16", q, k, v, attrs).outputs
    given = (*packed([q, k, v]), dy, *results, attrs)
    whole = gradient(emulated_run, ORDERED, *given)
    kernel = with_scores(HEAD * most_heads + HEAD // 2)
    cut = gradient(emulated_run, kernel, *given)
    assert [call.record.tensors[0].shape[:2] for call in cut.calls] == portions
    assert [x.tobytes() for x in cut.outputs] == [x.tobytes() for x in whole.outputs]
    agree(cut.outputs, expected("attention_grad", attrs, dy, q, k, v, *results), 4e-2)
    assert {call.record.keeps_scores for call in (*cut.calls, *whole.calls)} == {True, False}
    for call in (*cut.calls, *whole.calls):
        assert call.workspace_bytes >= library_calls.least_workspace_bytes(call.record)


@pytest.mark.parametrize(
    ("count", "sizes"), [(64, {8}), (63, {9}), (30, {10}), (61, {10, 1}), (11, {10, 1})]
)
def test_portions_are_equal_where_that_costs_less_than_half_of_one(count, sizes):
    """Of another size there would be one more plan of the library."""
    given = asked_portions((count, 12), 1024)
    assert {call.record.tensors[0].shape[0] for call in given} == sizes


def asked_portions(batch, rows):
    """Return the calls of a gradient, at addresses that nobody reads."""
    shape, lse = (*batch, rows, 64), (*batch, rows)
    view = DeviceView(1 << 40, TensorType(DType.BFLOAT16, shape), contiguous_strides(shape, 2))
    sums = DeviceView(1 << 40, TensorType(DType.FLOAT32, lse), contiguous_strides(lse, 4))
    scratch = DeviceView(0, TensorType(DType.UINT8, (1 << 30,)), (1,))
    attrs = {"scale": 0.125, "causal": True}
    return bind_to(BACKWARD, attrs, (view,) * 5 + (sums,) * 2, (view,) * 3, scratch)


def test_a_portion_whose_sums_begin_between_loads_is_left_to_the_gradient_in_order():
    odd = (4, 1), 21, 21, 8, 8
    assert asked(BACKWARD, "bfloat16", odd) is not None
    assert asked(with_scores(HEAD), "bfloat16", odd) is None


def test_it_is_planned_to_take_less_time_than_the_composed_one_and_causal_half():
    for kernel, composed in (
        (FORWARD, kernels_on(GPU)["cuda.attention"]),
        (BACKWARD, kernels_on(GPU)["cuda.attention_grad"]),
    ):
        whole = asked(kernel, "bfloat16", gpt2(64)).duration_ns
        half = asked(kernel, "bfloat16", gpt2(64), {"causal": True}).duration_ns
        assert whole < asked(composed, "bfloat16", gpt2(64)).duration_ns
        assert 0.5 < half / whole < 0.6


def test_only_a_plan_with_cudnn_has_its_kernels():
    type_ = TensorType(DType.BFLOAT16, (2, 16, 8))
    one = Operand(type_, 0, contiguous_strides(type_.shape, 2))
    lse = Operand(TensorType(DType.FLOAT32, (2, 16)), 0, (64, 4))
    given = "h200", "attention", {"scale": 0.5, "causal": False}, (one,) * 3, (one, lse, lse)
    names = [catalogue.select_kernel(*given, uses_cudnn=uses)[0] for uses in (False, True)]
    assert names == ["cuda.flash_attention", "cudnn.attention"]
