"""What sums of float32 lose, and how long they take, kernel by kernel.

    python benchmarks/bench_sums.py [--sizes 10000 100000 1000000] [--other CHECKOUT] [--only TEXT]

Each kernel sums uniform numbers of one sign, and equal numbers, whose rounding errors do not
cancel; the worst relative error of all results is against sums in long double. With --other the
same is measured with the sources of another checkout, whose kernels are planned by `Kernel.plan`
too, in turns with these, so that both see the machine in the same state. Times are the shortest of
many launches, on one thread. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROUNDS, SECONDS_PER_ROUND = 7, 0.02
Arrays = tuple[np.ndarray, ...]
Case = tuple[str, str, dict[str, object], Arrays, Callable[[Arrays], Arrays]]


def main() -> None:
    """Print the table, or answer as one of the two processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--other", type=Path, help="a checkout to compare with")
    parser.add_argument("--only", default="", help="part of the names of the kernels")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(args.root))
    (answer if args.answers else compare)(args)


def compare(args: argparse.Namespace) -> None:
    roots = [args.root] if args.other is None else [args.other, args.root]
    workers = [_worker(args, root) for root in roots]
    print(f"{platform.processor() or platform.machine()}, {_processor()}, one thread\n")
    names = ["here"] if args.other is None else ["there", "here"]
    print("| kernel | operand |" + "".join(f" error {n} | us {n} |" for n in names) + " ratio |")
    print("|---|---|" + "---|---|" * len(names) + "---|")
    worst = [0.0] * len(names)
    while True:
        answers = [_asked(worker, "next") for worker in workers]
        if not answers[0]:
            break
        label, operand = answers[0].split("|")[:2]
        errors = [float(answer.split("|")[2]) for answer in answers]
        times = [math.inf] * len(workers)
        for _ in range(ROUNDS):
            for i, worker in enumerate(workers):
                times[i] = min(times[i], float(_asked(worker, "time")))
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        cells = "".join(f" {e:.1e} | {t:.1f} |" for e, t in zip(errors, times, strict=True))
        print(f"| {label} | {operand} |{cells} {times[-1] / times[0]:.2f} |", flush=True)
    print("| worst | |" + "".join(f" {e:.1e} | |" for e in worst) + " |")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else "unknown processor"


def _worker(args: argparse.Namespace, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--answers", "--root", str(root), "--only", args.only]
    command += ["--sizes", *map(str, args.sizes)]
    pipe = subprocess.PIPE
    environ = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)


def _asked(worker: subprocess.Popen[str], question: str) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(question + "\n")
    worker.stdin.flush()
    return worker.stdout.readline().strip()


def answer(args: argparse.Namespace) -> None:
    """Answer "next" with the error of the next case, and "time" with a time of it in us."""
    from actors.kernels.common.host_memory import quiet_floating_point
    from actors.kernels.library import runtime
    from actors.kernels.library import runtime as toolchain

    quiet_floating_point()
    tools = toolchain.find_toolchain(os.environ, Path(tempfile.mkdtemp()))
    cases = _cases(args.sizes, args.only, tools)
    launch: Callable[[], None] = lambda: None  # noqa: E731
    for line in sys.stdin:
        if line.strip() == "time":
            print(f"{_time_us(launch):.3f}", flush=True)
            continue
        label, operand, error, launch = next(cases, ("", "", 0.0, launch))
        print(f"{label}|{operand}|{error}" if label else "", flush=True)
    runtime.disable()


def _cases(
    sizes: list[int], only: str, found: object
) -> Iterator[tuple[str, str, float, Callable[[], None]]]:
    from actors.kernels.library import runtime

    for path in ("numpy", "native"):
        if path == "native":
            if found is None:
                return
            runtime.enable(found, 1)
        for size in sizes:
            for case in _sums(size):
                label = f"{path} {case[0]}"
                if only in label:
                    yield _measured(label, case)


def _measured(label: str, case: Case) -> tuple[str, str, float, Callable[[], None]]:
    _, op, attrs, arrays, oracle = case
    worst, launch = 0.0, None
    for equal in (True, False):
        operands = tuple(_filled(x, equal) for x in arrays)
        launch, outputs = _bound(op, attrs, operands)
        launch()
        for got, want in zip(outputs, oracle(operands), strict=False):
            error = np.abs(got.astype(np.float64) - want) / np.maximum(np.abs(want), 1e-300)
            worst = max(worst, float(np.max(np.nan_to_num(error))))
    assert launch is not None
    return label, "x".join(map(str, arrays[0].shape)), worst, launch


def _filled(x: np.ndarray, equal: bool) -> np.ndarray:
    if x.dtype != np.float32 or x.ndim == 0:
        return x
    if equal:
        return np.full_like(x, 0.1)
    return np.random.default_rng(1).random(x.shape, np.float32) + np.float32(0.5)


