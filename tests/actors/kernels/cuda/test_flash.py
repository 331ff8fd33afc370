"""Attention on tensor cores, emulated, against float64; what it takes and needs, and its texts."""

import itertools
from dataclasses import replace
from functools import partial

import kernel_calls as harness
import numpy as np
import pytest
from attention_formulas import attention
from emulated_run import loaded, stored
from kernel_calls import operand
from kernel_problems import MASKS, attended
from kernel_problems import operands as drawn
from kernel_targets import NO_NUMBER, Target, hold, results_of

from actors.kernels.common.kernel import Operand
from actors.kernels.cuda import flash, nvrtc
from actors.kernels.cuda.catalogue import kernels_by_name, kernels_on
from actors.kernels.cuda.flash import (
    BODY,
    FlashShape,
    flash_text,
)
from actors.kernels.cuda.kernel import gpu_named, known_gpus
from actors.testing.emulated.kernels import EmulationError
from compiler.contract.types import DType, TensorType, contiguous_strides

GPU = gpu_named("h100")
FORWARD, BACKWARD = (
    kernels_on(GPU)["cuda.flash_attention"],
    kernels_on(GPU)["cuda.flash_attention_grad"],
)
GRADIENT_INPUTS = "dy", "q", "k", "v", "y", "lse", "tail"
LIMITS = {"float16": 4e-3, "bfloat16": 3e-2}
both_masks = pytest.mark.parametrize("causal", [False, True])
both_ops = pytest.mark.parametrize("op", ["attention", "attention_grad"])

CASES = [
    # leading axes, queries, keys, width of keys, width of values
    ((2, 3), 17, 17, 8, 8), ((), 5, 70, 16, 8), ((2,), 1, 66, 8, 24), ((2, 1), 130, 140, 64, 64),
    ((1,), 65, 21, 32, 32), ((1,), 129, 129, 48, 64), ((1,), 70, 75, 80, 96),
    ((1,), 66, 130, 128, 128), ((1,), 64, 64, 64, 64), ((1,), 192, 192, 16, 16),
]  # fmt: skip


@pytest.fixture(params=[GPU.num_sms, 1], ids=["few blocks", "many blocks"])
def gpu(request):
    """A GPU that has more multiprocessors than a call has blocks, or fewer."""
    return replace(GPU, num_sms=request.param)


@pytest.fixture
def emulated(native_toolchain):
    """Attention as it is planned for a GPU, run on the host."""
    return Target("cuda", native_toolchain)


def kernel_of(op, gpu=GPU):
    return kernels_on(gpu)[f"cuda.flash_{op}"]


@both_masks
@both_ops
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_whole_matrices(case, op, causal, gpu, emulated):
    problem = attended(op, case, {"scale": 0.4, "causal": causal})
    hold(emulated, kernel_of(op, gpu), problem, "bfloat16", LIMITS["bfloat16"])


@both_ops
@pytest.mark.parametrize("axes", [x for x in MASKS.values() if x], ids=str)
def test_masks_hide_some_keys_or_all(axes, op, gpu, emulated):
    shape = tuple(np.where(axes, (2, 3, 70, 75), 1).tolist())
    rng = np.random.default_rng(3)
    mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape))
    if shape[-2] > 1:
        mask[..., 1, :] = -np.inf
    problem = attended(op, ((2, 3), 70, 75, 16, 8), {"scale": 0.4, "causal": False}, (mask,))
    hold(emulated, kernel_of(op, gpu), problem, "bfloat16", LIMITS["bfloat16"])


def forward(target, attrs, q, k, v, *mask, dtype="bfloat16", gpu=GPU):
    """Return y, lse and tail of operands that are stored."""
    kind = DType(dtype)
    results = (
        TensorType(kind, (*q.shape[:-1], v.shape[-1])),
        *[TensorType(DType.FLOAT32, q.shape[:-1])] * 2,
    )
    operands = [q, k, v, *mask]
    kernel = kernel_of("attention", gpu)
    return target.run(kernel, attrs, [kind] * len(operands), operands, results)[0]


def test_a_query_that_sees_the_least_numbers_alone_weighs_its_keys_alike(emulated):
    rng = np.random.default_rng(3)
    q, k, v = [stored(rng.standard_normal((1, n, 16)), "bfloat16") for n in (5, 70, 70)]
    mask = stored(rng.standard_normal((1, 5, 70)), "bfloat16")
    mask[0, 1] = 0xFF7F  # the least there is
    mask[0, 2, 3] = 0x7FC0  # NaN
    y, *_ = forward(emulated, {"scale": 0.4, "causal": False}, q, k, v, mask)
    got = loaded(y)[0]
    np.testing.assert_allclose(got[1], loaded(v)[0].mean(0), atol=5e-3)
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[[0, 1, 3, 4]]).all()


