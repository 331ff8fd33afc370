"""What attention on a GPU takes and needs; its numbers: `test_conformance`."""

import kernel_calls as harness
import pytest
from kernel_calls import bind_to

import compiler.ops.families.attention  # noqa: F401  # registers the ops
from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import attention, nvrtc
from actors.kernels.cuda.attention_rows import attention_text
from actors.kernels.cuda.calls import RunProduct
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.kernel import DeviceView, gpu_named
from compiler.contract.types import DType, TensorType, contiguous_strides

GPU = gpu_named("h200")
FORWARD, BACKWARD = kernels_on(GPU)["cuda.attention"], kernels_on(GPU)["cuda.attention_grad"]
FLOATS = "float16", "bfloat16", "float32", "float64"
both_masks = pytest.mark.parametrize("causal", [False, True])


def types_of(dtype, *shapes):
    return tuple([TensorType(DType(dtype), shape) for shape in shapes])


def statistics(dtype):
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def needs_of(kernel, shapes, dtype, causal, strides=None):
    """Return the needs of a call of these shapes, statistics last among inputs or outputs."""

    def operand(shape):
        label = statistics(dtype) if len(shape) == len(shapes["q"]) - 1 else dtype
        type_ = TensorType(DType(label), shape)
        own = contiguous_strides(shape, type_.dtype.itemsize)
        if strides is not None and len(shape) == len(shapes["q"]):
            own = strides
        return Operand(type_, 0, own)

    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    y, row = (*q[:-1], v[-1]), q[:-1]
    inputs, outputs = (
        ((q, k, v), (y, row, row)) if kernel is FORWARD else ((y, q, k, v, y, row, row), (q, k, v))
    )
    attrs = {"scale": 0.125, "causal": causal}
    return harness.needs_of(kernel, attrs, *[tuple(map(operand, s)) for s in (inputs, outputs)])


@both_masks
def test_the_library_works_where_it_may(causal):
    """It wants its workspace at multiples of 256, as the scratch of a launch lies."""
    shape = (2, 3, 601, 64)  # what else lies there is no multiple of that
    shapes = {"q": shape, "k": shape, "v": shape}
    q, row = types_of("float32", shape, shape[:-1])
    ends = [
        (FORWARD, (q, q, q), (q, row, row)),
        (BACKWARD, (q, q, q, q, q, row, row), (q, q, q)),
    ]
    for kernel, *sides in ends:
        size = needs_of(kernel, shapes, "float32", causal).workspace_bytes
        scratch = DeviceView(1 << 30, TensorType(DType.UINT8, (size,)), (1,))
        views = [
            tuple([DeviceView(1 << 40, t, contiguous_strides(t.shape, 4)) for t in side])
            for side in sides
        ]
        calls = bind_to(kernel, {"scale": 0.125, "causal": causal}, *views, scratch)
        places = [call.workspace for call in calls if isinstance(call, RunProduct)]
        assert any(places)
        assert [place % 256 for place in places] == [0] * len(places)


def heads_of(batch, heads, length, width=64):
    shape = (batch, heads, length, width)
    return {"q": shape, "k": shape, "v": shape}


def test_scratch_is_bounded_whatever_the_lengths():
    cap = attention.CHUNK_BYTES + (64 << 20)
    packed = (1024 * 3 * 768 * 2, 64 * 2, 3 * 768 * 2, 2)
    for causal in (False, True):
        assert (
            needs_of(FORWARD, heads_of(64, 12, 1024), "bfloat16", causal, packed).workspace_bytes
            < cap
        )
        for length in (1024, 16_384):
            shapes = heads_of(1, 12, length)
            assert needs_of(FORWARD, shapes, "float32", causal).workspace_bytes < cap
            assert needs_of(BACKWARD, shapes, "float32", causal).workspace_bytes < cap
    wide = needs_of(BACKWARD, heads_of(64, 12, 1024), "bfloat16", True, packed)
    assert wide.workspace_bytes < 2 * cap


def test_heads_cut_out_of_a_projection_take_hardly_more_calls_than_dense_ones():
    packed = (1024 * 3 * 768 * 2, 64 * 2, 3 * 768 * 2, 2)
    for kernel in (FORWARD, BACKWARD):
        apart, dense = (
            needs_of(kernel, heads_of(64, 12, 1024), "bfloat16", True, strides)
            for strides in (packed, None)
        )
        assert apart.duration_ns < 1.15 * dense.duration_ns


def test_a_mask_saves_work_and_the_estimate_says_so():
    for kernel in (FORWARD, BACKWARD):
        full, half = (
            needs_of(kernel, heads_of(8, 12, 4096), "bfloat16", causal).duration_ns
            for causal in (False, True)
        )
        assert half < 0.7 * full


def test_integers_are_refused():
    shapes = heads_of(1, 2, 8, 4)
    assert needs_of(FORWARD, shapes, "int32", False) is None


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("is_masked", "is_dropped"), [(False, False), (True, False), (True, True)])
def test_texts_are_built_for_every_gpu_and_spill_nothing(dtype, arch, is_masked, is_dropped):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")
    text = attention_text(DType(dtype), is_masked, is_dropped)
    for usage in nvrtc.usage(text, arch).values():
        assert usage.spilled_bytes == 0
        assert usage.registers <= (160 if dtype == "float64" else 96)
