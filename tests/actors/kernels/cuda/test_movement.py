"""Which calls copies on a GPU are; that they are right in every layout: `test_conformance`."""

from dataclasses import replace

import numpy as np
import pytest
from emulated_run import Place, execute, type_of
from error_texts import raises
from kernel_calls import bind_to, needs_of

from actors.kernels.common.host_memory import COPIES
from actors.kernels.common.kernel import KernelPlan
from actors.kernels.cuda import movement, nvrtc
from actors.kernels.cuda.calls import CopyBytes, FillBytes, RunKernel
from actors.kernels.cuda.catalogue import kernels_on
from actors.kernels.cuda.control import choose_text
from actors.kernels.cuda.kernel import gpu_named
from actors.testing.emulated import kernels
from compiler.contract.types import DType, TensorType

GPU = gpu_named("h200")
KERNELS = {op: kernels_on(GPU)[f"cuda.{op}"] for op in COPIES}


def values(shape, dtype):
    return np.random.default_rng(len(shape)).integers(0, 100, shape).astype(dtype)


def laid_out(harness, shape, dtype, kind):
    return harness.strided(None, shape, dtype, kind, values(shape, dtype))


def copied(emulated_run, x, strides=None, **more):
    type_ = type_of(x, DType(x.dtype.name))
    options = {"dtypes": [type_.dtype], "output_strides": [strides], **more}
    return emulated_run(KERNELS["copy"], {}, (x,), (type_,), **options)


def test_what_lies_alike_is_copied_as_bytes_whatever_its_axes(emulated_run):
    x = values((3, 5, 7), "float32")
    for array in (x, x.transpose(2, 0, 1), x[1:2]):
        found = copied(emulated_run, array, array.strides)
        (call,) = found.calls
        assert isinstance(call, CopyBytes)
        assert call.size_bytes == array.nbytes
    assert copied(emulated_run, x[:0]).calls == ()


def text_of(found):
    (call,) = found.calls
    return call.text


def test_long_runs_are_copied_in_elements_of_16_bytes_and_transposes_in_tiles(emulated_run):
    x = values((4, 6, 32), "float16")
    heads = copied(emulated_run, x.transpose(1, 0, 2))
    assert text_of(heads) == movement.elements_text(16)
    odd = copied(emulated_run, x.transpose(1, 0, 2), offset_bytes=4)
    assert text_of(odd) == movement.elements_text(4)
    narrow = copied(emulated_run, x[0].T)
    assert text_of(narrow) == movement.elements_text(2)
    square = values((40, 70), "float32").T
    assert text_of(copied(emulated_run, square)) == movement.tiles_text(4)
    np.testing.assert_array_equal(copied(emulated_run, square).outputs[0], square)


class FromOddBytes:
    """The copy, from 4 bytes behind its source."""

    name = "cuda.wrong"

    def plan(self, *call):
        plan = KERNELS["copy"].plan(*call)

        def bind(*places):
            (copy,) = plan.bind(*places)
            target, source, *others = copy.words
            return (replace(copy, words=(target, source + 4, *others)),)

        return KernelPlan(plan.needs, bind)


def test_wide_elements_at_an_odd_address_are_refused_as_a_gpu_would(emulated_run):
    x = values((4, 6, 32), "float16").transpose(1, 0, 2)
    type_ = type_of(x, DType.FLOAT16)
    with raises(kernels.EmulationError):
        emulated_run(FromOddBytes(), {}, (x,), (type_,), dtypes=[DType.FLOAT16])


def test_more_axes_or_elements_than_a_kernel_takes_are_cut(emulated_run, monkeypatch):
    x = values((2,) * 10, "float32")[..., ::-1].transpose(range(9, -1, -1))
    found = copied(emulated_run, x)
    assert len(found.calls) == 4
    np.testing.assert_array_equal(found.outputs[0], x)
    monkeypatch.setattr(movement, "_MAX_ELEMENTS", 100)
    y = values((9, 50), "float32")[:, ::2]
    found = copied(emulated_run, y)
    assert len(found.calls) == 4
    np.testing.assert_array_equal(found.outputs[0], y)