def packed(arrays):
    """Return tensors of one shape as windows of one, as a projection has its heads."""
    *batch, rows, width = arrays[0].shape
    whole = np.empty((rows, len(arrays), *batch, width), arrays[0].dtype)
    windows = [np.moveaxis(whole[:, i], 0, -2) for i in range(len(arrays))]
    for window, array in zip(windows, arrays, strict=True):
        window[...] = array
    return windows


@pytest.mark.parametrize("dtype", LIMITS)
def test_heads_of_a_projection_are_read_where_they_lie(dtype, emulated):
    attrs, case = {"scale": 0.3, "causal": True}, ((2, 3), 40, 40, 16, 16)
    for op, limit in (("attention", 1), ("attention_grad", 4)):
        problem = attended(op, case, attrs)
        arrays, _ = problem.stored(dtype, "dense")
        first = 0 if op == "attention" else 1
        heads = packed([loaded(x) for x in arrays[first : first + 3]])
        inputs = [*problem.inputs[:first], *heads, *problem.inputs[first + 3 :]]
        lying = problem._replace(inputs=tuple(inputs))
        hold(emulated, kernel_of(op), lying, dtype, limit * LIMITS[dtype], lie="own")


@both_masks
def test_scores_far_from_zero_are_right_where_plain_exponentials_are_not(causal, emulated):
    q, k, v, _ = drawn(((2,), 40, 70, 16, 16))
    k[:, :, 0], q[..., 0] = 1, 100
    k[1, ::3, 0] = 0.5
    stored_ones = [stored(x, "bfloat16") for x in (q, k, v)]
    attrs = {"scale": 1.0, "causal": causal}
    y, lse, _ = forward(emulated, attrs, *stored_ones)
    wanted, logs, _ = attention(*map(loaded, stored_ones), **attrs)
    np.testing.assert_allclose(loaded(y), wanted, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, logs, rtol=1e-5)


