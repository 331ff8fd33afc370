"""Times of the host kernels at the shapes of the character GPT, as a Markdown table.

Batch 32, sequence 64, width 128, 4 heads, 2 blocks, vocabulary 128, float32. On a quiet machine:
`python benchmarks/bench_kernels.py`. Each row is the best of several rounds; `calls` is how
often a training step makes the launch, so the last column adds up to the step's time in kernels.
`peak` is what tracemalloc saw during one launch.

The last line says how much of all cores other processes used. Above a few percent the rows that
run BLAS on several threads are not to be believed: a thread that loses its core holds up the rest.
"""

from __future__ import annotations

import resource
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.kernels import catalogue
from actors.kernels.floating_point import quiet_floating_point
from actors.kernels.kernel import Attrs, Operand
from actors.protocol import Array, Launch
from compiler.types import DType, TensorType

ROUNDS, SECONDS_PER_ROUND = 7, 0.02
BATCH, TIME, WIDTH, HEADS, BLOCKS, VOCABULARY = 32, 64, 128, 4, 2, 128
TOKENS, HIDDEN, PARAMETERS = BATCH * TIME, 4 * WIDTH, 437_376

Arrays = tuple[Array, ...]
Case = tuple[str, int, str, Attrs, Arrays, Arrays]


def main() -> None:
    """Print the table."""
    quiet_floating_point()
    print("| kernel | call | scratch KiB | ms | peak KiB | calls | step ms |")
    print("|---|---|---|---|---|---|---|")
    total, before = 0.0, cpu_seconds()
    for op, calls, note, attrs, inputs, outputs in cases():
        launch, scratch_bytes = bind(op, attrs, inputs, outputs)
        ms, peak = best_ms(launch), peak_bytes(launch)
        total += ms * calls
        print(
            f"| {op} | {note} | {scratch_bytes / 1024:.0f} | {ms:.3f} | {peak / 1024:.1f} |"
            f" {calls} | {ms * calls:.2f} |"
        )
    print(f"| all | | | | | | {total:.1f} |")
    all_cores, idle, own = [b - a for a, b in zip(before, cpu_seconds(), strict=True)]
    print(f"\nOther processes used {(all_cores - idle - own) / all_cores:.0%} of all cores.")