def test_indices_are_right_up_to_the_largest_count():
    """What the kernel divides by: the reciprocal of every extent is exact for 32 bits."""
    for extent in (2, 3, 7, 641, 65_535, 65_537, 6_700_417, (1 << 31) - 1):
        reciprocal = (1 << 64) // extent + 1
        for near in (0, extent, (1 << 31) // extent * extent, (1 << 31) - 1):
            for number in (near - 1, near, near + 1):
                if 0 <= number < 1 << 31:
                    assert number * reciprocal >> 64 == number // extent


def test_a_reshape_of_what_is_not_dense_goes_into_dense_bytes_alone(harness):
    x = harness.strided(None, (4, 6), np.float32, "transposed", values((4, 6), "float32"))
    y = harness.strided(None, (3, 8), np.float32, "sliced", values((3, 8), "float32"))
    attrs = {"shape": (3, 8)}
    apart = needs_of(KERNELS["reshape"], attrs, (harness.operand(x),), (harness.operand(y),))
    dense = needs_of(KERNELS["reshape"], attrs, (harness.operand(x),), (harness.operand(y + 0),))
    assert apart is None
    assert dense is not None


def reversed_axes(shape, dtype):
    return np.empty(shape[::-1], dtype).T


def test_as_few_inputs_are_copied_to_scratch_as_can_be(harness):
    kernel = kernels_on(GPU)["cuda.put_rows"]
    shape = (2,) * 8
    dense = np.empty(shape, "float32"), np.empty(shape, "int64"), np.empty(shape, "float32")
    attrs = {"depth": 8}

    def scratch(*inputs):
        operands = tuple(map(harness.operand, inputs))
        return needs_of(kernel, attrs, operands, operands[:1]).workspace_bytes

    x, ids, rows = dense
    apart = [reversed_axes(shape, array.dtype) for array in dense]
    least = scratch(x, ids, rows)
    needs = needs_of(
        kernel, attrs, tuple(map(harness.operand, (apart[0], ids, rows))), (harness.operand(x),)
    )
    # The kernel reads one operand however it lies, and nothing may lie over that.
    assert (needs.workspace_bytes, needs.in_place) == (least, ())
    assert scratch(x, apart[1], rows) == least + ids.nbytes
    assert scratch(x, ids, apart[2]) == least + rows.nbytes
    assert scratch(x, apart[1], apart[2]) == least + ids.nbytes + rows.nbytes


def test_what_a_kernel_writes_over_is_not_copied_to_scratch(harness):
    inputs = (np.zeros((6, 3)), np.zeros((5, 3)), np.zeros(5, "int32"), np.array(0.25))
    op, attrs, inputs = harness.fused("embedding_sgd_update", {"weight_decay": 0.0}, inputs)
    table, *rest = map(harness.operand, inputs)
    across = harness.operand(np.zeros((3, 6)).T)
    kernel = kernels_on(GPU)[f"cuda.{op}"]
    assert needs_of(kernel, attrs, (table, *rest), (table,)).in_place == ((0, 0),)
    assert needs_of(kernel, attrs, (across, *rest), (table,)) is None


def over_link(toolchain, target, source, shape, dtype):
    """Copy between a view of the device and an array of pinned memory; return the calls."""
    calls = bind_to(KERNELS["copy"], {}, (source,), (target,), None)
    kernels.load([call.text for call in calls if isinstance(call, RunKernel)], toolchain)
    execute(calls, 0, np.zeros(7, np.int64))
    return calls


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 60])
@pytest.mark.parametrize("kind", ["dense", "windowed", "sliced", "transposed"])
def test_copies_between_places_take_few_rows_as_bytes(kind, rows, native_toolchain, harness):
    x = laid_out(harness, (rows, 24), "float32", kind)
    place = Place(TensorType(DType.FLOAT32, x.shape), (128, 4))
    calls = over_link(native_toolchain, place.view, x, x.shape, x.dtype)
    np.testing.assert_array_equal(place.array, x)
    place.check()
    is_by_rows = rows <= 16 and (kind in ("dense", "windowed") or (kind, rows) == ("transposed", 1))
    assert [type(call) for call in calls] == ([CopyBytes] * rows if is_by_rows else [RunKernel])
    x.flags.writeable = False  # it is a view all the same, and no constant
    over_link(native_toolchain, place.view, x, x.shape, x.dtype)
    np.testing.assert_array_equal(place.array, x)
    back = np.empty_like(x)
    over_link(native_toolchain, back, place.view, x.shape, x.dtype)
    np.testing.assert_array_equal(back, x)


def test_zeros_of_dense_outputs_are_a_fill_of_bytes(emulated_run):
    attrs = {"low": (1,), "high": (1,), "steps": (1,)}
    found = emulated_run(
        KERNELS["pad"], attrs, (np.ones(4, np.float32),), (TensorType(DType.FLOAT32, (6,)),)
    )
    assert found.calls[0] == FillBytes(found.calls[0].target, 0, 24)


def test_a_copy_costs_its_bytes_and_a_sector_for_each_element_that_lies_alone(harness):
    def cost(x):
        out = np.empty(x.shape, x.dtype)
        return (
            KERNELS["copy"]
            .plan({}, (harness.operand(x),), (harness.operand(out),))
            .needs.duration_ns
        )

    whole = np.broadcast_to(np.float32(1), (1 << 14, 1 << 14))
    dense = np.lib.stride_tricks.as_strided(whole, whole.shape, (4 << 14, 4))
    apart = np.lib.stride_tricks.as_strided(whole, whole.shape, (4 << 20, 64))
    # Numbers alone: where an assertion fails pytest would print arrays that are not there.
    costs, costs_turned, costs_apart = cost(dense), cost(dense.T), cost(apart)
    assert costs == pytest.approx(GPU.call_ns + 2 * 2**30 / GPU.bytes_per_ns)
    assert costs_apart == pytest.approx(GPU.call_ns + (2**30 + 2**33) / GPU.bytes_per_ns)
    assert costs_turned == costs


TEXTS = {
    **{f"elements of {n}": movement.elements_text(n) for n in (1, 2, 4, 8, 16)},
    **{f"tiles of {n}": movement.tiles_text(n) for n in (1, 2, 4, 8)},
    **{f"chosen elements of {n}": choose_text(n) for n in (1, 16)},
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_texts_are_built_for_every_gpu_and_spill_nothing(arch, name):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")
    (usage,) = nvrtc.usage(TEXTS[name], arch).values()
    assert usage.spilled_bytes == 0
    assert usage.registers <= 40