def test_keys_without_any_weight_in_the_first_tiles_count_nothing(gpu, emulated):
    q, k, v, _ = drawn(((1,), 3, 140, 16, 16))
    q[...] = 1
    k[:, :130] = -np.inf
    stored_ones = [stored(x, "bfloat16") for x in (q, k, v)]
    attrs = {"scale": 1.0, "causal": False}
    y, lse, _ = forward(emulated, attrs, *stored_ones, gpu=gpu)
    one, two, three = map(loaded, stored_ones)
    wanted, logs, _ = attention(one, two[:, 130:], three[:, 130:], **attrs)
    np.testing.assert_allclose(loaded(y), wanted, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, logs, rtol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient(gpu, emulated):
    q, k, v, dy = drawn(((1,), 20, 20, 16, 16))
    q[...] = 1
    k[...] = -np.inf
    attrs = {"scale": 1.0, "causal": False}
    one, two, three, slope = [stored(x, "bfloat16") for x in (q, k, v, dy)]
    y, lse, tail = forward(emulated, attrs, one, two, three, gpu=gpu)
    assert not loaded(y).any()
    assert (lse < NO_NUMBER).all()
    results = [TensorType(DType.BFLOAT16, x.shape) for x in (q, k, v)]
    dtypes = [*[DType.BFLOAT16] * 5, *[DType.FLOAT32] * 2]
    operands = [slope, one, two, three, y, lse, tail]
    kernel = kernel_of("attention_grad", gpu)
    grads = emulated.run(kernel, attrs, dtypes, operands, results)[0]
    assert not loaded(grads[2]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("key", [3, 70, 147])
def test_queries_that_do_not_see_a_bad_position_do_not_feel_it(key, where, bad, gpu, emulated):
    attrs, results = {"scale": 0.4, "causal": True}, {}
    for kind in ("clean", "spoiled"):
        q, k, v, dy = drawn(((1,), 140, 150, 16, 16))
        if kind == "spoiled":
            k[:, key, 5 * (where != "both") :] = bad if where != "value" else k[:, key, 5:]
            v[:, key, 5 * (where != "both") :] = bad if where != "key" else v[:, key, 5:]
        q, k, v, dy = [stored(x, "bfloat16") for x in (q, k, v, dy)]
        y, lse, tail = forward(emulated, attrs, q, k, v, gpu=gpu)
        grads = [TensorType(DType.BFLOAT16, x.shape) for x in (q, k, v)]
        dtypes = [*[DType.BFLOAT16] * 5, *[DType.FLOAT32] * 2]
        operands = [dy, q, k, v, y, lse, tail]
        kernel = kernel_of("attention_grad", gpu)
        dq, *_ = emulated.run(kernel, attrs, dtypes, operands, grads)[0]
        results[kind] = [loaded(y), lse, loaded(dq)]
    unseen = slice(0, max(0, key - 10))
    for got, want in zip(results["spoiled"], results["clean"], strict=True):
        np.testing.assert_array_equal(got[:, unseen], want[:, unseen])
    y, lse, dq = results["spoiled"]
    if where != "key":
        assert not np.isfinite(y[:, unseen.stop :, 5:]).any()
    if where == "value":
        np.testing.assert_array_equal(y[..., :5], results["clean"][0][..., :5])
    if where == "both" and np.isnan(bad):
        assert np.isnan(y[:, unseen.stop :]).all()
        assert np.isnan(dq[:, unseen.stop :]).all()


FAULTS = {
    "a tile is read before it is there": (
        "attention", "AF_COPIED();\n    AF_BARRIER();", "AF_BARRIER();"),
    "a tile is overwritten while others read it": (
        "attention", "firsts, 0\n            );\n        AF_BARRIER();",
        "firsts, 0\n            );"),
    "a tile of keys is overwritten": (
        "attention_grad", "firsts, 1\n            );\n        AF_BARRIER();",
        "firsts, 1\n            );"),
    "a tile of queries is overwritten": (
        "attention_grad", "        AF_COPIED();\n        AF_BARRIER();", "        AF_COPIED();"),
    "keys behind the last are seen": ("attention", "at >= end ||", ""),
    "queries behind the last are taken": ("attention", "t == 0 && row < rows", "t == 0"),
    "a query sees the key after its own": ("attention", "+ shift + 1;", "+ shift + 2;"),
    "a query does not see its own key": ("attention_grad", "+ shift + 1;", "+ shift;"),
    "of a causal call the last keys are hidden": ("attention", "+ shift + 1;", "+ 1;"),
    "queries end at a key too early": ("attention", "first + NAME_ROWS + shift)", "first)"),
    "keys begin at a query too late": ("attention_grad", "(0, first - shift)", "(0, first)"),
    "some queries of a warp's keys are left out": (
        "attention_grad", "hidden + NAME_QUERIES - 1 <=", "hidden <="),
    "sums are not shrunk": ("attention", "fmaf(total[m][h], shrink, sum)", "total[m][h] + sum"),
    "results are not shrunk": ("attention", "y[m][n][2 * h] *= shrink,", ""),
    "the sums of queries are not taken off": ("attention_grad", "(*x - delta)", "*x"),
    "a matrix is not turned": ("attention_grad", "AF_TURNED_MATRICES", "AF_MATRICES"),
    "two warps share their rows": ("attention", "/ 32 * NAME_WARP_ROWS", "/ 64 * NAME_WARP_ROWS"),
    "tiles change their places": ("attention_grad", "stages + (tile & 1)", "stages + (~tile & 1)"),
}  # fmt: skip

FAULTS_OF_GROUPS = {
    "sums of a group are added before they are there": (
        "attention_grad", "NAME_hand_over(space, x, count);\n    AF_BARRIER();",
        "NAME_hand_over(space, x, count);"),
    "sums are handed over where others are read": (
        "attention_grad", "group);\n        AF_BARRIER();\n        NAME_add_groups(&dv",
        "group);\n        NAME_add_groups(&dv"),
    "rows behind those of a block are copied": (
        "attention_grad", "if (count * NAME_CHUNKS % NAME_THREADS && row >= count) break;", ""),
    "all groups have the same keys": (
        "attention_grad", "part = group * NAME_KEYS;", "part = 0;"),
    "all groups have the same queries": (
        "attention_grad", "part = group * NAME_QUERIES;", "part = 0;"),
    "a query does not see its own key": ("attention_grad", "+ shift + 1;", "+ shift;"),
    "a group's sums are left out": (
        "attention_grad", "other < NAME_GROUPS - 1;", "other < NAME_GROUPS - 2;"),
    "heads and blocks change their places": (
        "attention_grad", "block = NAME_GROUPS > 1 ? outer : inner;", "block = inner;"),
}  # fmt: skip


def is_right(target, op, gpu):
    """Whether several tiles, with tails, are as they should be, in two orders of threads."""
    cases = ((2,), 140, 150, 16, 16), ((1,), 70, 200, 16, 8)
    try:
        for case, causal in itertools.product(cases, (False, True)):
            problem = attended(op, case, {"scale": 0.4, "causal": causal})
            hold(target, kernel_of(op, gpu), problem, "float16", LIMITS["float16"])
    except (AssertionError, EmulationError):
        return False
    return True


@both_ops
def test_several_tiles_with_tails_are_right(op, gpu, emulated):
    assert is_right(emulated, op, gpu)


@pytest.fixture
def plant(monkeypatch):
    """Return a function that puts other words into the text of the kernel."""

    def replace_text(right, wrong):
        assert right in BODY
        body = BODY.replace(right, wrong)
        monkeypatch.setattr(flash, "flash_text", partial(flash_text, body=body))

    return replace_text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_found(fault, emulated, plant):
    op, right, wrong = FAULTS[fault]
    plant(right, wrong)
    assert not is_right(emulated, op, replace(GPU, num_sms=1))


@pytest.mark.parametrize("fault", FAULTS_OF_GROUPS)
def test_a_fault_of_groups_is_found(fault, emulated, plant):
    op, right, wrong = FAULTS_OF_GROUPS[fault]
    plant(right, wrong)
    assert not is_right(emulated, op, GPU)


LARGE = 2.0**25
"""Beside it a float32 loses a 1."""


def sums_of_groups(target):
    """Return dv: sums of LARGE, -LARGE, 1 and 1, each of another group, and 0 otherwise."""
    step = 16  # what a group meets at a time
    terms = np.zeros((1, 4 * step, 16))
    terms[0, ::step] = np.array([LARGE, -LARGE, 1, 1])[:, None]
    terms, none = stored(terms, "bfloat16"), stored(np.zeros((1, 4 * step, 16)), "bfloat16")
    attrs = {"scale": 1.0, "causal": False}
    statistics = [np.zeros((1, 4 * step), np.float32)] * 2  # so all weights are 1
    results = [TensorType(DType.BFLOAT16, none.shape)] * 3
    dtypes = [*[DType.BFLOAT16] * 5, *[DType.FLOAT32] * 2]
    operands = [terms, *[none] * 4, *statistics]
    return loaded(target.run(BACKWARD, attrs, dtypes, operands, results)[0][2])


def test_groups_are_added_in_their_order(emulated, plant):
    np.testing.assert_array_equal(sums_of_groups(emulated), 2)
    loop = "for (int32_t other = 0; other < NAME_GROUPS - 1; other++)"
    plant(loop, "for (int32_t other = NAME_GROUPS - 2; other >= 0; other--)")
    assert (sums_of_groups(emulated) != 2).all()


@both_ops
@pytest.mark.parametrize("scale", [0.125, 2.0**-30, 4.0])
def test_a_scale_that_rounds_nothing_gives_the_same_bits_in_fewer_instructions(
    op, scale, gpu, emulated, monkeypatch
):
    problem = attended(op, ((2,), 140, 150, 16, 16), {"scale": scale, "causal": True})
    arrays, dtypes = problem.stored("bfloat16", "dense")
    results = results_of(problem, dtypes)
    kernel = kernel_of(op, gpu)
    taken = emulated.run(kernel, problem.attrs, dtypes, arrays, results)[0]
    monkeypatch.setattr(flash, "_is_power_of_2", lambda scale: False)
    rounded = emulated.run(kernel, problem.attrs, dtypes, arrays, results)[0]
    for one, other in zip(taken, rounded, strict=True):
        assert one.tobytes() == other.tobytes()


@both_ops
def test_another_order_of_threads_and_blocks_gives_the_same_bits(op, gpu, emulated):
    problem = attended(op, ((3,), 140, 150, 16, 16), {"scale": 0.4, "causal": True})
    arrays, dtypes = problem.stored("bfloat16", "dense")
    results = results_of(problem, dtypes)
    runs = [
        emulated.run(kernel_of(op, gpu), problem.attrs, dtypes, arrays, results, other=other)[0]
        for other in (0, 1, 2)
    ]
    for one, *others in zip(*runs, strict=True):
        assert [x.tobytes() for x in others] == [one.tobytes()] * 2


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD], ids=lambda k: k.op)
def test_a_call_of_few_blocks_takes_as_long_as_its_longest(kernel):
    one, eight, many = [needs_of(kernel, ((n,), 64, 64, 64, 64)).duration_ns for n in (1, 8, 300)]
    assert one == eight
    assert many > one


