"""No launch allocates arrays: at a medium size, launches stay under a few KiB and keep none."""

import tracemalloc

import numpy as np
import pytest

from actors.kernels.host import catalogue
from actors.kernels.reference.linear_algebra import LINEAR_ALGEBRA_KERNELS
from compiler.contract.program import FusedProgram, Instruction, Kind, ProgramInput
from compiler.contract.region import TiledLoop, TileStep, TileStepKind, TileValue
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import Op, kernel_op

LAUNCHES, ROUNDS = 20, 3
NUMPY_1 = np.__version__.startswith("1.")
LIMIT_BYTES = (32 if NUMPY_1 else 16) * 1024  # where a sum casts, numpy 1 makes two buffers, 2 one
KEPT_BYTES = 4 * 1024  # numpy keeps a few blocks of under 1 KiB for reuse, however many launches
SHAPE = (64, 6, 64)
F32 = DType.FLOAT32
FUSED = FusedProgram(
    (ProgramInput(F32, Kind.FULL), ProgramInput(F32, Kind.COLUMN)),
    (Instruction("add", (0, 1), F32, Kind.FULL), Instruction("row_sum", (2,), F32, Kind.ROW)),
    (2, 3),
)
REGION = TiledLoop(
    384, 64, 100, 4, (TileValue(F32, Kind.FULL),) * 2,
    tuple([TensorType(F32, shape) for shape in ((384,), (384, 32), (64, 32), (64,))]),
    (
        TileStep(TileStepKind.PRODUCT, (0, 1), (4,)),
        TileStep(TileStepKind.PROGRAM, (4, 3), (5, 6), FUSED),
        TileStep(TileStepKind.PRODUCT, (5, 2), (7,)),
        TileStep(TileStepKind.SUM_OF_PRODUCTS, (5, 0), (8,)),
        TileStep(TileStepKind.COLUMN_SUM, (5,), (9,)),
    ),
)  # fmt: skip

PIECES = TiledLoop(
    384, 64, 0, 3, (TileValue(F32, Kind.FULL),),
    (TensorType(F32, (384, 64)), TensorType(F32, (384,))),
    (TileStep(TileStepKind.PRODUCT, (0, 1), (3,)),
     TileStep(TileStepKind.PROGRAM, (3, 2), (4, 5), FUSED)),
)  # fmt: skip