def cpu_seconds() -> tuple[float, float, float]:
    """Return seconds of all cores, of idleness, and of this process (Linux)."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return sum(ticks) / 100, (ticks[3] + ticks[4]) / 100, usage.ru_utime + usage.ru_stime


def cases() -> Iterator[Case]:
    yield from products()
    yield from attention()
    yield from rows()
    yield from elementwise()
    yield from updates()


def products() -> Iterator[Case]:
    x, h, w = floats(TOKENS, WIDTH), floats(TOKENS, HIDDEN), floats(WIDTH, HIDDEN)
    square, qkv = floats(WIDTH, WIDTH), floats(WIDTH, 3 * WIDTH)
    wide = floats(TOKENS, 3 * WIDTH)
    yield "matmul", BLOCKS, "[2048,128][128,512]", {}, (x, w), like(h)
    yield "matmul", BLOCKS, "[2048,512][512,128]", {}, (h, floats(HIDDEN, WIDTH)), like(x)
    yield "matmul", BLOCKS, "[2048,512][128,512]^T", {}, (h, w.T), like(x)
    yield "matmul", BLOCKS, "[2048,128][512,128]^T", {}, (x, floats(HIDDEN, WIDTH).T), like(h)
    yield "matmul", BLOCKS, "[2048,128]^T[2048,512]", {}, (x.T, h), like(w)
    yield "matmul", BLOCKS, "[2048,512]^T[2048,128]", {}, (h.T, x), like(w.T.copy())
    yield "matmul", BLOCKS, "[32,64,128][128,384]", {}, (folded(x), qkv), like(folded(wide))
    yield "matmul", BLOCKS, "[2048,384][128,384]^T", {}, (wide, qkv.T), like(x)
    yield "matmul", BLOCKS, "[2048,128]^T[2048,384]", {}, (x.T, wide), like(qkv)
    yield "matmul", 2 * BLOCKS + 2, "[2048,128][128,128](^T)", {}, (x, square.T), like(x)
    yield "matmul", BLOCKS + 1, "[2048,128]^T[2048,128]", {}, (x.T, x + 1), like(square)


def attention() -> Iterator[Case]:
    heads = floats(BATCH, TIME, HEADS, WIDTH // HEADS)
    q, k = heads.transpose(0, 2, 1, 3), (heads + 1).transpose(0, 2, 3, 1)
    scores = floats(BATCH, HEADS, TIME, TIME)
    out = (np.empty_like(heads).transpose(0, 2, 1, 3),)
    soft: Attrs = {"scale": 0.17, "causal": True}
    yield "matmul", 2 * BLOCKS, "heads q k^T", {}, (q, k), like(scores)
    yield "matmul", 2 * BLOCKS, "scores times v", {}, (scores, q), out
    yield "matmul", 2 * BLOCKS, "scores^T times q", {}, (scores.swapaxes(2, 3), q), out
    yield "softmax", BLOCKS, "[32,4,64,64] causal", soft, (scores,), like(scores)
    yield "softmax", 0, "the same, far from zero", soft, (scores * 2000,), like(scores)
    yield "softmax_grad", BLOCKS, "[32,4,64,64]", {"scale": 0.17}, (scores, scores), like(scores)


def rows() -> Iterator[Case]:
    x, row, column = floats(TOKENS, WIDTH), floats(WIDTH), np.abs(floats(TOKENS))
    ids = np.arange(TOKENS) * 37 % VOCABULARY
    table = floats(VOCABULARY, WIDTH)
    norms, eps = 2 * BLOCKS + 1, {"eps": 1e-5}
    columns: Attrs = {"axes": (0,), "keepdims": False}
    grads = (x, x, row, column, column)
    yield "layer_norm", norms, "[2048,128]", eps, (x, row, row), like(x, column, column)
    yield "layer_norm_grad", norms, "[2048,128]", {}, grads, like(x, row, row)
    yield "embedding", 1, "[128,128], 2048 ids", {}, (table, ids), like(x)
    yield "embedding_grad", 1, "[2048,128] to 128 rows", {"rows": VOCABULARY}, (x, ids), like(table)
    yield "sum", 2 * BLOCKS, "[2048,128] columns", columns, (x,), like(row)
    hidden = floats(TOKENS, HIDDEN)
    yield "sum", BLOCKS, "[2048,512] columns", columns, (hidden,), like(floats(HIDDEN))
    yield "sum", 0, "[2048,512] rows", {"axes": (1,), "keepdims": False}, (hidden,), like(column)


def elementwise() -> Iterator[Case]:
    x, h, row, wide = floats(TOKENS, WIDTH), floats(TOKENS, HIDDEN), floats(WIDTH), floats(HIDDEN)
    step = np.array(1, np.int64)
    yield "gelu", BLOCKS, "[2048,512]", {}, (h,), like(h)
    yield "gelu_grad", BLOCKS, "[2048,512]", {}, (h, h), like(h)
    yield "relu", 0, "[2048,512]", {}, (h,), like(h)
    yield "relu_grad", 0, "[2048,512]", {}, (h, h), like(h)
    yield "silu", 0, "[2048,512]", {}, (h,), like(h)
    yield "where", 0, "[2048,512]", {}, (h > 0, h, h), like(h)
    yield "add", 2 * BLOCKS + 1, "[2048,128] + [128]", {}, (x, row), like(x)
    yield "add", BLOCKS, "[2048,512] + [512]", {}, (h, wide), like(h)
    yield "add", 4 * BLOCKS, "[2048,128] + [2048,128]", {}, (x, x), like(x)
    yield "copy", 0, "[2048,128]", {}, (x,), like(x)
    heads = floats(BATCH, TIME, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)
    yield "copy", 0, "[32,4,64,32] heads", {}, (heads,), like(heads)
    yield "dropout", 0, "[2048,128]", {"p": 0.1, "key": 1}, (x, step, step), like(x)


def updates() -> Iterator[Case]:
    lr, step = np.array(1e-3, np.float32), np.array(5, np.int64)
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    p, g, m, v = [np.abs(floats(PARAMETERS)) for _ in range(4)]
    yield "adamw_update", 1, f"{PARAMETERS:,} in one", attrs, (p, g, m, v, lr, step), (p, m, v)
    p, g, m, v = [np.abs(floats(WIDTH)) for _ in range(4)]
    yield "adamw_update", 20, "[128] each", attrs, (p, g, m, v, lr, step), (p, m, v)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def folded(x: Array) -> Array:
    return x.reshape(BATCH, TIME, -1)


def like(*arrays: Array) -> Arrays:
    return tuple([np.empty(x.shape, x.dtype) for x in arrays])


def operand(x: Array) -> Operand:
    return Operand(TensorType(DType(x.dtype.name), x.shape), 0, x.strides)


def bind(op: str, attrs: Attrs, inputs: Arrays, outputs: Arrays) -> tuple[Launch, int]:
    operands = tuple(map(operand, inputs)), tuple(map(operand, outputs))
    name, needs = catalogue.choose(op, attrs, *operands)
    raw = np.zeros(needs.workspace_bytes + 64, np.uint8)
    workspace = raw[-raw.ctypes.data % 64 :]
    launch = catalogue.binders()[name].bind(attrs, inputs, outputs, workspace)
    return launch, needs.workspace_bytes


def best_ms(launch: Launch) -> float:
    launch()
    start = time.perf_counter()
    launch()
    count = max(1, int(SECONDS_PER_ROUND / max(time.perf_counter() - start, 1e-7)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            launch()
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e3


def peak_bytes(launch: Launch) -> int:
    tracemalloc.start()
    launch()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    launch()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak


if __name__ == "__main__":
    main()