def needs_of(kernel, case, gpu="h100", dtype="bfloat16", offset_bytes=0, **strides):
    """Return what a kernel says of a call; `strides` are of operands, by name."""
    problem = attended(kernel.op, case, {"scale": 0.5, "causal": False})
    arrays, dtypes = problem.stored(dtype, "dense")
    results = results_of(problem, dtypes)
    names = [*GRADIENT_INPUTS] if kernel.op == "attention_grad" else ["q", "k", "v"]
    ins = [operand(x, d) for x, d in zip(arrays, dtypes, strict=True)]
    ins = [
        replace(x, offset_bytes=offset_bytes, strides_bytes=strides.get(name, x.strides_bytes))
        for name, x in zip(names, ins, strict=True)
    ]
    outs = [Operand(t, 0, contiguous_strides(t.shape, t.dtype.itemsize)) for t in results]
    kernel = kernels_by_name(gpu)[kernel.name]
    return harness.needs_of(kernel, problem.attrs, tuple(ins), tuple(outs))


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD], ids=lambda k: k.op)
def test_it_takes_16_bit_heads_that_lie_at_multiples_of_16_bytes(kernel):
    case = (2, 3), 17, 33, 24, 40
    for dtype in LIMITS:
        assert needs_of(kernel, case, dtype=dtype) is not None
    assert needs_of(kernel, case, q=(0, 0, 48, 2)) is not None
    refused = [
        needs_of(kernel, case, dtype="float32"),
        needs_of(kernel, case, offset_bytes=8),
        needs_of(kernel, case, q=(2448, 816, 50, 2)),
        needs_of(kernel, case, k=(4752, 1584, 2, 66)),
        needs_of(kernel, ((2, 3), 17, 33, 20, 40)),
        needs_of(kernel, ((2, 3), 17, 33, 136, 40)),
        needs_of(kernel, ((2, 3), 0, 33, 8, 8)),
    ]
    assert refused == [None] * len(refused)