def floats(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def ids(high, *shape):
    return np.random.default_rng(1).integers(0, high, shape).astype(np.int32)


def scalars():
    return np.array(0.01, np.float32), np.array(3, np.int64)


def types(*pairs):
    return tuple(np.zeros(shape, dtype) for shape, dtype in pairs)


def f32(*shapes):
    return types(*[(shape, "float32") for shape in shapes])


def cases():
    x, y, flat = floats(*SHAPE), floats(*SHAPE) ** 2, floats(384, 64)
    lr, step = scalars()
    row = floats(64)
    adamw = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    soft = {"scale": 0.5, "causal": True}
    padding = {"low": (1, 0, 2), "high": (0, 0, 0), "steps": (1, 1, 2)}
    reduced = {"axes": (1,), "keepdims": False}
    table = floats(50, 64)
    heads = floats(8, 32, 4, 16)
    yield "sum", {"axes": (1, 2), "keepdims": False}, (x,), f32((64,))
    yield "sum", {"axes": (0,), "keepdims": True}, (x,), f32((1, 6, 64))
    yield "sum", {"axes": (0, 1, 2), "keepdims": False}, (x,), f32(())
    for op in ("sum", "mean", "max"):
        yield op, reduced, (x,), f32((64, 64))
        yield op, {"axes": (0,), "keepdims": False}, (flat.T,), f32((384,))
    yield "copy", {}, (x,), f32(SHAPE)
    yield "reshape", {"shape": (384, 64)}, (x.swapaxes(0, 2),), f32((384, 64))
    yield "pad", padding, (x,), f32((65, 6, 129))
    yield "concat", {"axis": 1}, (x, y), f32((64, 12, 64))
    yield "matmul", {}, (x, floats(64, 30)), f32((64, 6, 30))
    yield "matmul", {}, (flat.T, flat), f32((64, 64))
    yield "matmul", {}, (x[..., ::2], floats(60, 64).T[::2]), f32((64, 6, 60))
    split, keys = heads.transpose(0, 2, 1, 3), heads.transpose(0, 2, 3, 1)
    yield "matmul", {}, (split, keys), f32((8, 4, 32, 32))
    merged = f32((8, 32, 4, 16))[0].transpose(0, 2, 1, 3)
    yield "matmul", {}, (floats(8, 4, 32, 32), split), (merged,)
    turned = floats(8, 32, 4, 16).transpose(0, 2, 1, 3)
    for scale in (0.25, 40.0):  # the second one needs the maxima
        steep = {"scale": scale, "causal": True}
        rows = np.full((8, 4, 32), 3 * scale, np.float32), np.zeros((8, 4, 32), np.float32)
        yield "attention", steep, (split,) * 3, f32((8, 4, 32, 16), *[(8, 4, 32)] * 2)
        made = f32(*[(8, 4, 32, 16)] * 3)
        yield "attention_grad", steep, (turned, *(split,) * 3, turned, *rows), made
        qkv = [part.swapaxes(1, 2) for part in floats(3, 8, 32, 4, 16)]
        dqkv = tuple(np.moveaxis(np.zeros((8, 32, 3, 4, 16), np.float32), 2, 0).swapaxes(2, 3))
        (by_row,) = (f32((8, 32, 4, 16))[0].swapaxes(1, 2),)
        yield "attention", steep, tuple(qkv), (by_row, *f32(*[(8, 4, 32)] * 2))
        yield "attention_grad", steep, (turned, *qkv, turned, *rows), dqkv
    yield "attention", soft, (split[..., ::2],) * 3, f32((8, 4, 32, 8), *[(8, 4, 32)] * 2)
    ways = {"strides": (1, 1), "low": (1, 1), "high": (1, 1), "dilation": (1, 1)}
    image, weight = floats(4, 8, 24, 24), floats(8, 8, 3, 3)
    conv, pool = ways | {"groups": 1}, ways | {"kernel": (3, 3)}
    yield "conv", conv, (image, weight), f32(image.shape)
    yield "conv_input_grad", conv | {"spatial": (24, 24)}, (image, weight), f32(image.shape)
    yield "conv_weight_grad", conv | {"kernel": (3, 3)}, (image, image), f32(weight.shape)
    taps = types((image.shape, "uint8"))
    yield "max_pool", pool, (image,), (*f32(image.shape), *taps)
    yield "max_pool_grad", pool | {"spatial": (24, 24)}, (image, *taps), f32(image.shape)
    yield "max_pool_pick", pool, (image, *taps), f32(image.shape)
    yield "embedding", {}, (table, ids(50, 16, 24)), f32((16, 24, 64))
    yield "embedding_grad", {"rows": 50}, (floats(16, 24, 64), ids(50, 16, 24)), f32((50, 64))
    rows = (table, floats(16, 24, 64), ids(50, 16, 24), lr)
    yield "embedding_sgd_update", {"weight_decay": 0.0}, rows, f32((50, 64))
    group = {"program": FUSED, "rows": 384, "columns": 64}
    yield "fused", group, (flat, row), f32((384, 64), (384,))
    yield "region", {"region": PIECES}, (flat, floats(64, 64), row), f32((384, 64), (384,))
    operands = (floats(384, 32), floats(32, 64), floats(64, 32), row)
    yield "region", {"region": REGION}, operands, f32((384,), (384, 32), (64, 32), (64,))
    yield "increment", {}, (step,), types(((), "int64"))
    yield "copy_block", {"size_bytes": x.nbytes}, (x,), f32(SHAPE)
    yield "carry", {}, (x, y), f32(SHAPE)
    yield "last_place", {"rows": 50}, (ids(50, 16, 24),), types(((50,), "int32"))
    put = (x, ids(64, 16, 24), floats(16, 24, 6, 64))
    yield "put_rows", {"depth": 1}, put, f32(SHAPE)
    yield "recurrence", {"reverse": False}, (x, y), f32(SHAPE)
    yield "adamw_update", adamw, (x, y, y, y, lr, step), f32(SHAPE, SHAPE, SHAPE)


CASES = list(cases())


WITH_BODIES = {"cond", "scan", "while"}
"""Ops that run the launches of a body, which are bound like any others."""


ALLOCATING = {"argsort", *[kernel.op for kernel in LINEAR_ALGEBRA_KERNELS]}
"""numpy returns an array of its own; the sort in C does not."""


def test_every_kernel_is_measured():
    known = {kernel.op for kernel in catalogue.HOST_KERNELS} - WITH_BODIES - ALLOCATING
    assert {kernel_op.get(Op(case[0])) or case[0] for case in CASES} == known


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_launches_allocate_no_arrays(case, harness):
    op, attrs, inputs, outputs = case
    launch, _, _ = harness.bind(op, attrs, inputs, outputs)
    tracemalloc.start()
    try:
        launched(launch)  # the interpreter and numpy fill caches of their own
        rounds = [launched(launch) for _ in range(ROUNDS)]
    finally:
        tracemalloc.stop()
    peaks, kept = zip(*rounds, strict=True)
    # Other threads of the process allocate as well; what a launch allocates is in every round.
    assert min(peaks) < LIMIT_BYTES
    assert min(kept) < KEPT_BYTES


def launched(launch):
    """Launch some times; return how many bytes were allocated at most meanwhile, and are after."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(LAUNCHES):
        launch()
    after, peak = tracemalloc.get_traced_memory()
    return peak - before, after - before