def _sums(size: int) -> Iterator[Case]:
    """Return the kernels that sum about `size` numbers for a result, with what they should give."""
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    over = lambda *axes: {"axes": axes, "keepdims": False}  # noqa: E731
    wide, c = lambda x: x.astype(np.float64), 16
    for op in ("sum", "mean"):
        f = getattr(np, op)
        for name, shape, axes in (
            ("all", (size,), (0,)),
            ("last axis", (3, size), (1,)),
            ("first axis", (size, c), (0,)),
            ("first axis of 1", (size, 1), (0,)),
            ("middle axis", (3, size, 5), (1,)),
            ("outer axes", (size // 10, 5, 10), (0, 2)),
            ("two axes", (size // 10, 10), (0, 1)),
        ):
            yield (
                f"{op} {name}",
                op,
                over(*axes),
                (zeros(*shape),),
                (lambda given, f=f, axes=axes: (_exact(given[0], axes, f is np.mean),)),
            )
    softmax = {"scale": 1.0, "causal": False}
    yield (
        "softmax",
        "softmax",
        softmax,
        (zeros(3, size),),
        (lambda g: (np.exp(wide(g[0])) / _exact(np.exp(wide(g[0])), (1,), False)[:, None],)),
    )
    ids = (zeros(size, c), np.zeros(size, np.int64))
    yield (
        "embedding_grad",
        "embedding_grad",
        {"rows": 1},
        ids,
        (lambda g: (_exact(g[0], (0,), False)[None],)),
    )


def _exact(x: np.ndarray, axes: tuple[int, ...], is_mean: bool) -> np.ndarray:
    """Return sums in long double, which has 11 more bits than what is measured needs."""
    total = x.astype(np.longdouble).sum(axes)
    count = math.prod(x.shape[axis] for axis in axes) if is_mean else 1
    return np.asarray(total / count, np.float64)


def _bound(op: str, attrs: dict[str, object], arrays: Arrays) -> tuple[Callable[[], None], Arrays]:
    import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
    from compiler.fusion import fuse
    from compiler.graph.graph import GraphBuilder, Output
    from compiler.graph.registry import find_op
    from compiler.ops.primitives.sources import INPUT

    b = GraphBuilder()
    values = [
        b.emit_one(INPUT, name=str(i), dtype=str(x.dtype), shape=x.shape)
        for i, x in enumerate(arrays)
    ]
    b.outputs = [Output(str(i), v) for i, v in enumerate(b.emit(find_op(op), values, attrs))]
    graph = fuse.run(b.freeze())
    held: dict[int, np.ndarray] = {}
    launches = []
    for node in graph.nodes:
        if node.op is INPUT:
            held[node.outputs[0]] = arrays[int(node.attrs["name"])]
            continue
        launches.append(_launch(graph, node, held))
    outputs = tuple(held[output.value] for output in graph.outputs)

    def run() -> None:
        for launch in launches:
            launch()

    return run, outputs


def _launch(graph: object, node: object, held: dict[int, np.ndarray]) -> Callable[[], None]:
    from actors.kernels.common.kernel import Operand, require_plan
    from actors.kernels.host import catalogue
    from compiler.contract.types import numpy_dtype

    types = graph.types
    inputs = [held[v] for v in node.inputs]
    out_types = [types[v] for v in node.outputs]
    name = node.op.name
    attrs = dict(node.attrs)
    if name == "reshape":
        outputs = [inputs[0].reshape(out_types[0].shape)]
    else:
        outputs = [np.zeros(t.shape, numpy_dtype(t.dtype)) for t in out_types]
    held.update(zip(node.outputs, outputs, strict=True))
    if name == "reshape":
        return lambda: None
    reads = tuple(Operand(types[v], 0, x.strides) for v, x in zip(node.inputs, inputs, strict=True))
    writes = tuple(Operand(t, 0, x.strides) for t, x in zip(out_types, outputs, strict=True))
    kernel, needs = catalogue.select_kernel(name, attrs, reads, writes)
    raw = np.zeros(needs.workspace_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    workspace = raw[start : start + needs.workspace_bytes] if needs.workspace_bytes else None
    plan = require_plan(catalogue.kernels_by_name()[kernel], attrs, reads, writes)
    return plan.bind(tuple(inputs), tuple(outputs), workspace)


def _time_us(launch: Callable[[], None]) -> float:
    """Return the shortest of many single launches: a loaded machine lengthens most of them."""
    launch()
    best, end = math.inf, time.perf_counter() + SECONDS_PER_ROUND
    while True:
        begin = time.perf_counter()
        launch()
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > end:
            return best * 1e6


if __name__ == "__main__":
    main()