@pytest.mark.parametrize("gpu", known_gpus())
@pytest.mark.parametrize("width", [64, 128])
def test_every_gpu_has_the_shared_memory_of_a_block(gpu, width):
    for kernel in (FORWARD, BACKWARD):
        assert needs_of(kernel, ((1,), 9, 9, width, width), gpu=gpu) is not None


def test_scratch_of_the_gradient_is_three_numbers_of_each_query():
    assert needs_of(FORWARD, ((2, 3), 100, 40, 64, 64)).workspace_bytes == 0
    assert needs_of(BACKWARD, ((2, 3), 100, 40, 64, 64)).workspace_bytes == 6 * 128 * 16
    assert needs_of(BACKWARD, ((140,), 100, 40, 64, 64)).workspace_bytes == 140 * 128 * 16
    assert needs_of(BACKWARD, ((2, 3), 60, 40, 64, 64)).workspace_bytes == 6 * 64 * 16
    assert needs_of(BACKWARD, ((140,), 60, 40, 64, 64)).workspace_bytes == 140 * 128 * 16
    assert needs_of(BACKWARD, ((2, 3), 100, 40, 128, 64)).workspace_bytes == 6 * 128 * 16
    assert needs_of(BACKWARD, ((2, 3), 60, 40, 128, 64)).workspace_bytes == 6 * 64 * 16


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("width", "causal", "masked", "exact"),
    [
        *itertools.product([16, 64, 80, 128], [False], [False, True], [False]),
        *itertools.product([16, 64, 80, 128], [True], [False], [False]),
        *itertools.product([16, 64], [True], [False], [True]),
    ],
)
@pytest.mark.parametrize("is_split", [False, True], ids=["many blocks", "few blocks"])
def test_texts_are_built_for_every_gpu_and_spill_nothing(
    is_split, width, causal, masked, exact, dtype, arch
):
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed")
    shape = FlashShape(DType(dtype), width, 64, causal, masked, exact)
    if is_split:
        shape = shape.split
    for usage in nvrtc.usage(flash_text(shape), arch).values():
        assert (usage.spilled_bytes, usage.stack_bytes) == (0, 0)
        assert 256 * usage.registers <= 65_536
